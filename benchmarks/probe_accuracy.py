"""Peaks that `probe_memory` extrapolates from small batches, beside those of full real steps on the CPU.

    python -m benchmarks.probe_accuracy [NAME ...]

The models are those of the accuracy tests (`tests/memory/zoo`). Printed is a row a model and the median error.
"""

from __future__ import annotations

import sys
import time
from statistics import median

from benchmarks._machine import describe_machine
from lightning_memprec.memory.probe import probe_memory
from tests.memory.zoo import ZOO, Case
from tests.memory.zoo.reference import measure


def probe(case: Case):
    module, batch = case.make()
    return probe_memory(
        module,
        batch,
        optimizer=case.optimizer,
        loss=case.loss,
        precision=case.precision,
        device="cpu",
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        gradient_clip_algorithm=case.clip_algorithm,
    )


def main(names: list[str]) -> None:
    print(describe_machine())
    print(f"\n{'model':40} {'error':>9} {'seconds':>8}")
    errors = []
    for case in ZOO:
        if names and case.name not in names:
            continue
        started = time.perf_counter()
        estimate = probe(case)
        seconds = time.perf_counter() - started
        error = estimate.peak_allocated_bytes / measure(case).peak_bytes - 1
        extrapolated = "extrapolated" in estimate.assumptions[0].text
        errors += [abs(error)] if extrapolated else []
        words = estimate.assumptions[0].text.partition(":")[0]
        print(f"{case.name:40} {error:+9.3%} {seconds:8.1f}  {words}", flush=True)
    if errors:
        print(
            f"\n{len(errors)} models extrapolated: median error {median(errors):.3%}, worst {max(errors):.3%}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
