"""``lightning-memprec plan``: what fits where, over batches, sequence lengths, recipes and numbers of devices."""

from __future__ import annotations

import argparse
import json
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memprec.cli._messages import as_options

if TYPE_CHECKING:
    from lightning_memprec.memory.plan import TrainingPlan
    from lightning_memprec.memory.planning import PlanAxes, PlanCell

__all__ = ["EXIT_CODES", "add_parser", "run"]

EXIT_CODES = {"planned": 0, "nothing fits": 3, "undetermined": 5}
_USAGE = 2
# Fields of the axes by the arguments that fill them.
_OPTION_OF = {"`batches`": "`batch`", "`sequences`": "`sequence`", "`device_counts`": "`num_devices`"}
_AXES = re.compile("|".join(_OPTION_OF))


@dataclass(frozen=True)
class Target:
    """A device to plan for.

    Args:
        name: As it was written.
        capacity_bytes: What it offers.
        device: Whose kernels are traced.
    """

    name: str
    capacity_bytes: int
    device: str


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "plan",
        help="what fits where: batches, sequence lengths, recipes and numbers of devices",
        description="Trace a LightningCLI configuration with other batches, sequence lengths, recipes and numbers of\n"
        "devices, and show what fits which device, and how few devices are enough.",
        epilog="A recipe is a precision, or `as-is`, and options joined by `+`: `checkpointing`, `8bit`, `fused`,\n"
        "`lora`; for example `bf16-mixed+checkpointing`. Arguments after `--` go to the LightningCLI.\n\n"
        "exit codes: 0 something fits; 3 nothing fits; 5 undetermined; 2 bad usage.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="YAML", help="configuration of the run")
    add(
        "--devices",
        type=_words,
        required=True,
        metavar="LIST",
        help='memory sizes or names of devices, such as "80GiB,24GiB" or "H100-80GB,RTX4090-24GB"',
    )
    add("--batch", type=_numbers, default=(), metavar="LIST", help="batch sizes on one device, such as 1,2,4")
    add(
        "--sequence",
        type=_numbers,
        default=(),
        metavar="LIST",
        help="tokens of a sequence, such as 1024,4096",
    )
    add("--recipes", type=_words, default=("as-is",), metavar="LIST", help="see below (default: as-is)")
    add("--num-devices", type=_numbers, default=(1,), metavar="LIST", help="numbers of devices (default: 1)")
    add(
        "--strategy", default="fsdp", metavar="NAME", help="how several devices share the run (default: fsdp)"
    )
    add(
        "--safety-margin",
        type=float,
        default=0.05,
        metavar="FRACTION",
        help="fraction to keep free (default: 0.05)",
    )
    add(
        "--batch-spec",
        metavar="YAML",
        help='the batch in words, such as "[float32[8, 3, 224, 224], int64[8]]"',
    )
    add("--cli", metavar="MODULE:NAME", help="your LightningCLI class, or the function that makes it")
    add("--model", metavar="CLASS_PATH", help="LightningModule, where the configuration does not name it")
    add("--data", metavar="CLASS_PATH", help="LightningDataModule, where the configuration does not name it")
    add("--plot", type=Path, metavar="FILE", help="also draw the table, such as plan.png")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("overrides", nargs="*", metavar="-- ARGUMENT", help="arguments for the LightningCLI")


def run(args: argparse.Namespace) -> int:
    """Carry the command out.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code; see :data:`EXIT_CODES`, and 2 for bad usage.
    """
    # Late, so that `--help` answers at once.
    from lightning_memprec._batch import BatchUnavailableError
    from lightning_memprec.cli._config import UsageError

    try:
        return _plan(args)
    except UsageError as error:
        message = str(error)
    except (ValueError, OSError, ModuleNotFoundError, BatchUnavailableError) as error:
        message = as_options(_AXES.sub(lambda match: _OPTION_OF[match[0]], str(error)), args)
    print(f"lightning-memprec plan: error: {message}", file=sys.stderr)
    return _USAGE


def _plan(args: argparse.Namespace) -> int:
    from lightning_memprec.cli._batch_spec import read_batch_spec
    from lightning_memprec.cli._config import read_run_config
    from lightning_memprec.cli._run_plan import plan_run, preflight_settings
    from lightning_memprec.memory.planning import PlanAxes
    from lightning_memprec.report.plan_table import check_picture
    from lightning_memprec.report.verdict import judge

    judge(None, None, safety_margin=args.safety_margin)
    if args.plot is not None:
        check_picture(args.plot)  # Before minutes of traces.
    axes = PlanAxes(
        batches=args.batch,
        sequences=args.sequence,
        recipes=args.recipes,
        device_counts=args.num_devices,
        strategy=args.strategy,
    )
    config = read_run_config(
        args.config, cli=args.cli, model=args.model, data=args.data, overrides=args.overrides
    )
    settings = preflight_settings(config)
    targets = [_target(text, settings.get("device") or "cuda") for text in args.devices]
    spec = read_batch_spec(args.batch_spec) if args.batch_spec else settings.get("batch_spec")
    # What the user's classes print does not belong into the table.
    with redirect_stdout(sys.stderr):
        # The numbers of devices are those of the table.
        planned = plan_run(config, device=targets[0].device, batch_spec=spec, num_devices=1)
        found = _trace(planned.plan, axes, targets)
    return _print(args, axes, targets, found, planned.notes)


def _target(text: str, device: str) -> Target:
    from lightning_memprec._devices import find_device
    from lightning_memprec._units import parse_bytes

    if text[:1].isdigit():
        return Target(text, parse_bytes(text), device)
    spec = find_device(text, otherwise="give its memory, such as 24GiB")
    return Target(spec.name, spec.memory_bytes, spec.name)


def _trace(plan: TrainingPlan, axes: PlanAxes, targets: list[Target]) -> dict[str, list[PlanCell]]:
    """Return the cells by the device whose kernels were traced."""
    from lightning_memprec.memory.planning import plan_cells

    found = {}
    for device in dict.fromkeys(target.device for target in targets):
        largest = max(target.capacity_bytes for target in targets if target.device == device)
        found[device] = plan_cells(replace(plan, device=device), axes, largest_bytes=largest)
    return found


def _print(
    args: argparse.Namespace,
    axes: PlanAxes,
    targets: list[Target],
    found: dict[str, list[PlanCell]],
    notes: tuple[str, ...],
) -> int:
    from lightning_memprec.report.plan_table import format_plan, plan_as_dict, save_picture

    columns = [(target.name, target.capacity_bytes, found[target.device]) for target in targets]
    if args.json:
        print(json.dumps(plan_as_dict(columns, args.safety_margin, notes), indent=2))
    else:
        print(format_plan(columns, axes.strategy, args.safety_margin, notes))
    if args.plot is not None:
        save_picture(args.plot, columns)
    cells = [(cell, capacity) for _, capacity, cells in columns for cell in cells]
    if any(cell.fits(capacity, args.safety_margin) for cell, capacity in cells):
        return EXIT_CODES["planned"]
    refused = any(cell.basis == "refused" for cell, _ in cells)
    return EXIT_CODES["undetermined" if refused else "nothing fits"]


def _words(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not words:
        raise argparse.ArgumentTypeError("give at least one, separated by commas")
    return words


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers separated by commas, got {text!r}"
        ) from None
