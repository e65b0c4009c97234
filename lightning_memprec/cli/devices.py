"""``lightning-memprec devices``: the names that ``--device`` knows, with what they offer."""

from __future__ import annotations

import argparse
import json
from typing import Any

from lightning_memprec._devices import DEVICES, DeviceSpec
from lightning_memprec._units import format_bytes

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "devices",
        help="devices that can be planned for, with their memory",
        description="List the devices that `--device` and `MemoryPreflight(device=...)` know by name.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Carry the command out.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code, 0.
    """
    if args.json:
        print(json.dumps([_as_dict(spec) for spec in DEVICES.values()], indent=2))
        return 0
    print(f"{'name':<18}{'memory':>12}{'context':>13}  {'generation':<11}{'capability':<12}bfloat16")
    for spec in DEVICES.values():
        capability = ".".join(map(str, spec.compute_capability))
        print(
            f"{spec.name:<18}{format_bytes(spec.memory_bytes):>12}{format_bytes(spec.context_bytes):>13}  "
            f"{spec.generation:<11}{capability:<12}{'native' if spec.native_bf16 else 'emulated'}"
        )
    print(
        "\nmemory: as the driver reports it; context: what a process takes of it before any tensor, modelled."
    )
    return 0


def _as_dict(spec: DeviceSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "memory_bytes": spec.memory_bytes,
        "context_bytes": spec.context_bytes,
        "generation": spec.generation,
        "compute_capability": list(spec.compute_capability),
        "native_bf16": spec.native_bf16,
        "aliases": list(spec.aliases),
        "source": spec.source,
    }
