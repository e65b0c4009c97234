from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from benchmarks import memory_accuracy
from benchmarks.memory_accuracy import Scored, predict, relative_error, summarize
from benchmarks.published_peaks import PEAKS
from lightning_memprec._devices import find_device

BY_ID = {peak.id: peak for peak in PEAKS}


def test_rows_are_told_apart_and_name_known_devices():
    assert len(BY_ID) == len(PEAKS)
    for peak in PEAKS:
        find_device(peak.device)
        assert peak.source


class TestFigures:
    def test_worked_example(self):
        # At a margin of 10 % the needs of 1 are met by 0.95 * 1.1 = 1.045, 1.1 and 1.32, and missed by 0.88.
        summary = summarize([-0.05, 0.0, 0.2, -0.2], margin=0.1)
        assert summary.rows == 4
        assert summary.median == pytest.approx(0.125)
        assert summary.percentile_90 == pytest.approx(0.2)
        assert abs(summary.worst) == pytest.approx(0.2)
        assert summary.under == 0.25
        assert summary.failures == 0.25
        assert summary.asked_too_much == pytest.approx((0.045 + 0.1 + 0.32) / 4)

    def test_percentile_is_a_row_that_nine_of_ten_do_not_exceed(self):
        assert summarize([i / 100 for i in range(1, 11)]).percentile_90 == pytest.approx(0.09)

    def test_error_is_signed_and_relative_to_the_measurement(self):
        peak = replace(PEAKS[0], measured_bytes=200)
        assert relative_error(150, peak) == -0.25
        assert Scored(peak, 250, 250, 0.0).error == 0.25
        assert Scored(peak, 250, 250, 0.0).verdict_right is None

    def test_a_run_out_of_memory_has_a_verdict_and_no_error(self):
        peak = replace(PEAKS[0], measured_bytes=None)
        capacity = find_device(peak.device).memory_bytes
        assert Scored(peak, 1, capacity + 1, 0.0).verdict_right is True
        assert Scored(peak, 1, capacity, 0.0).verdict_right is False
        assert Scored(peak, 1, 1, 0.0).error is None
        with pytest.raises(ValueError, match="ended out of memory"):
            relative_error(1, peak)


@pytest.mark.parametrize(("row", "bound"), [("liger-01", 0.001), ("xmem-050", 0.1), ("xmem-095", 0.02)])
def test_rebuilt_row_is_near_its_measurement(row, bound):
    for package in ("torchvision", "transformers"):
        pytest.importorskip(package)
    error = predict(BY_ID[row]).error
    assert error is not None
    assert abs(error) < bound


def test_prints_rows_and_figures(capsys, monkeypatch, tmp_path):
    target = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["memory_accuracy", "--only", "liger-01", "--json", str(target)])
    memory_accuracy.main()
    printed = capsys.readouterr().out
    assert "liger-01" in printed
    assert "ours, all rows" in printed
    assert [row["id"] for row in json.loads(target.read_text())] == ["liger-01"]
