"""Estimated beside real peak memory of training steps on the CPU.

Run: ``python -m benchmarks.cpu_accuracy``, or with the names of some cases. Reality is the running sum of the
allocations that the profiler records.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from statistics import median

from benchmarks._machine import describe_machine
from lightning_memprec._units import MIB
from tests.memory.zoo import ZOO
from tests.memory.zoo.comparison import Comparison, compare

_HEADER = (
    f"{'case':40s} {'family':12s} {'real MiB':>9s} {'estimate':>9s} {'error %':>8s} {'above fixed %':>14s}"
)


def _row(result: Comparison) -> str:
    return (
        f"{result.case.name:40s} {result.case.family:12s} {result.real.peak_bytes / MIB:9.2f} "
        f"{result.estimated_peak_bytes / MIB:9.2f} {result.error:+8.3%} {result.error_above_fixed:+14.3%}"
    )


def _summary(results: list[Comparison]) -> list[str]:
    lines = [f"median error {median(abs(r.error) for r in results):.3%} of {len(results)} cases"]
    for family in dict.fromkeys(r.case.family for r in results):
        members = [r for r in results if r.case.family == family]
        worst = max(members, key=lambda r: abs(r.error))
        lines.append(f"{family:12s} {len(members):3d} cases, worst {worst.error:+.3%} ({worst.case.name})")
    for families in (("transformer", "mlp"), ("convolution", "recurrent")):
        members = [r for r in results if r.case.family in families]
        if members:
            worst = max(members, key=lambda r: abs(r.error_above_fixed))
            middle = median(abs(r.error_above_fixed) for r in members)
            lines.append(
                f"above fixed, {' and '.join(families)}: median {middle:.3%}, "
                f"worst {worst.error_above_fixed:+.3%} ({worst.case.name})"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="names of cases; default: the whole zoo")
    names = parser.parse_args().cases
    unknown = set(names) - {case.name for case in ZOO}
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(describe_machine())
    print(_HEADER)
    results = []
    for case in ZOO:
        if not names or case.name in names:
            results.append(compare(case))
            print(_row(results[-1]), flush=True)
    print("\n".join(_summary(results)))


if __name__ == "__main__":
    main()
