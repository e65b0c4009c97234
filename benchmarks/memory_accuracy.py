"""Estimated beside published measured peak memory on GPUs.

Run: ``python -m benchmarks.memory_accuracy [--only PATTERN] [--cudnn] [--json PATH]``. Nothing here touches a
device. No row was measured with the cuDNN that is installed here, and versions differ in the algorithms they
choose: without ``--cudnn`` the estimates know no workspaces of convolutions. Rows of LitGPT need ``litgpt``.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import logging
import math
import os
import statistics
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import patch

from benchmarks._machine import describe_machine
from benchmarks.published_peaks import PEAKS, PublishedPeak
from lightning_memprec._devices import _LOADED_KERNELS_BYTES, find_device
from lightning_memprec._units import GIB
from lightning_memprec.memory import cudnn
from lightning_memprec.memory.allocator import minimum_capacity, simulate
from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.events import MemoryEvents
from lightning_memprec.memory.steady import with_more_steps

__all__ = ["Scored", "Summary", "predict", "relative_error", "summarize"]

MARGIN = 0.08
_UNDER = 0.05


@dataclass(frozen=True)
class Scored:
    """One row with our estimate.

    Attributes:
        peak: The published row.
        estimated_bytes: Our figure for the quantity that was measured.
        needed_bytes: Smallest capacity of a device on which a run that ended out of memory would run; the
            estimate for other runs.
        seconds: Time the estimate took.
    """

    peak: PublishedPeak
    estimated_bytes: int
    needed_bytes: int
    seconds: float

    @property
    def error(self) -> float | None:
        """(estimate - measured) / measured; negative is under. ``None`` where nothing was measured."""
        return None if self.peak.measured_bytes is None else relative_error(self.estimated_bytes, self.peak)

    @property
    def verdict_right(self) -> bool | None:
        """For a run that ended out of memory: whether the estimate would have refused it."""
        if self.peak.measured_bytes is not None:
            return None
        return self.needed_bytes > find_device(self.peak.device).memory_bytes


@dataclass(frozen=True)
class Summary:
    """Figures over rows. Shares are fractions.

    Attributes:
        rows: Number of rows with a measured figure and an estimate.
        median: Of the absolute error.
        percentile_90: Of the absolute error.
        worst: Signed error of the row that is furthest off.
        under: Share of rows more than 5 % under.
        failures: Share of rows that need more than the estimate and its margin.
        asked_too_much: Mean of what estimate and margin ask for beyond the need, relative to the need.
    """

    rows: int
    median: float
    percentile_90: float
    worst: float
    under: float
    failures: float
    asked_too_much: float


def relative_error(estimated_bytes: int, peak: PublishedPeak) -> float:
    if peak.measured_bytes is None:
        raise ValueError(f"Row {peak.id} ended out of memory: it has a verdict and no error.")
    return (estimated_bytes - peak.measured_bytes) / peak.measured_bytes


def summarize(errors: Sequence[float], margin: float = MARGIN) -> Summary:
    """Reduce signed relative errors to the figures that estimators publish.

    Args:
        errors: (estimate - measured) / measured, one a row.
        margin: Share that is added to an estimate before it is asked for.

    Returns:
        The figures; the 90th percentile is the smallest error that at least 90 % of the rows do not exceed.
    """
    absolute = sorted(abs(e) for e in errors)
    asked = [(1 + e) * (1 + margin) - 1 for e in errors]
    return Summary(
        rows=len(errors),
        median=statistics.median(absolute),
        percentile_90=absolute[math.ceil(0.9 * len(absolute)) - 1],
        worst=max(errors, key=abs),
        under=sum(e < -_UNDER for e in errors) / len(errors),
        failures=sum(a < 0 for a in asked) / len(errors),
        asked_too_much=statistics.fmean(max(a, 0.0) for a in asked),
    )


def predict(peak: PublishedPeak) -> Scored:
    """Rebuild a run without storage and estimate the quantity that was measured."""
    start = time.perf_counter()
    with patch.dict(os.environ, peak.environment):
        estimate = estimate_memory(
            peak.model,
            peak.batch,
            optimizer=peak.optimizer,
            loss=peak.loss(),
            precision=peak.precision,
            device=peak.device,
            accumulate_grad_batches=peak.accumulate,
            gradient_clip_val=peak.clip,
        )
    assert estimate.events is not None
    estimated, needed = _quantity(peak, with_more_steps(estimate.events))
    return Scored(peak, estimated, needed, time.perf_counter() - start)


def _quantity(peak: PublishedPeak, events: MemoryEvents) -> tuple[int, int]:
    spec = find_device(peak.device)
    outside = {
        "device": spec.context_bytes,
        "device without context": _LOADED_KERNELS_BYTES,
        "reserved": 0,
        "allocated": 0,
    }[peak.quantity]
    # Near its capacity a device gives cached segments back, and less stays reserved.
    result = simulate(events, capacity_bytes=spec.memory_bytes - spec.context_bytes)
    if result.out_of_memory_event is not None:
        result = simulate(events)
    taken = result.peak_allocated_bytes if peak.quantity == "allocated" else result.peak_reserved_bytes
    estimated = taken + outside
    needed = estimated if peak.measured_bytes is not None else minimum_capacity(events) + spec.context_bytes
    return estimated, needed


_HEADER = f"{'row':18s} {'measured GiB':>12s} {'ours GiB':>9s} {'error':>7s} {'s':>5s}  peers"


def _line(scored: Scored) -> str:
    peak = scored.peak
    ours = f"{scored.estimated_bytes / GIB:9.3f}"
    if peak.measured_bytes is None:
        verdict = "refused, right" if scored.verdict_right else "let through, WRONG"
        return f"{peak.id:18s} {'out of mem.':>12s} {ours} {verdict}"
    peers = ", ".join(f"{name} {relative_error(size, peak):+.1%}" for name, size in peak.peers.items())
    return (
        f"{peak.id:18s} {peak.measured_bytes / GIB:12.3f} {ours} {scored.error:+7.1%} {scored.seconds:5.1f}  "
        f"{peers}"
    )


def _figures(name: str, errors: Sequence[float]) -> str:
    s = summarize(errors)
    return (
        f"{name:32s} {s.rows:3d} rows  median {s.median:6.2%}  90th {s.percentile_90:6.2%}  worst {s.worst:+7.2%}  "
        f"under by > {_UNDER:.0%}: {s.under:6.1%}  fails at +{MARGIN:.0%}: {s.failures:6.1%}  "
        f"asked too much: {s.asked_too_much:6.1%}"
    )


def _report(results: Sequence[Scored]) -> Iterable[str]:
    measured = [r for r in results if r.error is not None]
    if not measured:
        return
    yield _figures("ours, all rows", [r.error for r in measured if r.error is not None])
    for family in dict.fromkeys(r.peak.id.partition("-")[0] for r in measured):
        rows = [r for r in measured if r.peak.id.startswith(f"{family}-")]
        yield _figures(f"ours, {family}", [r.error for r in rows if r.error is not None])
    for peer in dict.fromkeys(name for r in measured for name in r.peak.peers):
        rows = [r for r in measured if peer in r.peak.peers]
        yield _figures(f"{peer}", [relative_error(r.peak.peers[peer], r.peak) for r in rows])
        yield _figures("  ours on the same rows", [r.error for r in rows if r.error is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="pattern of row names, such as 'xmem-*'")
    parser.add_argument("--cudnn", action="store_true", help="ask the installed cuDNN for its workspaces")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(describe_machine())
    print(_HEADER)
    results: list[Scored] = []
    for peak in PEAKS:
        if not fnmatch.fnmatch(peak.id, options.only):
            continue
        try:
            with nullcontext() if options.cudnn else patch.object(cudnn, "_library", lambda: None):
                results.append(predict(peak))
        except Exception as error:  # One row that cannot be rebuilt must not cost the others.
            print(f"{peak.id:18s} not rebuilt: {type(error).__name__}: {error}", flush=True)
            continue
        print(_line(results[-1]), flush=True)
        gc.collect()
    print("\n".join(_report(results)))
    if options.json:
        rows = [{"id": r.peak.id, "estimated_bytes": r.estimated_bytes, "error": r.error} for r in results]
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
