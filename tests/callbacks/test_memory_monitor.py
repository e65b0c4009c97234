"""Predicted against measured, on a CPU whose tensors are counted by the tests' own meter."""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memprec.callbacks._calibration import calibration_path, find_calibration
from lightning_memprec.callbacks.memory_monitor import MemoryMonitor
from lightning_memprec.callbacks.memory_preflight import MemoryPreflight
from lightning_memprec.memory.observe.residual import FILE_NAME
from tests.memory.zoo.reference import peak_of, storage_bytes

from .memory_runs import (
    ROWS,
    WIDTH,
    CountingMeter,
    Rows,
    kinds,
    loader,
    make_module,
    prediction,
    told,
    validation_step,
    watch,
)
from .runs import NAMESPACES, make_trainer, namespace

MIB = 2**20


def keep_some(self, batch, batch_idx):
    """Take a step that keeps 400 kB which no trace has seen."""
    self.kept = torch.ones(100_000)
    return self.net(batch[0]).square().mean()


@pytest.mark.parametrize("name", NAMESPACES)
def test_the_estimate_of_a_preflight_is_met(monkeypatch, name):
    monitor, _ = watch(monkeypatch, MemoryPreflight(on_error="raise", remedies=False), name=name)
    assert kinds(monitor) == ["compared"]
    # The meter sees all tensors; what kernels take for a moment is nothing in a perceptron.
    assert abs(monitor.comparison.error) < 0.001
    assert all(abs(part.error) < 0.001 for part in monitor.comparison.parts)
    assert told(monitor, "compared").startswith(
        "After 8 steps: Predicted 2.78 MiB, measured 2.78 MiB (+0.0%)."
    )
    assert (
        monitor.summary()
        == "Peak of live tensors 2.78 MiB. The predicted peak was off by +0.0%. Nothing to warn about."
    )


def test_the_meter_of_these_tests_measures_what_the_allocator_reports(monkeypatch):
    meter, module = CountingMeter(), make_module()
    watch(monkeypatch, meter=meter)
    trainer = make_trainer()
    data = loader()
    peak = storage_bytes(list(module.parameters())) + peak_of(lambda: trainer.fit(module, data))
    # One batch lies in the loader while the next is made.
    assert meter.peak == pytest.approx(peak, abs=ROWS * WIDTH * 4 + 10_000)


def test_a_step_that_keeps_more_is_a_warning_that_names_the_part(monkeypatch):
    module = make_module(training_step=keep_some)
    monitor, _ = watch(monkeypatch, module=module, estimate=prediction())
    assert kinds(monitor) == ["prediction_off"]
    assert monitor.events[0].severity == "warning"
    comparison = monitor.comparison
    assert comparison.peak.measured_bytes - comparison.peak.predicted_bytes == pytest.approx(
        400_000, abs=1000
    )
    text = told(monitor, "prediction_off")
    assert "(-12.0%)" in text
    assert "most of it lies in `gradients, activations and the rest`" in text
    assert "keep a larger `safety_margin`" in text


def test_a_run_that_needs_less_is_told_so(monkeypatch):
    monitor, _ = watch(monkeypatch, estimate=prediction(2 * ROWS))
    assert kinds(monitor) == ["prediction_off"]
    assert monitor.comparison.error > 0.5
    assert "a larger batch may fit" in told(monitor, "prediction_off")


def test_tolerance_is_the_users(monkeypatch):
    module, monitor = make_module(training_step=keep_some), MemoryMonitor(tolerance=0.2)
    watch(monkeypatch, module=module, monitor=monitor, estimate=prediction())
    assert kinds(monitor) == ["compared"]


def test_other_optimizers_show_in_their_part(monkeypatch):
    module = make_module(optimizer=torch.optim.SGD)
    monitor, _ = watch(monkeypatch, module=module, estimate=prediction())
    states = next(part for part in monitor.comparison.parts if part.name == "optimizer states")
    assert (states.predicted_bytes > 0, states.measured_bytes) == (True, 0)
    assert "most of it lies in `optimizer states`" in told(monitor, "prediction_off")


def test_a_larger_batch_that_comes_late_is_told_once(monkeypatch):
    data = DataLoader(Rows([ROWS] * 9 + [2 * ROWS] * 3), batch_size=None)
    monitor, _ = watch(monkeypatch, data=data, estimate=prediction())
    assert kinds(monitor) == ["compared", "above_prediction"]
    assert [event.step for event in monitor.events] == [8, 10]
    assert "larger than any that was looked at" in told(monitor, "above_prediction")


@pytest.mark.parametrize(("every", "reached"), [(4, True), (1.0, False)], ids=["before", "after"])
def test_phases_that_were_not_reached_do_not_count(monkeypatch, every, reached):
    # Validation on four times the rows is the peak of the whole run.
    estimate = prediction(validation_rows=4 * ROWS)
    assert estimate.peak_phase.name == "validation"
    monitor, _ = watch(
        monkeypatch,
        module=make_module(validation_step=validation_step),
        data=(loader(), loader(1, 4 * ROWS)),
        estimate=estimate,
        val_check_interval=every,
        num_sanity_val_steps=0,
    )
    assert kinds(monitor) == ["compared"]
    assert abs(monitor.comparison.error) < 0.02
    assert (monitor.comparison.peak.predicted_bytes == estimate.peak_allocated_bytes) is reached


def test_accumulated_batches_are_waited_for(monkeypatch):
    monitor, _ = watch(monkeypatch, data=loader(20), estimate=prediction(), accumulate_grad_batches=4)
    # Four steps are sixteen batches.
    assert [event.step for event in monitor.events] == [4]
    assert [step for step, _ in monitor.history] == [1, 2, 3, 4, 5, 5]


def test_manual_optimization_is_sampled_once_a_batch(monkeypatch):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=1e-3), torch.optim.Adam(self.parameters())]

    module = make_module(training_step=training_step, configure_optimizers=configure_optimizers)
    module.automatic_optimization = False
    monitor, _ = watch(monkeypatch, module=module, estimate=prediction())
    # Two steps a batch; Lightning counts both.
    assert [step for step, _ in monitor.history] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 20]
    assert [event.step for event in monitor.events] == [16]
    states = next(part for part in monitor.comparison.parts if part.name == "optimizer states")
    assert states.error == 0.0


@pytest.mark.parametrize(("batches", "expected"), [(1, []), (3, ["compared"])])
def test_short_runs_are_compared_at_their_end(monkeypatch, batches, expected):
    monitor, _ = watch(monkeypatch, data=loader(batches), estimate=prediction())
    assert kinds(monitor) == expected


class Full(CountingMeter):
    """A device on which an earlier run of this process has taken more."""

    def read(self):
        self.peak = max(self.peak, 100 * MIB)
        return super().read()


@pytest.mark.parametrize(
    ("meter", "device", "words"),
    [
        (CountingMeter, "A100-80GB", "it is for `A100-80GB`, and this is another device."),
        (Full, "cpu", "an earlier peak of this process hides its own"),
    ],
    ids=["other_device", "hidden"],
)
def test_what_cannot_be_compared_is_said(monkeypatch, meter, device, words):
    monitor, _ = watch(monkeypatch, meter=meter(), estimate=prediction(device=device))
    assert kinds(monitor) == ["not_compared"]
    assert words in told(monitor, "not_compared")
    assert monitor.comparison is None


def test_what_the_process_held_before_is_taken_off(monkeypatch):
    meter, module, teacher = CountingMeter(), make_module(), torch.ones(MIB)
    meter.count([teacher, *module.parameters()])
    monitor, _ = watch(monkeypatch, meter=meter, module=module, estimate=prediction())
    assert abs(monitor.comparison.error) < 0.001
    assert monitor.history[-1][1].peak_allocated_bytes > 4 * MIB
    assert teacher.numel() == MIB


# --- the difference for the next run ---


def test_the_difference_is_kept_for_the_next_preflight(monkeypatch, tmp_path):
    module = make_module(training_step=keep_some)
    options = {"default_root_dir": tmp_path, "enable_checkpointing": True}
    monitor, trainer = watch(monkeypatch, module=module, estimate=prediction(), **options)
    assert "The next `MemoryPreflight` of this model" in told(monitor, "prediction_off")
    ratio = find_calibration(trainer, make_module(training_step=keep_some), prediction())
    assert ratio == monitor.comparison.ratio == pytest.approx(1.137, abs=0.001)
    (kept,) = json.loads((tmp_path / FILE_NAME).read_text())["runs"]
    assert kept["optimizers"] == ["Adam"]
    # Another batch of the same model is the same run; another model, precision or device is not.
    assert find_calibration(trainer, module, prediction(2 * ROWS)) == ratio
    assert find_calibration(trainer, torch.nn.Linear(2, 2), prediction()) == 1.0
    assert find_calibration(trainer, module, prediction(device="A100-80GB")) == 1.0


@pytest.mark.parametrize(
    ("options", "monitor"),
    [
        ({"enable_checkpointing": True}, MemoryMonitor(calibrate=False)),
        ({"enable_checkpointing": False}, MemoryMonitor()),
    ],
    ids=["opted_out", "no_checkpoints"],
)
def test_no_file_is_written_unasked(monkeypatch, tmp_path, options, monitor):
    watch(monkeypatch, monitor=monitor, estimate=prediction(), default_root_dir=tmp_path, **options)
    assert monitor.comparison is not None
    assert not (tmp_path / FILE_NAME).exists()


def test_a_prediction_of_another_run_is_not_kept(monkeypatch, tmp_path):
    options = {"default_root_dir": tmp_path, "enable_checkpointing": True}
    monitor, _ = watch(monkeypatch, estimate=prediction(8 * ROWS), **options)
    assert monitor.comparison.ratio < 0.5
    assert not (tmp_path / FILE_NAME).exists()


def test_a_folder_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    options = {"default_root_dir": tmp_path, "enable_checkpointing": True}
    with pytest.warns(UserWarning, match="could not keep what it measured"):
        monitor, trainer = watch(monkeypatch, estimate=prediction(), **options)
    assert kinds(monitor) == ["compared"]
    assert trainer.state.finished


def test_a_change_of_the_working_directory_moves_no_file(monkeypatch, tmp_path):
    class Moves(namespace("lightning.pytorch").Callback):
        def on_train_start(self, trainer, pl_module):
            monkeypatch.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    options = {"default_root_dir": "runs", "enable_checkpointing": True}
    watch(monkeypatch, Moves(), estimate=prediction(), **options)
    assert [path.parent for path in tmp_path.rglob(FILE_NAME)] == [tmp_path / "runs"]


def test_a_remote_folder_keeps_nothing():
    assert calibration_path(SimpleNamespace(default_root_dir="s3://bucket/runs")) is None


# --- what the allocator shows ---


def test_fragmentation_is_told_once_with_the_setting(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    meter = CountingMeter()
    meter.more = {"peak_reserved_bytes": 20 * MIB, "capacity_bytes": 24 * MIB, "device_used_bytes": 23 * MIB}
    monitor, _ = watch(monkeypatch, meter=meter)
    assert kinds(monitor) == ["fragmentation"]
    assert "Set `PYTORCH_ALLOC_CONF=expandable_segments:True` in the environment" in told(
        monitor, "fragmentation"
    )


def test_retries_are_told_once(monkeypatch):
    meter = CountingMeter()
    # Five from before the run; two come in its third step.
    meter.more = {"alloc_retries_count": lambda reads: 5 + 2 * (reads > 3)}
    monitor, _ = watch(monkeypatch, meter=meter)
    assert kinds(monitor) == ["alloc_retries"]
    assert monitor.events[0].step == 3
    assert monitor.events[0].figures["retries"] == 2


# --- growth ---


def test_who_holds_memory_is_looked_up_in_suspicious_moments_alone(monkeypatch):
    from lightning_memprec.callbacks import _memory_session

    looks = []
    found = _memory_session.holders_of
    monkeypatch.setattr(_memory_session, "holders_of", lambda *args: looks.append(1) or found(*args))
    meter = CountingMeter()
    # It rises without end, by less than counts.
    meter.more = {"host_rss_bytes": lambda reads: 300 * MIB + reads}
    watch(monkeypatch, meter=meter, data=loader(48, rows=8))
    assert len(looks) == 1
    looks.clear()
    watch(monkeypatch, data=loader(20, rows=8))
    assert looks == []


LOSSES = []


def keep_on_module(self, batch, batch_idx):
    out = self.net(batch[0])
    self.__dict__.setdefault("outputs", []).append(out)
    return out.square().mean()


def keep_in_file(self, batch, batch_idx):
    out = self.net(batch[0])
    LOSSES.append(out.detach())
    return out.square().mean()


@pytest.mark.parametrize(
    ("step", "name", "graphs"),
    [(keep_on_module, "Net.outputs", True), (keep_in_file, f"{__name__}.LOSSES", False)],
    ids=["module", "file"],
)
def test_a_list_that_grows_is_told_and_named(monkeypatch, step, name, graphs):
    LOSSES.clear()
    module = make_module(training_step=step)
    # Its class is that of this file for the user, who wrote the step here.
    type(module).__module__ = __name__
    monitor, _ = watch(monkeypatch, module=module, data=loader(20))
    assert kinds(monitor) == ["growth"]
    text = told(monitor, "growth")
    assert "16.00 KiB a step" in text
    assert f"`{name}` holds 17 tensors{', all with their graphs' if graphs else ''}, 16.00 KiB more" in text
    assert ("`x.detach()`" in text) is graphs
    assert "Warnings: growth." in monitor.summary()


def test_a_callback_that_keeps_batches_is_named(monkeypatch):
    class Collector(namespace().Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.seen.append({"copy": batch[0][:4].clone()})

    monitor, _ = watch(monkeypatch, Collector(), data=loader(20))
    assert "`Collector.seen` holds 17 tensors" in told(monitor, "growth")


def test_what_is_emptied_at_the_end_of_an_epoch_is_quiet(monkeypatch):
    module = make_module(training_step=keep_on_module, on_train_epoch_end=lambda self: self.outputs.clear())
    monitor, _ = watch(monkeypatch, module=module, data=loader(8), max_epochs=3)
    assert kinds(monitor) == []


def test_batches_that_get_longer_are_no_growth(monkeypatch):
    data = DataLoader(Rows(ROWS + 8 * index for index in range(20)), batch_size=None)
    monitor, _ = watch(monkeypatch, data=data)
    assert kinds(monitor) == []


def test_tensors_in_reference_cycles_are_told_apart(monkeypatch):
    def training_step(self, batch, batch_idx):
        cycle = [self.net(batch[0])]
        cycle.append(cycle)
        return cycle[0].square().mean()

    gc.collect()
    gc.disable()
    try:
        module = make_module(training_step=training_step)
        monitor, _ = watch(monkeypatch, module=module, data=loader(20))
    finally:
        gc.enable()
    assert kinds(monitor) == ["cyclic_garbage"]
    assert monitor.events[0].severity == "info"


def test_resident_memory_that_grows_is_told(monkeypatch):
    meter = CountingMeter()
    meter.more = {"host_rss_bytes": lambda reads: (300 + 5 * reads) * MIB}
    monitor, _ = watch(monkeypatch, meter=meter, data=loader(36, rows=8))
    assert kinds(monitor) == ["host_growth"]
    text = told(monitor, "host_growth")
    assert "5.00 MiB a step" in text
    assert "No attribute of the module" in text
