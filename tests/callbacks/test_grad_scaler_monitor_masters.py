"""FP32 master weights beside an FP16 model: gradients lie elsewhere, the words stay the same."""

from __future__ import annotations

import pytest
import torch

from lightning_memprec.callbacks.grad_scaler_monitor import GradScalerMonitor
from lightning_memprec.plugins.master_weights import MasterWeightPrecision

from .scaler_runs import NAN, fused, kinds, make_module, make_plugin, run, sgd, warned


def plugin(scale=1024.0, **options):
    return MasterWeightPrecision("16-master", scaler=torch.amp.GradScaler("cpu", init_scale=scale), **options)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(sgd, {}), (fused, {}), (sgd, {"low_memory": True})],
    ids=["plain", "fused", "low-memory"],
)
def test_skips_norms_and_names(optimizer, options):
    monitor = GradScalerMonitor(every_n_steps=1)
    with warned():
        run([1, 2, NAN, 1], monitor, make_module(optimizer=optimizer), plugin=plugin(**options))
    points = monitor.health.history.points
    assert [point.skipped for point in points] == [False, False, True, False]
    assert [point.scale for point in points] == [1024, 1024, 1024, 512]
    assert [point.grad_norm for point in points[:2]] == pytest.approx([12**0.5, 2 * 12**0.5], rel=1e-2)
    assert kinds(monitor) == ["non_finite_loss"]
    assert monitor.events[0].figures["bad_batch_idx"] == 2


def test_parameters_are_named_as_in_the_module():
    module = make_module()
    with torch.no_grad():
        module.first.weight.mul_(100)
    monitor = GradScalerMonitor(every_n_steps=1)
    run([1] * 3 + [500] + [1], monitor, module, plugin=plugin(64.0))
    assert kinds(monitor) == ["isolated_skip"]
    assert monitor.events[0].figures["culprit"] == "second.weight"


@pytest.mark.parametrize("clip", [None, 1.0], ids=["unclipped", "clipped"])
def test_masters_of_a_watched_run_are_those_of_the_run_without(clip):
    def masters(*monitors):
        module = make_module(optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
        chosen = monitors[0] if monitors else GradScalerMonitor(every_n_steps=10**9)
        if not monitors:
            chosen._start = lambda *_: None  # Never begins to watch.
        run([1, 4, 300, 1], chosen, module, plugin=plugin(), gradient_clip_val=clip)
        return module.state_dict()

    without, watched = masters(), masters(GradScalerMonitor(every_n_steps=1))
    assert all(torch.equal(without[key], watched[key]) for key in without)


def test_clipping_by_hand_is_right_where_the_plugin_unscales_first():
    def manual(self, loss, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()

    monitor = GradScalerMonitor(every_n_steps=1)
    run([1, 2, 3], monitor, make_module(manual=manual), plugin=plugin())
    assert "clip_before_unscale" not in kinds(monitor)


@pytest.mark.parametrize(
    ("saved", "starts"),
    [(2.0**16, 2.0**15), (512.0, 512.0), (2.0**15, 2.0**15)],
    ids=["too-high", "low", "same"],
)
def test_a_scale_that_the_plugin_takes_over_is_told_as_it_is_used(saved, starts, tmp_path):
    _, trainer = run([0.25], GradScalerMonitor(), plugin=make_plugin(init_scale=saved))  # No overflow.
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    monitor, masters = GradScalerMonitor(every_n_steps=1), MasterWeightPrecision("16-master")
    # The loss is float16: its gradient is the scale itself, which from 2^16 on is infinite there.
    module = make_module(training_step=lambda self, batch, batch_idx: self.loss(batch).half())
    run([1] * 2, monitor, module, plugin=masters, ckpt=tmp_path / "a.ckpt", max_epochs=2)
    assert kinds(monitor) == ["scale_imported"]
    assert (
        f"loss scale of {saved:g} was taken over from the checkpoint's `MixedPrecision`"
        in monitor.events[0].message
    )
    assert f"this run starts at {starts:g}" in monitor.events[0].message
    points = monitor.health.history.points[-2:]
    assert [(point.scale, point.skipped) for point in points] == [(starts, False)] * 2


def test_a_plugin_that_ran_before_claims_no_import_for_a_new_run(tmp_path):
    _, trainer = run([1], GradScalerMonitor(), plugin=make_plugin(init_scale=512.0))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    masters = MasterWeightPrecision("16-master")
    run([1], plugin=masters, ckpt=tmp_path / "a.ckpt", max_epochs=2)
    monitor, _ = run([1], plugin=masters)
    assert kinds(monitor) == []
