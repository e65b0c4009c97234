"""``lightning-memprec formula``: the closed form, from a parameter count or a transformer's sizes."""

from __future__ import annotations

import argparse
import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from lightning_memprec._devices import DeviceSpec, find_device
from lightning_memprec._units import GIB, format_bytes, parse_bytes
from lightning_memprec.cli._messages import refuse
from lightning_memprec.memory.formula import (
    DEVICE_COUNT_REASONS,
    FormulaEstimate,
    Offload,
    estimate_formula,
    fewest_devices,
    minimum_devices,
)
from lightning_memprec.memory.recipes import RECIPES
from lightning_memprec.memory.transformer import ActivationFormula, TransformerShape

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EXIT_CODES", "add_parser", "run"]

EXIT_CODES = {"fits": 0, "overflow": 3}

_COUNT_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_SHAPE_OPTIONS = ("layers", "hidden", "heads", "sequence")
_CLOSING = (
    "",
    "This is a closed form: no model was run. `lightning-memprec estimate` traces your own training step.",
)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "formula",
        help="closed-form estimate from a parameter count or a transformer's sizes",
        description="Estimate by closed forms: bytes per parameter, and activations of a transformer.\n"
        "Rough and instant; `lightning-memprec estimate` traces your own training step.",
        epilog="recipes, bytes per parameter:\n"
        + "\n".join(f"  {r.name:<24}{r.bytes_per_parameter:>6.4g}  {r.description}" for r in RECIPES.values())
        + "\n\nexit codes: 0 fits, or no device to compare with; 3 does not fit; 2 bad usage.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--parameters", type=_count, metavar="N", help="parameter count, such as 7B; default: from the sizes")
    add("--layers", type=int, metavar="L", help="layers of the transformer")
    add("--hidden", type=int, metavar="H", help="width of the transformer")
    add("--heads", type=int, metavar="A", help="attention heads")
    add("--sequence", type=int, metavar="S", help="tokens of one sequence")
    add("--batch", type=int, default=1, metavar="B", help="sequences on one device (default: 1)")
    add("--vocabulary", type=int, default=0, metavar="V", help="vocabulary, for embedding, logits and loss")
    add(
        "--recipe",
        choices=RECIPES,
        default="fp32-adam",
        metavar="NAME",
        help="see below (default: fp32-adam)",
    )
    add("--recompute", action="store_true", help="full activation recomputation (checkpointing)")
    add("--fused-attention", action="store_true", help="leave out the attention scores (flash attention)")
    add(
        "--activation-formula",
        choices=get_args(ActivationFormula),
        default="uniform",
        help="uniform: 19 BSH + 3 BAS^2 elements a layer (default); published: arXiv 2205.05198",
    )
    add("--devices", type=int, default=1, metavar="N", help="data-parallel devices (default: 1)")
    add("--zero-stage", type=int, choices=range(4), default=0, help="ZeRO stage (default: 0)")
    add("--offload", choices=get_args(Offload), default="none", help="moved to host memory")
    add("--device", type=_device, metavar="NAME", help="compare with this device, such as H100-80GB")
    add(
        "--device-memory",
        type=_size,
        metavar="SIZE",
        help='memory to compare with, such as "24GiB"; default: the device\'s',
    )
    add("--json", action="store_true", help="print JSON, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    """Print the estimate.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code: 0, or 3 if it does not fit what it is compared with; see :data:`EXIT_CODES`. 2 after a
        message on standard error if a value is out of range.
    """
    try:
        shape = _shape(args)
        formula = partial(
            estimate_formula,
            parameters=args.parameters,
            shape=shape,
            recipe=args.recipe,
            recompute=args.recompute,
            fused_attention=args.fused_attention,
            activation_formula=args.activation_formula,
            offload=args.offload,
        )
        estimate = formula(devices=args.devices, zero_stage=args.zero_stage)
    except ValueError as error:
        return refuse("formula", error, args)
    device = _compare(args, estimate, formula)
    if args.json:
        print(json.dumps(estimate.to_dict() | {"device": device}, indent=2))
    else:
        print("\n".join([*_table(estimate), *_not_counted(shape), *_verdict(device), *_CLOSING]))
    return EXIT_CODES["fits" if device is None or device["fits"] else "overflow"]


def _count(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbt]?)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"cannot read {text!r} as a count; write it like 7B, 350M or 7000000000"
        )
    return round(float(match[1]) * _COUNT_SUFFIXES[match[2]])


def _device(name: str) -> DeviceSpec:
    try:
        return find_device(name, otherwise="give its memory by `--device-memory` alone")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _shape(args: argparse.Namespace) -> TransformerShape | None:
    missing = [f"--{name}" for name in _SHAPE_OPTIONS if getattr(args, name) is None]
    if len(missing) == len(_SHAPE_OPTIONS):
        if args.parameters is None:
            raise ValueError(f"No model was described. Give --parameters, or {', '.join(missing)}, or both.")
        return None
    if missing:
        raise ValueError(f"The transformer's sizes are incomplete. Add {', '.join(missing)}.")
    return TransformerShape(
        **{name: getattr(args, name) for name in (*_SHAPE_OPTIONS, "batch", "vocabulary")},
    )


def _compare(
    args: argparse.Namespace, estimate: FormulaEstimate, formula: Callable[..., FormulaEstimate]
) -> dict[str, Any] | None:
    """Hold the estimate against a device; ``None`` if none was named, nor a size."""
    if args.device is None and args.device_memory is None:
        return None
    context_bytes = 0 if args.device is None else args.device.context_bytes
    memory_bytes = args.device_memory or args.device.memory_bytes
    return {
        "name": "the device" if args.device is None else args.device.name,
        "memory_bytes": memory_bytes,
        "context_bytes": context_bytes,
        "fits": estimate.total_bytes + context_bytes <= memory_bytes,
        "zero_stage": args.zero_stage,
        "minimum_devices": (
            fewest_devices(
                lambda n: formula(devices=n, zero_stage=args.zero_stage).total_bytes + context_bytes,
                memory_bytes,
            )
            if args.zero_stage
            else minimum_devices(formula().total_bytes, memory_bytes)
        ),
    }


def _table(estimate: FormulaEstimate) -> list[str]:
    recipe, total = estimate.recipe, estimate.total_bytes
    shards = f", {estimate.devices} devices, ZeRO stage {estimate.zero_stage}" if estimate.devices > 1 else ""
    each = f"{recipe.name} ({recipe.bytes_per_parameter:.4g} B each)"
    lines = [
        f"{estimate.parameters:,} parameters, {each}{shards}",
        "",
        f"{'on one device':<20}{'GiB':>10}{'GB':>10}{'share':>9}",
    ]
    for name, size in [*estimate.items(), ("total", total)]:
        share = f"{size / total:.1%}" if total else "-"
        lines.append(f"{name:<20}{size / GIB:>10.2f}{size / 1e9:>10.2f}{share:>9}")
    if estimate.host_bytes:
        lines.append(
            f"{'in host memory':<20}{estimate.host_bytes / GIB:>10.2f}{estimate.host_bytes / 1e9:>10.2f}"
        )
    return lines


def _not_counted(shape: TransformerShape | None) -> list[str]:
    if shape is None:
        sizes = ", ".join(f"--{name}" for name in _SHAPE_OPTIONS)
        return ["", f"Activations are not counted: add {sizes}."]
    if not shape.vocabulary:
        return ["", "Logits and loss are not counted: add --vocabulary."]
    return []


def _verdict(device: dict[str, Any] | None) -> list[str]:
    if device is None:
        return []
    verdict = "fits" if device["fits"] else "does not fit"
    name, count, stage = device["name"], device["minimum_devices"], device["zero_stage"]
    context = f", of which about {format_bytes(device['context_bytes'])} go to context and kernels"
    lines = [
        "",
        f"{name[0].upper()}{name[1:]} offers {format_bytes(device['memory_bytes'])}"
        f"{context if device['context_bytes'] else ''}: {verdict}.",
    ]
    if count is None:
        lines.append(
            f"No number of them is enough: what ZeRO stage {stage} leaves on each is too much. "
            "Take a higher stage, --offload or --recompute."
        )
        return lines
    basis = f"With ZeRO stage {stage}, the run" if stage else "Divided evenly, the unsharded total"
    return [
        *lines,
        f"{basis} needs at least {count} of them. A real run can need more:",
        *(f"- {reason}" for reason in DEVICE_COUNT_REASONS),
    ]
