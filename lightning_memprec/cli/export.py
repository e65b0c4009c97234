"""``lightning-memprec export``: write the weights of a checkpoint as safetensors."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lightning_memprec._units import format_bytes
from lightning_memprec.cli._messages import refuse

if TYPE_CHECKING:
    from lightning_memprec.master_weights.export import ExportedWeights

__all__ = ["add_parser", "run"]

# The choices stand here once more, because those of `export_weights` come with torch; a test compares them.
DTYPES = ("float32", "bfloat16", "float16", "float64", "keep")
SOURCES = ("auto", "averaged", "current")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "export",
        help="write a checkpoint's weights as safetensors, in a chosen dtype",
        description="Write the weights of a checkpoint as safetensors. One tensor is in memory at a time.",
        epilog="exit codes: 0 written; 2 the checkpoint or an argument is refused, nothing was written",
    )
    add = parser.add_argument
    add("checkpoint", help=".ckpt, state dict, .safetensors, or a folder of shards (also of FSDP)")
    add("out", help="a file that ends in .safetensors, or a folder for model.safetensors")
    add("--dtype", choices=DTYPES, default="float32", help="of floating-point weights (default: float32)")
    add(
        "--source",
        choices=SOURCES,
        default="auto",
        help="averaged weights or the last (default: averaged if any)",
    )
    add("--strip-prefix", default="", metavar="TEXT", help="remove this from names, such as model.")
    add("--max-shard-size", default="5GiB", metavar="SIZE", help="largest file (default: 5GiB)")
    add("--overwrite", action="store_true", help="replace an earlier export")


def run(args: argparse.Namespace) -> int:
    """Export.

    Args:
        args: Parsed arguments.

    Returns:
        Exit code: 0, or 2 after a message on standard error if nothing was written.
    """
    from lightning_memprec.master_weights.export import export_weights

    try:
        result = export_weights(
            args.checkpoint,
            args.out,
            args.dtype,
            source=args.source,
            strip_prefix=args.strip_prefix,
            max_shard_size=args.max_shard_size,
            overwrite=args.overwrite,
        )
    except (ValueError, OverflowError, OSError) as error:
        return refuse("export", error, args)
    print("\n".join(_lines(result)))
    return 0


def _lines(result: ExportedWeights) -> list[str]:
    which = "averaged weights" if result.averaged else "weights"
    lines = [str(path) for path in result.files]
    lines.append(f"{result.tensors} tensors, {format_bytes(result.total_bytes)}, {which}")
    if result.tied:
        lines.append("tied, written once: " + ", ".join(f"{a} = {name}" for a, name in result.tied.items()))
    if result.left_out:
        lines.append(f"left out, without the prefix: {', '.join(result.left_out)}")
    return lines
