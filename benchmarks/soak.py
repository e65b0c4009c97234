"""Random training runs on the CPU: what is estimated beside what they take.

Run: ``python -m benchmarks.soak --minutes 30 --seed 1``. Each run is drawn from its own seed: model, sizes, loss,
optimizer, precision, loop. It is estimated, trained for two real steps, and its memory is compared with the running
sum of the CPU allocator's events. A line that begins with ``miss`` or ``fault`` ends with the command that repeats it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from benchmarks._machine import describe_machine
from benchmarks._soak_runs import draw_run
from lightning_memprec import estimate_memory
from lightning_memprec._units import MIB
from tests.memory.zoo.case import Case
from tests.memory.zoo.comparison import Comparison, compare

__all__ = ["soak_one"]

_LIMIT = 0.02
_SMALLEST_BYTES = 4 * MIB  # Of smaller runs a relative error tells of blocks of 64 bytes.
_RUNS_OF_A_SEED = 1_000_000
_BETWEEN_READINGS = 50


@dataclass
class _Tally:
    """What a soak has seen."""

    errors: dict[str, list[float]] = field(default_factory=dict)
    misses: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    small: int = 0

    @property
    def compared(self) -> int:
        return sum(map(len, self.errors.values()))


def soak_one(seed: int) -> tuple[Comparison, dict[str, Any]]:
    """Draw one run, estimate it, train it and compare.

    Args:
        seed: The same seed draws the same run.

    Returns:
        The comparison, and what was drawn by name.
    """
    case, chosen = draw_run(seed)
    return compare(case), chosen


def _estimate_on_gpu(case: Case) -> None:
    """Estimate for a GPU too: nothing to compare with here, but it must not fail."""
    module, batch = case.make()
    estimate = estimate_memory(
        module, batch, optimizer=case.optimizer, loss=case.loss, precision=case.precision, device="A100-80GB",
        accumulate_grad_batches=case.accumulate, gradient_clip_val=case.clip,
        gradient_clip_algorithm=case.clip_algorithm,
    )  # fmt: skip
    # The minimum may be less than what is allocated: convolutions do with smaller workspaces.
    needed = max(estimate.peak_allocated_bytes, estimate.minimum_reserved_bytes)
    if not 0 < needed <= estimate.peak_reserved_bytes:
        raise AssertionError(f"{needed} B needed, {estimate.peak_reserved_bytes} B reserved")


def _resident_bytes() -> int:
    """Memory of this process, once what is free has gone back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def _in_words(chosen: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in chosen.items())


def _run(seed: int, tally: _Tally) -> None:
    chosen: dict[str, Any] = {}
    again = f"python -m benchmarks.soak --only {seed}"
    try:
        case, chosen = draw_run(seed)
        result = compare(case)
        _estimate_on_gpu(case)
    except Exception as error:
        tally.faults[type(error).__name__] += 1
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split())[:300]
        print(
            f"fault {type(error).__name__} {where.filename}:{where.lineno}: {said} | {_in_words(chosen)} | {again}",
            flush=True,
        )
        return
    if result.real.peak_bytes < _SMALLEST_BYTES:
        tally.small += 1
        return
    tally.errors.setdefault(chosen["family"], []).append(result.error)
    if abs(result.error) > _LIMIT:
        tally.misses += 1
        print(
            f"miss {result.error:+.2%} of {result.real.peak_bytes / MIB:.2f} MiB | {_in_words(chosen)} | {again}",
            flush=True,
        )


def _summary(tally: _Tally) -> list[str]:
    lines = [
        f"{tally.compared} runs compared, {tally.misses} misses over {_LIMIT:.0%}, {sum(tally.faults.values())} faults "
        f"{dict(tally.faults) or ''}, {tally.small} under {_SMALLEST_BYTES // MIB} MiB left out"
    ]
    for family, errors in sorted(tally.errors.items()):
        sizes = sorted(map(abs, errors))
        lines.append(f"{family:14s} {len(sizes):4d} runs, median {median(sizes):.3%}, worst {sizes[-1]:.3%}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="repeat one run, by its own seed")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(describe_machine())
    tally = _Tally()
    if arguments.only is not None:
        result, chosen = soak_one(arguments.only)
        print(_in_words(chosen))
        print(
            f"real {result.real.peak_bytes:,d} B, estimated {result.estimated_peak_bytes:,d} B, {result.error:+.3%}"
        )
        return
    end = time.monotonic() + 60 * arguments.minutes
    index, resident = 0, []
    while time.monotonic() < end:
        if index % _BETWEEN_READINGS == 0:
            resident.append(_resident_bytes())
            print(f"run {index}: {resident[-1] / MIB:.0f} MiB resident", file=sys.stderr, flush=True)
        _run(arguments.seed * _RUNS_OF_A_SEED + index, tally)
        index += 1
    resident.append(_resident_bytes())
    print("\n".join(_summary(tally)))
    # Libraries that models load and oneDNN's cache of compiled kernels fill up in the first runs.
    readings = " ".join(f"{size / MIB:.0f}" for size in resident)
    print(f"resident MiB at the start, every {_BETWEEN_READINGS} runs and at the end: {readings}")


if __name__ == "__main__":
    main()
