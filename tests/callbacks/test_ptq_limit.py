from __future__ import annotations

import math

import pytest

from lightning_memprec.callbacks._ptq_limit import Attempt, degradation_of, search, worst_layers
from lightning_memprec.quantization.report import LayerRow, QuantizationReport

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("before", "after", "mode", "kind", "expected"),
    [
        (0.8, 0.6, "max", "absolute", 0.2),
        (0.8, 0.6, "max", "relative", 0.25),
        (2.0, 3.0, "min", "absolute", 1.0),
        (2.0, 3.0, "min", "relative", 0.5),
        (-2.0, -3.0, "max", "relative", 0.5),
        (0.5, 0.6, "max", "relative", -0.2),
        (0.0, 0.1, "min", "relative", INF),
        (0.0, 0.1, "max", "relative", -INF),
        (0.0, 0.0, "min", "relative", 0.0),
        (0.5, NAN, "max", "absolute", INF),
        (INF, INF, "min", "relative", INF),
    ],
)
def test_degradation(before, after, mode, kind, expected):
    assert degradation_of(before, after, mode, kind) == pytest.approx(expected)


def report(**errors):
    """Rows whose loss is the error of the output, or, where negative, minus the ratio of the weight in dB."""
    rows = [
        LayerRow(
            name, "Linear", output_error=value if value >= 0 else None, sqnr_db=-value if value < 0 else 99.0
        )
        for name, value in errors.items()
    ]
    return QuantizationReport("weight_only", (*rows, LayerRow("left", "Linear", reason="excluded")), 0, 0)


def test_the_worst_layers_come_first_and_those_left_are_not_among_them():
    # 20 dB are an error of 0.1, 40 dB one of 0.01.
    assert worst_layers(report(a=0.05, b=0.5, c=-40.0, d=-20.0)) == ["b", "d", "a", "c"]


@pytest.mark.parametrize(
    ("limit", "budget", "expected"),
    [
        (1.0, 5, [()]),
        (0.5, 5, [(), ("b",), ("b", "a")]),
        (0.5, 1, [(), ("b",)]),
        (0.5, 0, [()]),
        (-1.0, 5, [(), ("b",), ("b", "a")]),  # One layer must remain in int8.
    ],
)
def test_layers_are_kept_one_by_one_until_the_limit_holds(limit, budget, expected):
    def attempt(kept):
        return Attempt(kept, report(a=0.2, b=0.4, c=0.1), {}, degradation=1.0 - 0.25 * len(kept))

    assert [each.kept for each in search(attempt, limit, budget)] == expected
