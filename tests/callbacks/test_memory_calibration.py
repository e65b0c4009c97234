"""What one run measures, the next preflight of the same model takes into account."""

from __future__ import annotations

import pytest
import torch

from lightning_memprec.callbacks.memory_monitor import MemoryMonitor
from lightning_memprec.callbacks.memory_preflight import MemoryPreflight
from lightning_memprec.memory.observe.residual import FILE_NAME

from .memory_runs import kinds, make_module, watch

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def keep_some(self, batch, batch_idx):
    """Keep 400 kB in a real step, which a trace does not see."""
    out = self.net(batch[0])
    if not out.is_meta:
        self.kept = torch.ones(100_000)
    return out.square().mean()


def run(monkeypatch, folder, monitor=None, **options):
    preflight = MemoryPreflight(on_error="raise", **{"remedies": False, **options})
    monitor, _ = watch(
        monkeypatch, preflight, module=make_module(training_step=keep_some),
        monitor=MemoryMonitor() if monitor is None else monitor, default_root_dir=folder, enable_checkpointing=True,
    )  # fmt: skip
    return preflight, monitor


def test_the_second_run_is_predicted_as_the_first_was_measured(monkeypatch, tmp_path):
    first, monitor = run(monkeypatch, tmp_path)
    assert kinds(monitor) == ["prediction_off"]
    assert all(note.name != "calibration" for note in first.estimate.assumptions)
    for _ in range(2):  # It does not swing back, either.
        second, again = run(monkeypatch, tmp_path)
        assert kinds(again) == ["compared"]
        assert abs(again.comparison.error) < 0.001
        assert second.estimate.minimum_device_bytes == pytest.approx(
            first.estimate.minimum_device_bytes + 400_000, abs=100
        )
        (note,) = [note for note in second.estimate.assumptions if note.name == "calibration"]
        assert "measured +13.7% against its trace" in note.text
        assert again.comparison.ratio == pytest.approx(monitor.comparison.ratio, rel=1e-4)


def test_it_can_be_left_out(monkeypatch, tmp_path):
    first, _ = run(monkeypatch, tmp_path)
    second, _ = run(monkeypatch, tmp_path, calibrate=False)
    assert second.estimate.minimum_device_bytes == first.estimate.minimum_device_bytes


def test_remedies_and_the_largest_batch_are_calibrated_too(monkeypatch, tmp_path):
    options = {"device_memory": "2.5MiB", "on_overflow": "off", "remedies": True}
    first, _ = run(monkeypatch, tmp_path, **options)
    second, _ = run(monkeypatch, tmp_path, **options)
    assert 0 < second.largest_batch_size < first.largest_batch_size


def test_a_spoilt_file_changes_nothing(monkeypatch, tmp_path):
    (tmp_path / FILE_NAME).write_text('{"version": 1, "runs": [{"run": 3}]}')
    preflight, _ = run(monkeypatch, tmp_path, monitor=MemoryMonitor(calibrate=False))
    assert all(note.name != "calibration" for note in preflight.estimate.assumptions)
