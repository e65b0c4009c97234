"""Predicted against measured: the arithmetic, on an estimate of a real small run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.observe.comparison import compare, expected_peak
from lightning_memprec.memory.observe.reading import Reading
from lightning_memprec.memory.observe.residual import calibrated
from lightning_memprec.memory.result import PhasePeak

PARTS = {"parameters": 1056, "buffers": 0, "gradients": 1056, "optimizer states": 2112}


@cache
def estimate(device="cpu"):
    return estimate_memory(
        lambda: nn.Linear(32, 8), torch.empty(64, 32), optimizer=torch.optim.Adam, device=device
    )


def with_phases(**peaks):
    """Give the estimate other phases; the highest is its peak."""
    phases = tuple(PhasePeak(name, 0, peak, 2 * peak) for name, peak in peaks.items())
    highest = max(peaks.values())
    return replace(estimate(), phases=phases, peak_allocated_bytes=highest, peak_reserved_bytes=2 * highest)


@pytest.mark.parametrize(
    ("occasional", "expected"),
    [
        ([], 100),
        (["checkpoint_save"], 100),
        (["validation"], 300),
        (["sanity_validation", "validation"], 300),
        (["sanity_validation"], 200),
    ],
    ids=["none", "lower_one", "highest", "both", "sanity_check"],
)
def test_only_phases_that_were_reached_count(occasional, expected):
    given = with_phases(setup=10, backward=100, checkpoint_save=50, sanity_validation=200, validation=300)
    assert expected_peak(given, occasional) == (expected, 2 * expected)


def test_a_calibrated_estimate_scales_each_phase():
    given = calibrated(with_phases(backward=1000, validation=3000), 1.5)
    assert expected_peak(given, []) == (pytest.approx(1500, abs=1), pytest.approx(3000, abs=1))
    assert expected_peak(given, ["validation"]) == (4500, 9000)


def test_allocator_blocks_are_kept_where_the_peak_was_reached():
    # On CUDA an unsplit block may be larger than its tensor: phases count tensors, the peak counts blocks.
    given = replace(with_phases(backward=100, validation=50), peak_allocated_bytes=120)
    assert expected_peak(given, [])[0] == 120


def test_parts_add_up_to_the_peaks():
    reading = Reading(peak_allocated_bytes=20_000)
    result = compare(estimate(), reading, PARTS, step=8)
    assert sum(part.predicted_bytes for part in result.parts) == estimate().peak_allocated_bytes
    assert sum(part.measured_bytes for part in result.parts) == 20_000
    assert [part.name for part in result.parts] == [
        "parameters",
        "optimizer states",
        "gradients, activations and the rest",
    ]
    assert result.parts[0].error == 0.0
    assert result.reserved is None
    assert result.outside is None


def test_error_and_ratio():
    peak = estimate().peak_allocated_bytes
    result = compare(estimate(), Reading(peak_allocated_bytes=2 * peak), PARTS, step=8)
    assert (result.error, result.ratio) == (-0.5, 2.0)
    assert result.worst.name == "gradients, activations and the rest"
    assert "(-50.0%)" in str(result)
    assert result.to_dict()["ratio"] == 2.0


def test_the_ratio_of_a_calibrated_prediction_is_that_of_the_trace():
    peak = estimate().peak_allocated_bytes
    result = compare(
        calibrated(estimate(), 1.25), Reading(peak_allocated_bytes=round(1.25 * peak)), PARTS, step=8
    )
    assert result.error == pytest.approx(0.0, abs=1e-3)
    assert result.ratio == pytest.approx(1.25, rel=1e-3)


def test_what_others_held_before_is_taken_off():
    peak = estimate().peak_allocated_bytes
    reading = Reading(peak_allocated_bytes=peak + 7000, peak_reserved_bytes=9000 + 7000)
    result = compare(estimate(), reading, PARTS, step=8, foreign_bytes=7000)
    assert result.error == 0.0
    assert result.reserved.measured_bytes == 9000


def test_what_lies_beside_the_allocator():
    reading = Reading(peak_allocated_bytes=10_000, outside_allocator_bytes=500)
    result = compare(estimate("T4-16GB"), reading, PARTS, step=8)
    assert result.outside.measured_bytes == 500
    assert result.outside.predicted_bytes == estimate("T4-16GB").outside_allocator_bytes > 0
