"""``lightning-memprec estimate``: will the run of a LightningCLI configuration fit, without running it."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memprec.cli._messages import as_options

if TYPE_CHECKING:
    from lightning_memprec.cli._config import RunConfig
    from lightning_memprec.memory.result import MemoryEstimate, Remedy
    from lightning_memprec.report.verdict import Verdict

__all__ = ["EXIT_CODES", "add_parser", "run"]

EXIT_CODES = {"fits": 0, "overflow": 3, "tight": 4, "undetermined": 5}
_USAGE = 2


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "estimate",
        help="exact estimate of the run that a LightningCLI configuration describes",
        description="Trace one training step of a LightningCLI configuration without memory, without a GPU\n"
        "and without training, and say whether it fits.",
        epilog="Arguments after `--` go to the LightningCLI: `-- --trainer.precision=bf16-mixed`.\n\n"
        "exit codes: 0 fits; 3 does not fit; 4 fits only inside the safety margin; 5 undetermined;\n"
        "2 bad usage.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="YAML", help="configuration of the run")
    add("--cli", metavar="MODULE:NAME", help="your LightningCLI class, or the function that makes it")
    add("--model", metavar="CLASS_PATH", help="LightningModule, where the configuration does not name it")
    add("--data", metavar="CLASS_PATH", help="LightningDataModule, where the configuration does not name it")
    add(
        "--device",
        metavar="NAME",
        help='device to plan for, such as "H100-80GB"; default: the accelerator\'s',
    )
    add(
        "--device-memory",
        metavar="SIZE",
        help='memory to judge against, such as "24GiB"; default: the device\'s',
    )
    add("--safety-margin", type=float, metavar="FRACTION", help="fraction to keep free (default: 0.05)")
    add(
        "--batch-spec",
        metavar="YAML",
        help='the batch in words, such as "[float32[8, 3, 224, 224], int64[8]]"',
    )
    add(
        "--sample-batches",
        type=int,
        metavar="COUNT",
        help="how many of the first batches to look at; the largest is estimated (default: 8)",
    )
    add("--no-remedies", action="store_true", help="do not look for changes that would make it fit")
    add(
        "--remedy",
        type=int,
        metavar="N",
        help="the change whose lines to print below the table (default: the first, if it is enough)",
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--html", metavar="FILE", help="write the report as a page, too")
    add(
        "--snapshot",
        metavar="FILE",
        help="write the predicted run as a memory snapshot for https://pytorch.org/memory_viz, too",
    )
    add("overrides", nargs="*", metavar="-- ARGUMENT", help="arguments for the LightningCLI")


def run(args: argparse.Namespace) -> int:
    """Carry the command out.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code; see :data:`EXIT_CODES`.
    """
    # Late, so that `--help` answers at once.
    from lightning_memprec.cli._config import UsageError, read_run_config

    try:
        config = read_run_config(
            args.config, cli=args.cli, model=args.model, data=args.data, overrides=args.overrides
        )
        return _judge(config, args)
    except UsageError as error:
        message = str(error)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        message = as_options(error, args)
    print(f"lightning-memprec estimate: error: {message}", file=sys.stderr)
    return _USAGE


def _judge(config: RunConfig, args: argparse.Namespace) -> int:
    from lightning_memprec._batch import BatchUnavailableError, parse_batch_spec
    from lightning_memprec._errors import MemPrecError
    from lightning_memprec._progress import Progress
    from lightning_memprec.cli._batch_spec import read_batch_spec
    from lightning_memprec.cli._config import UsageError
    from lightning_memprec.cli._run_plan import plan_run, preflight_settings
    from lightning_memprec.memory.estimate import estimate_plan
    from lightning_memprec.memory.largest_batch import find_largest_batch, has_room
    from lightning_memprec.memory.remedies import suggest_remedies
    from lightning_memprec.report.verdict import judge

    settings = preflight_settings(config)
    device = args.device or settings.get("device")
    capacity = _capacity(device, args.device_memory or settings.get("device_memory"))
    margin = args.safety_margin if args.safety_margin is not None else settings.get("safety_margin", 0.05)
    spec = read_batch_spec(args.batch_spec) if args.batch_spec else settings.get("batch_spec")
    sample_batches = (
        args.sample_batches if args.sample_batches is not None else settings.get("sample_batches", 8)
    )
    if sample_batches < 1:
        raise UsageError(f"`--sample-batches` must be at least 1, got {sample_batches}.")
    if args.remedy is not None and args.remedy < 1:
        raise UsageError(f"`--remedy` counts from 1, got {args.remedy}.")
    judge(None, None, safety_margin=margin)
    if spec is not None:
        parse_batch_spec(spec)
    try:
        # What the user's classes print does not belong into the report.
        with redirect_stdout(sys.stderr), Progress("Tracing the run"):
            planned = plan_run(config, device=device, batch_spec=spec, sample_batches=sample_batches)
            estimate = estimate_plan(planned.plan)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        # Whatever the user's own classes raise: without an estimate a gate must stay closed.
        known = isinstance(error, (MemPrecError, BatchUnavailableError))
        reason = as_options(error, args) if known else f"{type(error).__name__}: {error}"
        verdict = judge(
            None, capacity, safety_margin=margin, when="estimate", reason=f"{reason.rstrip('.')}."
        )
        return _print(args, None, verdict, (), ())
    reason = "no capacity to judge against. Give `--device` or `--device-memory`." if capacity is None else ""
    need = estimate.minimum_device_bytes
    verdict = judge(need, capacity, safety_margin=margin, when="estimate", reason=reason)
    remedies: tuple[Remedy, ...] = ()
    exceeded = verdict.status in ("tight", "overflow")
    budget = int((capacity or 0) * (1.0 - margin))
    if not args.no_remedies and (exceeded or (verdict.status == "fits" and has_room(need, budget))):
        with redirect_stdout(sys.stderr), Progress("Looking for the largest batch that fits") as progress:
            largest = find_largest_batch(planned.plan, estimate, budget)
            verdict = replace(verdict, largest_batch=largest)
            if exceeded:
                progress.say("Looking for changes that would help")
                remedies = suggest_remedies(
                    planned.plan, estimate, capacity or 0, safety_margin=margin, thorough=True
                )
    if args.remedy is not None and args.remedy > len(remedies):
        raise UsageError(_no_such_change(args.remedy, len(remedies)))
    return _print(args, estimate, verdict, remedies, planned.notes)


def _no_such_change(number: int, known: int) -> str:
    if not known:
        return f"`--remedy {number}` names no change: none was looked for or found. Leave the option out."
    return f"`--remedy {number}` names no change: there are {known}. Give a number from 1 to {known}."


def _capacity(device: str | None, device_memory: int | str | None) -> int | None:
    from lightning_memprec._devices import find_device
    from lightning_memprec._units import parse_bytes

    otherwise = "give its memory by `--device-memory` alone"
    spec = find_device(device, otherwise=otherwise) if device not in (None, "cuda", "cpu") else None
    if device_memory is not None:
        return parse_bytes(device_memory)
    return spec.memory_bytes if spec is not None else None


def _print(
    args: argparse.Namespace,
    estimate: MemoryEstimate | None,
    verdict: Verdict,
    remedies: tuple[Remedy, ...],
    notes: tuple[str, ...],
) -> int:
    from lightning_memprec.report.content import verdict_sentence
    from lightning_memprec.report.file import report_as_dict, write_text
    from lightning_memprec.report.html import format_html
    from lightning_memprec.report.text import format_estimate

    if args.html is not None:
        write_text(args.html, format_html(estimate, verdict, remedies, notes))
    if args.snapshot is not None and estimate is not None:
        estimate.save_snapshot(args.snapshot)
    if args.json:
        print(json.dumps(report_as_dict(estimate, verdict, remedies, notes), indent=2))
    elif estimate is None:
        print(as_options(verdict_sentence(verdict), args))
    else:
        print(as_options(format_estimate(estimate, verdict, remedies, notes), args))
        _print_lines(remedies, args.remedy)
    return EXIT_CODES[verdict.status]


def _print_lines(remedies: tuple[Remedy, ...], number: int | None) -> None:
    """Print what to paste for one of the changes."""
    if number is None:
        number = 1 if remedies and remedies[0].fits else 0
    if not number:
        return
    remedy = remedies[number - 1]
    print(f"\nChange {number}, {remedy.description}, in Python:\n")
    print(textwrap.indent(remedy.snippet, "    "))
    # A file of comments alone lays nothing over.
    if any(line and not line.startswith("#") for line in remedy.config.splitlines()):
        print("\nIn a file of its own, to lay over the configuration with a second `--config`:\n")
        print(textwrap.indent(remedy.config, "    "))
