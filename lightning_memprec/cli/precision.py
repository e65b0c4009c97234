"""``lightning-memprec precision``: which precision suits a device, and a run on it."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memprec._text import wrap
from lightning_memprec.cli._messages import as_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprec.cli._config import RunConfig
    from lightning_memprec.cli._run_plan import PlannedRun
    from lightning_memprec.memory.result import MemoryEstimate
    from lightning_memprec.scaling.capabilities import Capabilities
    from lightning_memprec.scaling.choose import PrecisionChoice
    from lightning_memprec.scaling.comparison import PrecisionComparison

__all__ = ["EXIT_CODES", "add_parser", "run"]

EXIT_CODES = {"chosen": 0, "undetermined": 5}
_USAGE = 2
_WHAT_IT_SAVES = (
    "Each at its largest; fixed are parameters, buffers, gradients and optimizer states. Autocast (`-mixed`) keeps "
    "weights, gradients and states in FP32: it saves activations, and nothing that is fixed. Half weights with FP32 "
    "masters (`-master`) take the 16 bytes a parameter of FP32 AdamW, too, and halve activations and the weights in "
    "use."
)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "precision",
        help="which precision suits this machine or a named card, and a run on it",
        description="Choose a precision by what the hardware computes natively. With a LightningCLI\n"
        "configuration: the memory of each precision, and with --compare a few real steps in each.",
        epilog="Arguments after `--` go to the LightningCLI: `-- --model.width=64`.\n\n"
        "exit codes: 0 chosen, and everything that was asked for is shown; 5 chosen, but the run could not\n"
        "be estimated or compared; 2 bad usage.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", metavar="NAME", help='device to choose for, such as "T4-16GB"; default: this machine\'s')
    add("--config", type=Path, metavar="YAML", help="configuration of a run")
    add("--cli", metavar="MODULE:NAME", help="your LightningCLI class, or the function that makes it")
    add("--model", metavar="CLASS_PATH", help="LightningModule, where the configuration does not name it")
    add("--data", metavar="CLASS_PATH", help="LightningDataModule, where the configuration does not name it")
    add("--compare", action="store_true", help="train a few steps in each precision and compare the losses")
    add("--steps", type=int, default=10, metavar="N", help="steps of the comparison (default: 10)")
    add("--json", action="store_true", help="print JSON instead of text")
    add("overrides", nargs="*", metavar="-- ARGUMENT", help="arguments for the LightningCLI")


def run(args: argparse.Namespace) -> int:
    """Carry the command out.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code; see :data:`EXIT_CODES`, and 2 for bad usage.
    """
    # Late, so that `--help` answers at once.
    from lightning_memprec.cli._config import UsageError
    from lightning_memprec.scaling.choose import choose_precision

    try:
        if args.config is not None:
            if args.steps < 1:
                raise UsageError(f"`--steps` must be at least 1, got {args.steps}.")
            return _examine(args)
        if args.compare:
            raise UsageError("`--compare` trains a run: name its configuration by `--config`.")
        return _print(args, choose_precision(args.device), {}, None, ())
    except UsageError as error:
        message = str(error)
    except (ValueError, ModuleNotFoundError) as error:
        message = as_options(error, args)
    print(f"lightning-memprec precision: error: {message}", file=sys.stderr)
    return _USAGE


def _examine(args: argparse.Namespace) -> int:
    """Estimate and, if asked, train the run of a configuration."""
    from lightning_memprec.cli._config import UsageError, read_run_config
    from lightning_memprec.cli._run_plan import plan_run, preflight_settings
    from lightning_memprec.scaling.choose import choose_precision

    config = read_run_config(
        args.config, cli=args.cli, model=args.model, data=args.data, overrides=args.overrides
    )
    device = args.device or preflight_settings(config).get("device") or _own_device(config, args.config)
    capabilities = choose_precision(device).capabilities
    estimates: dict[str, MemoryEstimate] = {}
    comparison = None
    faults: list[str] = []
    try:
        # What the user's classes print does not belong into the report.
        with redirect_stdout(sys.stderr):
            planned = plan_run(config, device=_planned_device(device, capabilities))
            estimates = _estimates(planned, faults)
            comparison = _compare(config, planned, args.steps, capabilities) if args.compare else None
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        # Whatever the user's own classes raise; the choice by hardware stands without them.
        faults.append(f"{type(error).__name__}: {as_options(error, args)}")
    choice = choose_precision(capabilities=capabilities, memory=estimates)
    return _print(args, choice, estimates, comparison, tuple(faults))


def _own_device(config: RunConfig, path: Path) -> str | None:
    """Return the device of this machine that the run asks for; ``None`` takes what the machine has."""
    import torch

    from lightning_memprec.cli._config import UsageError

    accelerator = config.trainer.get("accelerator")
    if accelerator == "cpu":
        return "cpu"
    has_one = torch.accelerator.current_accelerator(check_available=True) is not None
    if accelerator not in (None, "auto") and not has_one:
        raise UsageError(
            f"`{path}` asks for `accelerator: {accelerator}`, and this machine has none. Name the card that the run "
            "will have by `--device`, such as `--device A100-80GB`."
        )
    return None


def _planned_device(name: str | None, capabilities: Capabilities) -> str:
    if name is not None and name.partition(":")[0] not in ("cpu", "cuda", "mps", "xpu"):
        return name
    return "cpu" if capabilities.kind == "cpu" else "cuda"


def _estimates(planned: PlannedRun, faults: list[str]) -> dict[str, MemoryEstimate]:
    from dataclasses import replace

    from lightning_memprec._errors import MemPrecError
    from lightning_memprec.memory.estimate import estimate_plan
    from lightning_memprec.scaling.short_run import MODES

    found = {}
    for precision in MODES:
        try:
            found[precision] = estimate_plan(replace(planned.plan, precision=precision))
        except MemPrecError as error:
            faults.append(f"No estimate in {precision}: {error}")
    return found


def _compare(
    config: RunConfig, planned: PlannedRun, steps: int, capabilities: Capabilities
) -> PrecisionComparison:
    """Train the configured model on its own data, on this machine's accelerator or else on the CPU."""
    import torch

    from lightning_memprec._prepare import prepare_copy
    from lightning_memprec.scaling.compare import compare_precisions

    device = torch.device("cpu")
    if config.trainer.get("accelerator") != "cpu":
        device = torch.accelerator.current_accelerator(check_available=True) or device
    plan = planned.plan
    torch.manual_seed(0)
    module: Any = config.build_model()
    module._trainer = plan.trainer
    prepare_copy(module, trainer=plan.trainer, datamodule=plan.trainer.datamodule)
    module.to(device)
    return compare_precisions(
        module,
        list(_batches(module, plan.trainer.datamodule, device, steps)),
        optimizer=config.optimizer,
        steps=steps,
        gradient_clip_val=plan.gradient_clip_val,
        gradient_clip_algorithm=plan.gradient_clip_algorithm,
        capabilities=capabilities,
    )


def _batches(module: Any, datamodule: Any, device: Any, count: int) -> Iterator[Any]:
    """Read batches as a Trainer would, through the transfer hooks."""
    loader = (datamodule if datamodule is not None else module).train_dataloader()
    if isinstance(loader, (dict, list, tuple)):
        raise TypeError("the comparison reads one train loader, and this run has several")
    for _, batch in zip(range(count), loader, strict=False):
        batch = module.on_before_batch_transfer(batch, 0)
        batch = module.transfer_batch_to_device(batch, device, 0)
        yield module.on_after_batch_transfer(batch, 0)


def _print(
    args: argparse.Namespace,
    choice: PrecisionChoice,
    estimates: dict[str, MemoryEstimate],
    comparison: PrecisionComparison | None,
    faults: tuple[str, ...],
) -> int:
    memory = {name: estimate.minimum_device_bytes for name, estimate in estimates.items()}
    if args.json:
        report = {
            "choice": choice.to_dict(),
            "memory_bytes": memory,
            "comparison": comparison.to_dict() if comparison is not None else None,
            "faults": list(faults),
        }
        print(json.dumps(report, indent=2))
    else:
        print(
            "\n".join([str(choice), *_memory_lines(estimates, comparison), *_comparison(comparison, memory)])
        )
        for fault in faults:
            print(f"\nNot shown: {fault}")
    return EXIT_CODES["undetermined" if faults else "chosen"]


def _memory_lines(estimates: dict[str, MemoryEstimate], comparison: PrecisionComparison | None) -> list[str]:
    """List the memory of each precision, where the comparison has no column for it."""
    from lightning_memprec._units import format_bytes

    if not estimates or comparison is not None:
        return []
    device = next(iter(estimates.values())).device
    lines = [
        "",
        f"Memory of this run on {device}",
        f"  {'':<14}{'needed':>13}{'fixed':>13}{'activations':>14}",
    ]
    for name, estimate in estimates.items():
        parts = [point.breakdown for point in estimate.timeline]
        fixed = max((part.fixed_bytes for part in parts), default=0)
        activations = max((part.activations_bytes for part in parts), default=0)
        sizes = (estimate.minimum_device_bytes, fixed, activations)
        lines.append(
            f"  {name:<14}"
            + "".join(f"{format_bytes(size):>{13 + (k == 2)}}" for k, size in enumerate(sizes))
        )
    lines += ["", *wrap(_WHAT_IT_SAVES)]
    return lines


def _comparison(comparison: PrecisionComparison | None, memory: dict[str, int]) -> list[str]:
    return ["", comparison.table(memory)] if comparison is not None else []
