"""``lightning-memprec inspect``: what a checkpoint holds, with a verdict in words."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from lightning_memprec._units import format_bytes
from lightning_memprec.cli._messages import refuse
from lightning_memprec.cli.export import SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lightning_memprec.master_weights.inspect import CheckpointReport, DtypeTotal

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "inspect",
        help="tell whether a checkpoint holds FP32 master weights",
        description="Show dtypes, real or upcast FP32 weights, scaler and optimizer states of a checkpoint.",
        epilog="exit codes: 0 read; 2 the file is missing, damaged or unsafe",
    )
    parser.add_argument("checkpoint", help=".ckpt, state dict, .safetensors, or a folder of shards")
    parser.add_argument("--source", choices=SOURCES, default="auto", help="averaged weights or the last")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Args:
        args: Parsed arguments.

    Returns:
        Exit code: 0, or 2 after a message on standard error if the file cannot be read.
    """
    from lightning_memprec.master_weights.inspect import inspect_checkpoint

    try:
        report = inspect_checkpoint(args.checkpoint, args.source)
    except (ValueError, OSError) as error:
        return refuse("inspect", error, args)
    print(json.dumps(report.to_dict(), indent=2) if args.json else "\n".join(_lines(args.checkpoint, report)))
    return 0


def _lines(path: str, report: CheckpointReport) -> Iterator[str]:
    yield f"{path}: {', '.join(_origin(report))}"
    yield ""
    yield f"{'':<22}{'tensors':>9}{'elements':>16}{'size':>14}"
    yield from _table("weights", report.weights)
    yield from _table("optimizer", report.optimizer)
    if report.upcast_share is not None and not report.quantized:
        # Of the two half dtypes the one on which the verdict rests: many bfloat16 values are float16 values, too.
        yield f"FP32 weights that are {report.upcast_dtype} values: {report.upcast_share:.2%}"
    for key, state in report.scalers.items():
        yield f"scaler {key}: scale {state.get('scale'):g}, growth tracker {state.get('_growth_tracker')}"
    if report.has_average:
        yield f"averaged weights: present{', shown here' if report.averaged else ', not shown here'}"
    yield ""
    yield report.verdict


def _origin(report: CheckpointReport) -> Iterator[str]:
    yield report.kind
    if report.lightning_version is not None:
        yield f"Lightning {report.lightning_version}"
    if report.epoch is not None:
        yield f"epoch {report.epoch}"
    if report.global_step is not None:
        yield f"step {report.global_step}"


def _table(part: str, totals: Mapping[str, DtypeTotal]) -> Iterator[str]:
    for dtype, total in totals.items():
        size = format_bytes(total.size_bytes)
        yield f"{part:<10}{dtype:<12}{total.tensors:>9,}{total.elements:>16,}{size:>14}"
