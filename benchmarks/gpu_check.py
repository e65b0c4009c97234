"""Predicted beside measured memory on the GPU of this machine, in a few minutes.

Run: ``python -m benchmarks.gpu_check [--only PATTERN] [--json PATH]``, or with ``--dry-run`` on a machine without a
GPU, where tiny steps run on the CPU. Each training step has a process of its own, with a Lightning Trainer.

Compared are the allocated and the reserved peak and what the driver shows; the types in which products run and the
attention kernels that are taken; and for some the verdict: with a little more than the predicted minimum a run has to
end well, with less than what it allocates it has to run out of memory.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks._machine import describe_machine
from benchmarks.gpu_check_cases import CASES, Case, Choices, collecting
from lightning_memprec._devices import find_device
from lightning_memprec._errors import MemPrecError
from lightning_memprec._units import MIB
from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.result import MemoryEstimate

__all__ = ["Measured", "Row", "check"]

_STEPS = 3  # The third step may still reserve more; later ones repeat it.
_ABOVE, _BELOW = 1.02, 0.9
_CHILD_SECONDS = 120


@dataclass(frozen=True)
class Measured:
    """Figures of one run, predicted or measured; ``None`` where there is no such figure.

    Attributes:
        allocated_bytes: Peak of live blocks.
        reserved_bytes: Peak of what the allocator holds.
        device_bytes: What the driver shows beyond what it showed before.
        product_types: In which types products ran in the forward pass.
        attention: Which fused attention kernels were called.
    """

    allocated_bytes: int
    reserved_bytes: int | None
    device_bytes: int | None
    product_types: list[str]
    attention: list[str]


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        name: Of the case.
        predicted: By the estimate.
        measured: By the run.
        runs_above: Whether a run on a little more than the predicted minimum ended well; ``None``: not tried.
        dies_below: Whether a run on less than it allocates ran out of memory; ``None``: not tried.
        seconds: The whole check took.
    """

    name: str
    predicted: Measured
    measured: Measured
    runs_above: bool | None
    dies_below: bool | None
    seconds: float

    @property
    def choices_agree(self) -> bool:
        """Whether types and attention kernels were predicted."""
        one, other = self.predicted, self.measured
        return one.product_types == other.product_types and one.attention == other.attention

    def error(self, figure: str) -> float | None:
        """(predicted - measured) / measured of ``"allocated"``, ``"reserved"`` or ``"device"``."""
        predicted, measured = (getattr(side, f"{figure}_bytes") for side in (self.predicted, self.measured))
        return None if predicted is None or measured is None else (predicted - measured) / measured


# -- prediction ----------------------------------------------------------------------------------------


def _estimate(case: Case, device: str, tiny: bool, steps: int = _STEPS) -> MemoryEstimate:
    batch = case.batch(tiny)
    precision = case.precision_on(device)
    return estimate_memory(case.run(tiny), batch, precision=precision, device=device, steps=steps)


def _predict(case: Case, device: str, tiny: bool) -> tuple[Measured, int]:
    """Return the predicted figures and the smallest capacity of the allocator."""
    estimate = _estimate(case, device, tiny)
    choices = Choices()
    collecting.append(choices)
    try:
        _estimate(case, device, tiny, steps=1)
    finally:
        collecting.pop()
    on_cpu = device == "cpu"
    figures = Measured(
        estimate.peak_allocated_bytes,
        None if on_cpu else estimate.peak_reserved_bytes,
        None if on_cpu or device == "cuda" else estimate.peak_device_bytes,
        sorted(choices.product_types),
        sorted(choices.attention),
    )
    return figures, estimate.minimum_reserved_bytes


def _catalogue_name() -> str:
    """Name this machine's GPU as the catalogue does; one it does not know is a generic one."""
    try:
        return find_device(torch.cuda.get_device_name()).name
    except ValueError:
        return "cuda"


# -- reality -------------------------------------------------------------------------------------------


def _fit(case: Case, accelerator: str, tiny: bool, steps: int) -> None:
    """Train; the Trainer and the module are gone afterwards."""
    batch = case.batch(tiny)
    loader: DataLoader[Any] = DataLoader([batch] * steps, batch_size=None)  # type: ignore[arg-type]
    pl.Trainer(
        max_steps=steps,
        precision=case.precision_on(accelerator),
        accelerator=accelerator,
        devices=1,
        barebones=True,
    ).fit(case.run(tiny), loader)


def _collect_choices(case: Case, accelerator: str, tiny: bool) -> Choices:
    choices = Choices()
    collecting.append(choices)
    try:
        _fit(case, accelerator, tiny, steps=1)
    finally:
        collecting.pop()
    return choices


def _measure_gpu(case: Case, used_before_bytes: int) -> Measured:
    _fit(case, "gpu", False, _STEPS)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    # Cached segments are still held, but what was given back under pressure is not.
    device = total_bytes - free_bytes - used_before_bytes
    choices = _collect_choices(case, "gpu", False)
    return Measured(allocated, reserved, device, sorted(choices.product_types), sorted(choices.attention))


def _measure_cpu(case: Case) -> Measured:
    from tests.memory.zoo.reference import peak_of

    peak = peak_of(lambda: _fit(case, "cpu", True, _STEPS))
    choices = _collect_choices(case, "cpu", True)
    return Measured(peak, None, None, sorted(choices.product_types), sorted(choices.attention))


def _child(case: Case, output: Path, used_before_bytes: int, limit_bytes: int | None) -> None:
    """Run one case in this process; an error of CUDA leaves it with another status than 0."""
    if limit_bytes is None:
        output.write_text(json.dumps(asdict(_measure_gpu(case, used_before_bytes))), encoding="utf-8")
        return
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes))
    try:
        _fit(case, "gpu", False, _STEPS)
        outcome = "ran"
    except torch.OutOfMemoryError:
        outcome = "out of memory"
    output.write_text(json.dumps(outcome), encoding="utf-8")


def _in_child(case: Case, limit_bytes: int | None = None) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--child", case.name, "--json", str(output)]
        command += ["--used-before", str(_used_bytes())]
        command += [] if limit_bytes is None else ["--limit", str(limit_bytes)]
        subprocess.run(command, check=True, timeout=_CHILD_SECONDS, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text(encoding="utf-8"))


def _used_bytes() -> int:
    """Ask the driver what is in use before a process starts; this process makes no context."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout) * MIB


# -- the check -----------------------------------------------------------------------------------------


def check(case: Case, device: str, *, dry_run: bool) -> Row:
    """Predict and measure one case.

    Args:
        case: What to train.
        device: Name for the estimate: of the catalogue, ``"cuda"`` or ``"cpu"``.
        dry_run: Whether a tiny step runs on the CPU, in this process.
    """
    start = time.perf_counter()
    predicted, minimum_bytes = _predict(case, device, tiny=dry_run)
    runs_above = dies_below = None
    if dry_run:
        measured = _measure_cpu(case)
    else:
        measured = Measured(**_in_child(case))
        if case.verdict:
            runs_above = _in_child(case, int(_ABOVE * minimum_bytes)) == "ran"
            dies_below = _in_child(case, int(_BELOW * measured.allocated_bytes)) == "out of memory"
    return Row(case.name, predicted, measured, runs_above, dies_below, time.perf_counter() - start)


_FIGURES = ("allocated", "reserved", "device")
_HEADER = (
    f"{'case':26s}" + "".join(f"{f:>12s} MiB {'error':>7s}" for f in _FIGURES) + "  choices  verdict     s"
)


def _line(row: Row) -> str:
    cells = []
    for figure in _FIGURES:
        size, error = getattr(row.measured, f"{figure}_bytes"), row.error(figure)
        cells.append(
            f"{'' if size is None else f'{size / MIB:.1f}':>16s} {'' if error is None else f'{error:+.1%}':>7s}"
        )
    choices = "agree" if row.choices_agree else "DIFFER"
    verdicts = [v for v in (row.runs_above, row.dies_below) if v is not None]
    verdict = "" if not verdicts else ("right" if all(verdicts) else "WRONG")
    return f"{row.name:26s}{''.join(cells)}  {choices:7s}  {verdict:7s} {row.seconds:5.1f}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="pattern of case names, such as 'gpt2-*'")
    parser.add_argument("--dry-run", action="store_true", help="tiny steps on the CPU")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--used-before", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = _parse(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.child:
        case = next(c for c in CASES if c.name == options.child)
        _child(case, options.json, options.used_before, options.limit)
        return
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("No CUDA device is visible here. Run with `--dry-run`, or on a machine with a GPU.")
    device = "cpu" if options.dry_run else _catalogue_name()
    print(describe_machine())
    print(f"device {device}\n{_HEADER}")
    rows = []
    for case in CASES:
        if fnmatch.fnmatch(case.name, options.only):
            try:
                rows.append(check(case, device, dry_run=options.dry_run))
            except (subprocess.SubprocessError, MemPrecError) as error:  # One case must not cost the others.
                print(f"{case.name:26s} failed: {error}", flush=True)
                continue
            print(_line(rows[-1]), flush=True)
    if options.json:
        report = {"machine": describe_machine(), "device": device, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
