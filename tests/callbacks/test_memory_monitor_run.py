"""A run under the monitor: unchanged, logged, resumed, and never ended by it."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_memprec._files.atomic import write_json
from lightning_memprec.callbacks.memory_monitor import MemoryMonitor
from lightning_memprec.callbacks.memory_preflight import MemoryPreflight
from lightning_memprec.memory.observe.meters import CpuMeter
from lightning_memprec.memory.observe.reading import Reading
from lightning_memprec.report.file import save_report
from lightning_memprec.report.verdict import judge

from .memory_runs import CountingMeter, kinds, loader, make_module, prediction, watch
from .runs import NAMESPACES, make_trainer, namespace
from .scaler_runs import hearing


def fit(*callbacks, name="lightning.pytorch", batches=4, module=None, ckpt=None, **options):
    trainer = make_trainer(*callbacks, name=name, **options)
    trainer.fit(make_module(name) if module is None else module, loader(batches), ckpt_path=ckpt)
    return trainer


# --- nothing changes ---


def everything(*monitors, name, leak):
    """Run with noise from every generator, over a step that keeps its outputs; return all that a run leaves behind."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)

    def training_step(self, batch, batch_idx):
        out = self.net(torch.nn.functional.dropout(batch[0], 0.5)) * random.random() * float(np.random.rand())
        if leak:
            self.__dict__.setdefault("outputs", []).append(out)
        return out.square().mean()

    module = make_module(name, training_step=training_step)
    trainer = fit(*monitors, name=name, module=module, batches=20)
    return {
        "weights": module.state_dict(),
        "optimizer": copy.deepcopy(trainer.optimizers[0].state_dict()),
        "generators": [torch.get_rng_state(), random.getstate(), str(np.random.get_state())],
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Rising(CpuMeter):
    """The CPU, with figures that make the monitor look for who holds memory."""

    def __init__(self):
        self.reads = 0

    def read(self):
        self.reads += 1
        return Reading(allocated_bytes=2**20 * self.reads, peak_allocated_bytes=2**24)


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("meter", [CpuMeter, Rising], ids=["quiet", "alarmed"])
def test_a_run_is_bit_for_bit_what_it_is_without(monkeypatch, name, meter):
    monkeypatch.setattr("lightning_memprec.callbacks.memory_monitor.meter_for", lambda device: meter())
    monitor = MemoryMonitor(every_n_steps=1)
    alone, watched = (everything(*given, name=name, leak=meter is Rising) for given in ([], [monitor]))
    assert same(alone, watched)
    assert ("growth" in kinds(monitor)) is (meter is Rising)


def test_what_is_saved_is_the_same_beside_its_own_state(tmp_path):
    for folder, monitors in (("a", []), ("b", [MemoryMonitor()])):
        fit(*monitors).save_checkpoint(tmp_path / folder)
    a, b = (torch.load(tmp_path / folder, weights_only=True) for folder in ("a", "b"))
    assert list(b.pop("callbacks")) == ["MemoryMonitor"]
    a.pop("callbacks")
    assert same(a, b)


# --- what is logged ---


def make_logger(name="lightning.pytorch"):
    import importlib

    base = importlib.import_module(f"{name}.loggers").Logger

    class Keeping(base):
        name, version = "keeping", 0

        def __init__(self):
            super().__init__()
            self.lines = []

        def log_metrics(self, metrics, step=None):
            self.lines.append((step, metrics))

        def log_hyperparams(self, params, *args, **kwargs):
            pass

    return Keeping()


@pytest.mark.parametrize("name", NAMESPACES)
def test_every_logger_gets_what_the_device_tells(name):
    loggers = [make_logger(name), make_logger(name)]
    fit(MemoryMonitor(every_n_steps=3), name=name, batches=8, logger=loggers)
    for logger in loggers:
        lines = [
            (step, metrics) for step, metrics in logger.lines if "memprec/memory/host_rss_bytes" in metrics
        ]
        # As Lightning's own metrics, those of the first step are under 0.
        assert [step for step, _ in lines] == [0, 3, 6]
        # On a CPU nothing but resident memory is known.
        assert all(list(metrics) == ["memprec/memory/host_rss_bytes"] for _, metrics in lines)
        assert all(metrics["memprec/memory/host_rss_bytes"] > 2**20 for _, metrics in lines)


def test_keys_are_those_of_the_table(monkeypatch):
    class Known(CpuMeter):
        def read(self):
            return Reading(**{field.name: 1 for field in fields(Reading)})

    monkeypatch.setattr("lightning_memprec.callbacks.memory_monitor.meter_for", lambda device: Known())
    logger = make_logger()
    fit(MemoryMonitor(), logger=logger)
    (metrics,) = [metrics for _, metrics in logger.lines if "memprec/memory/host_rss_bytes" in metrics]
    table = [line.split("`")[1] for line in MemoryMonitor.__doc__.splitlines() if "| `memprec/" in line]
    assert sorted(metrics) == sorted(table)


def test_quiet_steps_read_nothing(monkeypatch):
    meter = CountingMeter()
    watch(monkeypatch, meter=meter, monitor=MemoryMonitor(every_n_steps=25), data=loader(52))
    # In `setup`, at the first 20 steps, at two that are due, and at the end.
    assert meter.reads == 1 + 20 + 2 + 1


def test_a_cpu_says_that_it_tells_no_peak():
    monitor = MemoryMonitor()
    with hearing() as said:
        fit(MemoryPreflight(on_error="raise", remedies=False), monitor)
    assert kinds(monitor) == ["no_peak"]
    assert monitor.comparison is None
    words = [text for _, text in said if "MemoryMonitor" in text]
    assert words[0].startswith(
        "[info] MemoryMonitor, step 0, no_peak\n  torch tells no peak of tensors on this device (CPU)."
    )
    assert words[-1].startswith("[info] MemoryMonitor, summary\n  Resident on the host ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_a_real_device():
    class Strict(MemoryMonitor):
        def on_train_batch_end(self, *args):
            torch.cuda.set_sync_debug_mode("error")
            super().on_train_batch_end(*args)  # An error would be told as a warning, which is an error here.
            torch.cuda.set_sync_debug_mode("default")

    monitor = Strict(every_n_steps=1)
    fit(MemoryPreflight(on_error="raise", remedies=False), monitor, batches=10, accelerator="gpu")
    assert kinds(monitor)[0] in ("compared", "prediction_off", "not_compared")
    assert monitor.history[-1][1].peak_allocated_bytes > 0


# --- one run after another ---


def test_a_second_fit_starts_anew(monkeypatch):
    monitor = MemoryMonitor(every_n_steps=1)
    watch(monkeypatch, monitor=monitor, estimate=prediction())
    assert kinds(monitor) == ["compared"]
    watch(monkeypatch, monitor=monitor, data=loader(3))
    assert (kinds(monitor), monitor.comparison) == ([], None)
    assert [step for step, _ in monitor.history] == [1, 2, 3, 3]


def test_events_go_on_after_a_resume(tmp_path):
    fit(MemoryMonitor()).save_checkpoint(tmp_path / "a.ckpt")
    monitor = MemoryMonitor()
    fit(monitor, ckpt=tmp_path / "a.ckpt", max_epochs=2)
    assert [(event.kind, event.step) for event in monitor.events] == [
        ("no_peak", 0),
        ("no_peak", 4),
    ]


def test_a_test_run_with_a_checkpoint_does_not_put_the_events_back(tmp_path):
    module, monitor = make_module(test_step=lambda self, batch, batch_idx: None), MemoryMonitor()
    trainer = make_trainer(monitor)
    trainer.fit(module, loader(2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    monitor.events.clear()
    trainer.test(module, loader(1), ckpt_path=tmp_path / "a.ckpt", verbose=False, weights_only=True)
    assert monitor.events == []


def test_a_spoilt_state_is_told_and_the_run_is_watched(tmp_path):
    fit(MemoryMonitor()).save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    checkpoint["callbacks"]["MemoryMonitor"]["events"][0]["step"] = "soon"
    torch.save(checkpoint, tmp_path / "a.ckpt")
    monitor = MemoryMonitor()
    with pytest.warns(UserWarning, match="could not read its state in the checkpoint .*events start anew"):
        fit(monitor, ckpt=tmp_path / "a.ckpt", max_epochs=2)
    assert len(monitor.history) == 5


# --- faults ---


class Broken(CpuMeter):
    def __init__(self, good_reads):
        self.left = good_reads

    def read(self):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the device does not answer.")
        return super().read()


@pytest.mark.parametrize("good_reads", [0, 2], ids=["setup", "later"])
def test_a_fault_is_told_once_and_training_goes_on(monkeypatch, good_reads):
    monkeypatch.setattr(
        "lightning_memprec.callbacks.memory_monitor.meter_for", lambda device: Broken(good_reads)
    )
    with pytest.warns(UserWarning, match="failed and watches no longer: RuntimeError: the device") as caught:
        trainer = fit(MemoryMonitor())
    assert sum("watches no longer" in str(warning.message) for warning in caught) == 1
    assert (trainer.global_step, trainer.state.finished) == (4, True)


def test_a_model_whose_shapes_are_not_known_yet_is_watched():
    module, monitor = make_module(), MemoryMonitor(every_n_steps=1)
    module.net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyLinear(2))
    fit(monitor, module=module)
    assert [step for step, _ in monitor.history] == [1, 2, 3, 4, 4]


def test_an_error_of_the_run_comes_out_as_it_is():
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise KeyError("mine")
        return self.net(batch[0]).square().mean()

    monitor = MemoryMonitor()
    with hearing() as said, pytest.raises(KeyError, match="mine"):
        fit(monitor, module=make_module(training_step=training_step))
    assert sum("MemoryMonitor, summary" in text for _, text in said) == 1
    assert monitor.summary().startswith("Resident on the host")


# --- options ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every_n_steps": 0}, "`every_n_steps` must be a whole number of at least 1, got 0"),
        ({"every_n_steps": 2.5}, "got 2.5"),  # Would be due every fifth step.
        ({"every_n_steps": "5"}, "got '5'"),
        ({"tolerance": 0.0}, "`tolerance` must be a finite number above 0, got 0.0"),
        ({"tolerance": float("nan")}, "got nan"),
        ({"tolerance": float("inf")}, "got inf"),
    ],
    ids=["steps", "part", "text", "zero", "nan", "inf"],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        MemoryMonitor(**options)


def test_the_prediction_can_come_from_a_file(monkeypatch, tmp_path):
    write_json(tmp_path / "estimate.json", prediction().to_dict(), default=None)
    monitor = MemoryMonitor(estimate_path=tmp_path / "estimate.json")
    watch(monkeypatch, monitor=monitor, estimate=monitor.estimate)
    assert kinds(monitor) == ["compared"]


def test_a_file_without_a_prediction_is_refused(tmp_path):
    save_report(tmp_path / "report.json", None, judge(None, None, reason="it cannot be traced."))
    with pytest.raises(ValueError, match="holds a verdict without an estimate"):
        MemoryMonitor(estimate_path=tmp_path / "report.json")
    with pytest.raises(FileNotFoundError):
        MemoryMonitor(estimate_path=tmp_path / "none.json")


def test_it_can_be_sent_to_spawned_ranks():
    again = pickle.loads(pickle.dumps(MemoryMonitor(every_n_steps=7)))
    fit(again)
    assert (again.every_n_steps, kinds(again)) == (7, ["no_peak"])


@pytest.mark.parametrize("name", NAMESPACES)
def test_it_is_a_callback_of_both_namespaces(name):
    assert isinstance(MemoryMonitor(), namespace(name).Callback)


def test_before_a_run_there_is_nothing_to_say():
    assert MemoryMonitor().summary() == "No optimizer step was observed."


@pytest.mark.slow
def test_each_rank_watches_its_own_device(tmp_path):
    script = Path(__file__).with_name("memory_ddp_run.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, timeout=240, capture_output=True, text=True)
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("rank*")}
    assert set(found) == {"rank0", "rank1"}, done.stderr
    # DDP's buckets are not in the estimate of one device, so the comparison warns on both; rank zero alone says so.
    assert found["rank0"]["events"] == ["prediction_off"]
    assert found["rank1"]["events"] == ["prediction_off", "above_prediction"]
    assert "prediction_off" in found["rank0"]["printed"][0]
    assert [
        "above_prediction" in text and text.startswith("[rank 1]") for text in found["rank1"]["printed"]
    ] == [True]
    assert len(json.loads((tmp_path / "memprec_calibration.json").read_text())["runs"]) == 1
