"""FP32 master weights beside an FP16 model: gradients lie elsewhere, the words stay the same."""

from __future__ import annotations

import pytest
import torch

from lightning_memprec.callbacks.grad_scaler_monitor import GradScalerMonitor
from lightning_memprec.plugins.master_weights import MasterWeightPrecision

from .scaler_runs import NAN, fused, kinds, make_module, run, sgd


def plugin(scale=1024.0, **options):
    return MasterWeightPrecision("16-master", scaler=torch.amp.GradScaler("cpu", init_scale=scale), **options)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(sgd, {}), (fused, {}), (sgd, {"low_memory": True})],
    ids=["plain", "fused", "low-memory"],
)
def test_skips_norms_and_names(optimizer, options):
    monitor = GradScalerMonitor(every_n_steps=1)
    with pytest.warns(UserWarning, match="GradScalerMonitor, step"):
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
