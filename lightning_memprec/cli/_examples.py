"""Examples that ``--help`` shows of each subcommand."""

from __future__ import annotations

import argparse
import textwrap

__all__ = ["EXAMPLES", "show_examples"]

EXAMPLES: dict[str, tuple[str, ...]] = {
    "estimate": (
        "lightning-memprec estimate --config run.yaml --cli train:main --device H100-80GB",
        'lightning-memprec estimate --config run.yaml --device-memory 20GiB --html report.html',
    ),
    "plan": (
        "lightning-memprec plan --config run.yaml --devices A100-80GB --num-devices 1,2,4,8",
        'lightning-memprec plan --config run.yaml --devices "RTX 4090,L4-24GB" --batch 8,16 --recipes as-is,bf16-mixed',
    ),
    "report": (
        "lightning-memprec report preflight.json",
        "lightning-memprec report preflight.json --out report.html",
    ),
    "formula": (
        "lightning-memprec formula --parameters 7B --recipe half-master-adam",
        "lightning-memprec formula --parameters 7B --zero-stage 3 --device-memory 24GiB",
    ),
    "devices": ("lightning-memprec devices", "lightning-memprec devices --json"),
    "precision": (
        "lightning-memprec precision",
        "lightning-memprec precision --config run.yaml --cli train:main --device V100-32GB",
    ),
    "inspect": ("lightning-memprec inspect last.ckpt",),
    "export": ("lightning-memprec export last.ckpt model.safetensors --dtype bfloat16",),
    "quantize": ("lightning-memprec quantize last.ckpt --model train:Net --out int8",),
}  # fmt: skip


def show_examples(parser: argparse.ArgumentParser, lines: tuple[str, ...]) -> None:
    """Put examples before what else ends a subcommand's help.

    Args:
        parser: Of the subcommand.
        lines: One command each.
    """
    shown = "\n".join(["examples:", *(f"  {line}" for line in lines)])
    epilog = parser.epilog or ""
    if parser.formatter_class is not argparse.RawDescriptionHelpFormatter:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.description = textwrap.fill(parser.description or "", 80)
        epilog = textwrap.fill(epilog, 80)
    parser.epilog = f"{shown}\n\n{epilog}".rstrip()
