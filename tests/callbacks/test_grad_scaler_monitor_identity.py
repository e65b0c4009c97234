"""Watching changes nothing, and what was watched goes on after a resume."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memprec.callbacks.grad_scaler_monitor import GradScalerMonitor

from .runs import make_trainer, namespace
from .scaler_runs import fused, kinds, loader, make_module, make_plugin, one_line, run, sgd, warned


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def fused_adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


def step(self, loss, batch_idx):
    self.optimizers().zero_grad()
    self.manual_backward(loss)
    self.optimizers().step()


def everything(monitor, optimizer, manual, precision, **options):
    """Run with dropout; return all that a run leaves behind."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)

    def training_step(self, batch, batch_idx):
        x, amplitude = batch
        noise = torch.nn.functional.dropout(x, 0.5) + random.random() + float(np.random.rand())
        loss = self.loss((noise, amplitude))
        return manual(self, loss, batch_idx) if manual else loss

    module = make_module(optimizer=optimizer, manual=manual, schedule=True, training_step=training_step)
    plugin = make_plugin(precision=precision)
    callbacks = [] if monitor is None else [monitor]
    trainer = make_trainer(*callbacks, plugins=[plugin], **options)
    trainer.fit(module, loader([1, 4, 300, 1, 1, 2000, 1, 1]))
    return {
        "weights": module.state_dict(),
        "optimizer": copy.deepcopy(trainer.optimizers[0].state_dict()),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"],
        "scaler": plugin.state_dict(),
        "generators": [torch.get_rng_state(), random.getstate(), str(np.random.get_state())],
        "step": trainer.global_step,
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("optimizer", "manual", "precision", "options"),
    [
        (adam, None, "16-mixed", {}),
        (adam, None, "16-mixed", {"gradient_clip_val": 0.5}),
        (adam, None, "16-mixed", {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
        (adam, None, "16-mixed", {"accumulate_grad_batches": 3}),
        (fused_adam, None, "16-mixed", {}),
        (adam, step, "16-mixed", {}),
        (adam, None, "bf16-mixed", {"gradient_clip_val": 0.5}),
    ],
    ids=["plain", "clip-norm", "clip-value", "accumulate", "fused", "manual", "bf16"],
)
def test_a_watched_run_is_bit_for_bit_the_run_without(optimizer, manual, precision, options):
    without = everything(None, optimizer, manual, precision, **options)
    monitor = GradScalerMonitor(every_n_steps=2)
    watched = everything(monitor, optimizer, manual, precision, **options)
    assert same(without, watched)
    assert sum(monitor.health.totals.steps.values()) == without["step"]


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 1.0}], ids=["unclipped", "clipped"])
def test_nothing_is_left_behind(options):
    module, plugin, monitor = make_module(), make_plugin(), GradScalerMonitor(hold_schedule=True)
    before = set(vars(plugin))
    _, trainer = run([1] * 3, monitor, module, plugin=plugin, **options)
    assert set(vars(plugin)) == before
    assert not trainer.optimizers[0]._optimizer_step_post_hooks
    assert "update_lr_schedulers" not in vars(trainer.fit_loop.epoch_loop)


def test_no_hook_is_left_at_a_parameter():
    module = make_module(manual=step)
    run([1] * 2, module=module, plugin=make_plugin(init_scale=8.0))
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())


class CountReads(TorchDispatchMode):
    """Counts how often a value is read from the device."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("optimizer", "clip"), [(sgd, None), (sgd, 1.0), (fused, None)], ids=["plain", "clipped", "fused"]
)
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_quiet_steps_read_nothing_from_the_device(optimizer, clip, precision):
    class Reads(namespace().Callback):
        """Counts from the second batch to the last, the first of which is looked at closely."""

        def __init__(self):
            self.mode = CountReads()

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1:
                self.mode.__enter__()

        def on_train_end(self, trainer, pl_module):
            self.mode.__exit__(None, None, None)

    counts = []
    for monitors in ([], [GradScalerMonitor(every_n_steps=1000)]):
        reads = Reads()
        # `Reads` is first, so that its count ends before the monitor's summary.
        plugin = make_plugin(precision=precision, **({"init_scale": 8.0} if precision == "16-mixed" else {}))
        trainer = make_trainer(reads, *monitors, plugins=[plugin], gradient_clip_val=clip)
        trainer.fit(make_module(optimizer=optimizer), loader([1] * 6))
        counts.append(reads.mode.reads)
    assert counts[0] == counts[1]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("optimizer", [sgd, fused], ids=["plain", "fused"])
def test_counts_go_on_after_a_resume(tmp_path, optimizer):
    amplitudes = [1, 1, 1, 300, 1]
    path = tmp_path / "last.ckpt"
    plugin = make_plugin(init_scale=2.0**16, growth_interval=3)
    first = GradScalerMonitor(every_n_steps=3)
    _, trainer = run(amplitudes, first, make_module(optimizer=optimizer), plugin=plugin)
    trainer.save_checkpoint(path)

    resumed = GradScalerMonitor(every_n_steps=3)
    plugin = make_plugin(init_scale=2.0**16, growth_interval=3)
    module = make_module(optimizer=optimizer)
    run(amplitudes, resumed, module, plugin=plugin, ckpt=path, max_epochs=2)

    whole = GradScalerMonitor(every_n_steps=3)
    plugin = make_plugin(init_scale=2.0**16, growth_interval=3)
    run(amplitudes, whole, make_module(optimizer=optimizer), plugin=plugin, max_epochs=2)
    assert resumed.health.totals.state_dict() == whole.health.totals.state_dict()
    assert [event.kind for event in resumed.events] == [event.kind for event in whole.events]
    # The alarm of a skip just before the break, which makes the next steps be looked at, does not go on.
    seen = [
        [(point.step, point.scale, point.skipped) for point in monitor.health.history.points]
        for monitor in (resumed, whole)
    ]
    assert seen[0] == seen[1]


def test_a_test_run_with_a_checkpoint_does_not_put_the_counts_back(tmp_path):
    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch))

    module, monitor = make_module(test_step=test_step), GradScalerMonitor()
    trainer = make_trainer(monitor, plugins=[make_plugin(init_scale=8.0)])
    trainer.fit(module, loader([1] * 2))
    trainer.save_checkpoint(tmp_path / "early.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader([1] * 2), ckpt_path=tmp_path / "early.ckpt", weights_only=True)
    trainer.test(module, loader([1]), ckpt_path=tmp_path / "early.ckpt", verbose=False, weights_only=True)
    assert monitor.health.totals.steps == {0: 4}


def test_a_checkpoint_written_within_a_step_counts_no_skip(tmp_path):
    def on_before_optimizer_step(self, optimizer):
        self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    module = make_module(on_before_optimizer_step=on_before_optimizer_step)
    monitor, _ = run([1] * 3, module=module, plugin=make_plugin(init_scale=8.0))
    assert monitor.health.totals.steps == {0: 3}
    assert monitor.health.totals.skipped == {0: 0}


def test_a_spoilt_state_of_the_monitor_is_told_and_the_run_is_watched(tmp_path):
    _, trainer = run([1] * 2, plugin=make_plugin(init_scale=8.0))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    checkpoint["callbacks"]["GradScalerMonitor"]["totals"]["steps"] = {"0": "many"}
    checkpoint["X"] = {**checkpoint["MixedPrecision"], "scale": 10**400}
    torch.save(checkpoint, tmp_path / "a.ckpt")
    monitor = GradScalerMonitor()
    with pytest.warns(UserWarning, match="could not read its state in the checkpoint .*counts start anew"):
        run([1] * 2, monitor, plugin=make_plugin(), ckpt=tmp_path / "a.ckpt", max_epochs=2)
    assert monitor.health.totals.steps == {0: 2}


@pytest.mark.parametrize("imported", [False, True])
def test_another_scale_after_a_resume_is_told_each_time_and_is_no_fall(tmp_path, imported):
    save(tmp_path / "a.ckpt", "FSDPPrecision", init_scale=512.0)
    for epochs in (2, 3):
        monitor, plugin = GradScalerMonitor(import_scaler_state=imported), make_plugin(init_scale=64.0)
        _, trainer = run([1], monitor, plugin=plugin, ckpt=tmp_path / "a.ckpt", max_epochs=epochs)
        assert kinds(monitor) == ["scale_imported" if imported else "scale_reset"] * (epochs - 1)
        assert monitor.health.totals.backoffs == 0
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
        checkpoint["FSDPPrecision"] = checkpoint.pop("MixedPrecision")
        torch.save(checkpoint, tmp_path / "a.ckpt")


def save(path, scaler_key, **scaler):
    """Write a checkpoint whose scaler state lies under another key."""
    _, trainer = run([1], plugin=make_plugin(**scaler))
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[scaler_key] = checkpoint.pop("MixedPrecision")
    torch.save(checkpoint, path)


@pytest.mark.parametrize("key", ["FSDPPrecision", "MasterWeightPrecision"])
def test_scale_that_a_resume_would_lose_is_told(tmp_path, key):
    save(tmp_path / "a.ckpt", key, init_scale=512.0)
    monitor, plugin = GradScalerMonitor(), make_plugin(init_scale=64.0)
    with warned() as said:
        run([1], monitor, plugin=plugin, ckpt=tmp_path / "a.ckpt", max_epochs=2)
    words = [one_line(text) for level, text in said if level == "WARNING"]
    assert any(
        f"holds a loss scale of 512 under `{key}`" in text and "starts at 64" in text for text in words
    )
    assert kinds(monitor) == ["scale_reset"]
    assert plugin.scaler.get_scale() == 64.0


def test_scale_can_be_taken_over(tmp_path):
    save(tmp_path / "a.ckpt", "FSDPPrecision", init_scale=512.0)
    monitor = GradScalerMonitor(import_scaler_state=True)
    plugin = make_plugin(init_scale=64.0)
    run([1], monitor, plugin=plugin, ckpt=tmp_path / "a.ckpt", max_epochs=2)
    assert kinds(monitor) == ["scale_imported"]
    assert plugin.scaler.get_scale() == 512.0
    assert plugin.scaler._get_growth_tracker() == 2


@pytest.mark.parametrize("key", ["MixedPrecision", "native_amp_scaling_state"])
def test_what_lightning_restores_itself_is_left_alone(tmp_path, key):
    save(tmp_path / "a.ckpt", key, init_scale=512.0)
    monitor, plugin = GradScalerMonitor(), make_plugin(init_scale=64.0)
    run([1], monitor, plugin=plugin, ckpt=tmp_path / "a.ckpt", max_epochs=2)
    assert kinds(monitor) == []
    assert plugin.scaler.get_scale() == 512.0
