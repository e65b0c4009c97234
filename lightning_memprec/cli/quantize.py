"""``lightning-memprec quantize``: write a checkpoint's weights as int8, one tensor in memory at a time."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memprec._units import format_bytes
from lightning_memprec.cli._messages import refuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from lightning_memprec._files.checkpoint_files import Checkpoint
    from lightning_memprec.quantization.progress import Progress
    from lightning_memprec.quantization.streaming import Streamed, StreamedTensor

__all__ = ["add_parser", "run"]

# The choices stand here once more, because their own modules import torch; a test compares them.
FORMATS = ("compressed-tensors", "bitsandbytes")
SOURCES = ("auto", "averaged", "current")
METHODS = ("weight_only", "absmax", "zeropoint", "vectorwise", "llm_int8")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "quantize",
        help="write a checkpoint's weights as int8",
        description="Quantize the weights of a checkpoint by rounding to nearest. One tensor is in memory at a time.",
        epilog="exit codes: 0 written; 2 the checkpoint, the model or an argument is refused, nothing was written",
    )
    add = parser.add_argument
    add("checkpoint", help=".ckpt, state dict, .safetensors, or a folder of shards (also of FSDP)")
    add(
        "--model", required=True, metavar="MODULE:NAME", help="class of the model, or function that builds it"
    )
    add(
        "--model-args",
        default="{}",
        metavar="JSON",
        help="keywords for it; default: the .ckpt's hyperparameters",
    )
    add("-o", "--out", required=True, help="a file that ends in .safetensors, or a folder")
    add(
        "--method",
        choices=METHODS,
        default="weight_only",
        help="default: weight_only; llm_int8 has no data here to keep exact outlier weights",
    )
    add(
        "--bits",
        type=int,
        metavar="N",
        help="width of the weights, 2 to 8, up to 4 of them packed; default: 8",
    )
    add("--group-size", type=int, metavar="N", help="weights of a channel that share a scale; default: all")
    add("--include", action="append", metavar="NAME", help="name, pattern or class of layers to quantize")
    add("--exclude", action="append", metavar="NAME", help="the same, to leave in floating point")
    add("--format", choices=FORMATS, default="compressed-tensors", help="keys of the tensors")
    add(
        "--source",
        choices=SOURCES,
        default="auto",
        help="averaged weights or the last (default: averaged if any)",
    )
    add(
        "--strip-prefix",
        default="",
        metavar="TEXT",
        help="take the weights under this prefix, such as model.",
    )
    add("--overwrite", action="store_true", help="replace an earlier file")


def run(args: argparse.Namespace) -> int:
    """Quantize.

    Args:
        args: Parsed arguments.

    Returns:
        Exit code: 0, or 2 after a message on standard error if nothing was written.
    """
    try:
        lines = _quantize(args)
    except (ValueError, OverflowError, OSError) as error:
        return refuse("quantize", error, args)
    print("\n".join(lines))
    return 0


def _quantize(args: argparse.Namespace) -> list[str]:
    from lightning_memprec._files.checkpoint_files import open_checkpoint
    from lightning_memprec.quantization.streaming import stream_quantized

    out = Path(args.out)
    if out.suffix == ".ckpt":
        raise ValueError(
            f"{args.out!r} would be a Lightning checkpoint, which is not written tensor by tensor. Give a folder,"
            " or a file that ends in .safetensors. `PostTrainingQuantization(filename='int8.ckpt')` writes one."
        )
    target = out if out.suffix == ".safetensors" else out / "model.safetensors"
    if target.exists() and not args.overwrite:
        raise FileExistsError(f"{str(target)!r} exists. Pass --overwrite, or choose another path.")
    checkpoint = open_checkpoint(args.checkpoint, args.source)
    weights = {
        name.removeprefix(args.strip_prefix): stored
        for name, stored in checkpoint.weights.items()
        if name.startswith(args.strip_prefix)
    }
    module = _model(args, checkpoint)
    bnb = args.format == "bitsandbytes"
    streamed = stream_quantized(
        module,
        weights,
        args.method,
        include=args.include or (["Linear"] if bnb else None),
        exclude=args.exclude,
        bits=args.bits,
        group_size=args.group_size,
    )
    _write(out, target, module, streamed, args.format)
    return _summary(target, streamed)


def _model(args: argparse.Namespace, checkpoint: Checkpoint) -> nn.Module:
    import torch

    from lightning_memprec.quantization.checkpoint_filling import arguments_for

    make = _import(args.model)
    keywords = json.loads(args.model_args)
    if not isinstance(keywords, dict):
        raise ValueError(f"--model-args must be a JSON object, got {args.model_args}.")
    arguments = arguments_for(make, checkpoint.contents.get("hyper_parameters")) | keywords

    def build() -> nn.Module:
        module: nn.Module = make(**arguments)
        configure = getattr(module, "configure_model", None)
        if callable(configure):
            configure()
        return module

    try:
        with torch.device("meta"):
            return build()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    try:
        module = build()
    except Exception as error:
        raise ValueError(
            f"{args.model} cannot be built: {type(error).__name__}: {error}. Give its arguments with --model-args, or"
            " name a function that builds it."
        ) from error
    print(f"The model takes memory, since it cannot be built on the meta device ({reason}).", file=sys.stderr)
    return module


def _import(path: str) -> Callable[..., Any]:
    if "" not in sys.path:
        sys.path.insert(0, "")  # As for a program started in this folder.
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"Cannot import {path!r}: {error}. Write it as package.module:Class.") from error
    if not callable(found):
        raise ValueError(f"{path!r} is no class and no function. Name what builds the model.")
    make: Callable[..., Any] = found
    return make


def _write(out: Path, target: Path, module: nn.Module, streamed: Streamed, format: Any) -> None:
    from lightning_memprec._files.atomic import replacing, write_json
    from lightning_memprec._files.safetensors_writer import OutputTensor, write_safetensors
    from lightning_memprec.quantization.checkpoint import describe, foreign_config, model_config
    from lightning_memprec.quantization.checkpoint_io import METADATA_KEY
    from lightning_memprec.quantization.compressed_tensors_format import stream_to_compressed_tensors
    from lightning_memprec.quantization.progress import Progress

    config = describe(streamed.layers, format) | {"tied": streamed.tied}
    foreign = foreign_config(module, streamed.layers, format)
    if out == target:
        config["quantization_config"] = foreign
    if format == "bitsandbytes":
        tensors = _under_bitsandbytes(streamed)
    else:
        tensors = stream_to_compressed_tensors(module, streamed.tensors, streamed.layers)
    metadata = {"format": "pt", METADATA_KEY: json.dumps(config), **streamed.tied}
    with Progress(len(tensors)) as progress, replacing(target) as file:
        output = {
            name: OutputTensor(tensor.dtype, tensor.shape, _watched(progress, name, tensor))
            for name, tensor in tensors.items()
        }
        write_safetensors(file, output, metadata)
    if out != target:
        write_json(out / "config.json", model_config(module) | {"quantization_config": foreign})


def _watched(progress: Progress, name: str, tensor: StreamedTensor) -> Callable[[], Tensor]:
    def read() -> Tensor:
        progress.step(name)
        return tensor.read()

    return read


def _under_bitsandbytes(streamed: Streamed) -> dict[str, Any]:
    from lightning_memprec.quantization.bitsandbytes_format import holds, stream_to_bitsandbytes

    unfit = [name for name, layer in streamed.layers.items() if not holds(layer)]
    if unfit:
        raise ValueError(
            f"bitsandbytes cannot hold {unfit[:5]}: it knows linear layers of 8 bits with one scale a row, symmetric."
            " Use --format compressed-tensors."
        )
    return stream_to_bitsandbytes(streamed.tensors, streamed.layers)


def _summary(target: Path, streamed: Streamed) -> list[str]:
    size_bytes = sum(tensor.shape.numel() * tensor.dtype.itemsize for tensor in streamed.tensors.values())
    bits = next(iter(streamed.layers.values())).scheme.bits
    what = "int8" if bits == 8 else f"{bits} bits"
    lines = [str(target), f"{len(streamed.layers)} layers in {what}, {format_bytes(size_bytes)} in all"]
    if streamed.tied:
        lines.append("tied, written once: " + ", ".join(f"{a} = {name}" for a, name in streamed.tied.items()))
    lines += [f"left in floating point: {name} ({reason})" for name, reason in streamed.left.items()]
    return lines
