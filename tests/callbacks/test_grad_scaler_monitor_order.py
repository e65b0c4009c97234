"""Manual optimization: several optimizers, and calls in the wrong order."""

from __future__ import annotations

import pytest
import torch

from lightning_memprec.callbacks.grad_scaler_monitor import GradScalerMonitor

from .runs import NAMESPACES
from .scaler_runs import NAN, fused, kinds, make_module, make_plugin, run, sgd, warned

PLAIN = {"init_scale": 1024.0}


def step(self, loss, batch_idx):
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(loss)
    optimizer.step()


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("optimizer", [sgd, fused], ids=["plain", "fused"])
def test_right_order_is_quiet(name, optimizer):
    module = make_module(name, optimizer, manual=step)
    monitor, _ = run([1, 2, 3, 4], module=module, name=name, plugin=make_plugin(name, **PLAIN))
    assert kinds(monitor) == []
    norms = [point.grad_norm for point in monitor.health.history.points]
    assert norms == pytest.approx([amplitude * 12**0.5 for amplitude in (1, 2, 3, 4)], rel=1e-2)


def test_zeroing_after_the_step_still_lets_the_culprit_be_named_at_the_next():
    def manual(self, loss, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    monitor, _ = run([1, 500, 500, 1], module=make_module(manual=manual), plugin=make_plugin(**PLAIN))
    points = monitor.health.history.points
    assert [point.skipped for point in points] == [False, True, True, False]
    assert monitor.events[0].figures["culprit"] == "first.weight"


def clip_with_lightning(self, loss, batch_idx):
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(loss)
    self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
    optimizer.step()


def clip_with_torch(self, loss, batch_idx):
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(loss)
    torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("manual", [clip_with_lightning, clip_with_torch], ids=["lightning", "torch"])
def test_clipping_before_unscaling(manual):
    with warned():
        monitor, _ = run(
            [1, 2, 3, 1], GradScalerMonitor(), make_module(manual=manual), plugin=make_plugin(**PLAIN)
        )
    assert kinds(monitor) == ["clip_before_unscale"]
    assert "the step is 1024 times too small" in monitor.events[0].message
    # And so it is.
    norms = [point.grad_norm for point in monitor.health.history.points]
    assert norms == pytest.approx([1 / 1024] * 4, rel=1e-3)


def test_clipping_in_the_hook_is_right():
    def on_before_optimizer_step(self, optimizer):
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")

    module = make_module(manual=step, on_before_optimizer_step=on_before_optimizer_step)
    monitor, _ = run([1, 2, 3], module=module, plugin=make_plugin(**PLAIN))
    assert kinds(monitor) == []
    # The norm before clipping.
    assert monitor.health.history.points[2].grad_norm == pytest.approx(3 * 12**0.5, rel=1e-2)


def test_dividing_gradients_by_hand_is_no_clipping():
    def manual(self, loss, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        for parameter in self.parameters():
            parameter.grad /= 4
        optimizer.step()

    monitor, _ = run([1, 2, 3], module=make_module(manual=manual), plugin=make_plugin(**PLAIN))
    assert kinds(monitor) == []


def raw(self, loss, batch_idx):
    optimizer = self.optimizers()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_raw_backward_from_the_start_is_explained():
    monitor = GradScalerMonitor()
    with warned(), pytest.raises(AssertionError, match="_scale is None") as caught:
        run([1, 1], monitor, make_module(manual=raw))
    assert kinds(monitor) == ["raw_backward"]
    notes = getattr(caught.value, "__notes__", [monitor.events[0].message])
    assert "self.manual_backward(loss)" in notes[0]


def test_raw_backward_later_on_is_found_though_torch_says_nothing():
    def manual(self, loss, batch_idx):
        (step if batch_idx < 2 else raw)(self, loss, batch_idx)

    with warned():
        monitor, _ = run([1, 1, 1, 1], module=make_module(manual=manual), plugin=make_plugin(**PLAIN))
    assert kinds(monitor) == ["raw_backward"]
    assert monitor.events[0].batch_idx == 2
    assert monitor.health.history.points[2].grad_norm == pytest.approx(12**0.5 / 1024, rel=1e-2)


def test_raw_backward_beside_another_optimizers_right_one():
    def manual(self, loss, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.zero_grad()
        self.loss((torch.ones(1, 2), torch.ones(1))).backward()
        second.step()

    monitor = GradScalerMonitor()
    with warned():
        run(
            [1, 2, 3, 4], monitor, make_module(optimizer=two(sgd), manual=manual), plugin=make_plugin(**PLAIN)
        )
    # The norm has shrunk since Lightning's backward pass, but nobody has clipped.
    assert kinds(monitor) == ["raw_backward", "growth_shared"]
    assert monitor.events[0].step == 1


def test_second_unscale_is_explained():
    def manual(self, loss, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(loss)
        self.trainer.precision_plugin.scaler.unscale_(optimizer.optimizer)
        optimizer.step()

    monitor = GradScalerMonitor()
    with warned(), pytest.raises(RuntimeError, match="already been called"):
        run([1], monitor, make_module(manual=manual))
    assert kinds(monitor) == ["second_unscale"]


def test_optimizer_without_gradients_is_explained():
    def manual(self, loss, batch_idx):
        self.manual_backward(loss.detach().requires_grad_())
        self.optimizers().step()

    monitor = GradScalerMonitor()
    with warned(), pytest.raises(AssertionError, match="No inf checks"):
        run([1], monitor, make_module(manual=manual))
    assert kinds(monitor) == ["no_gradients"]


def test_fp16_gradients_are_explained():
    module = make_module().half()
    module.training_step = lambda batch, batch_idx: module.loss((batch[0].half(), batch[1]))
    monitor = GradScalerMonitor()
    with warned(), pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        run([1], monitor, module)
    assert kinds(monitor) == ["fp16_gradients"]


def test_an_error_of_the_users_own_is_left_alone():
    def manual(self, loss, batch_idx):
        raise KeyError("mine")

    monitor = GradScalerMonitor()
    with pytest.raises(KeyError, match="mine"):
        run([1], monitor, make_module(manual=manual))
    assert kinds(monitor) == []


def two(kind):
    def optimizers(parameters):
        parameters = list(parameters)
        return [kind(parameters[:2]), kind(parameters[2:])]

    return optimizers


def both(self, loss, batch_idx):
    """Step on the first layer with the batch's loss, on the second with its own, bad in batch 2."""
    first, second = self.optimizers()
    for optimizer, factor in ((first, 1.0), (second, NAN if batch_idx == 2 else 1.0)):
        optimizer.zero_grad()
        self.toggle_optimizer(optimizer)
        self.manual_backward(self.loss(self.batch) * factor)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


@pytest.mark.parametrize("kinds_of", [(sgd, "plain"), (fused, "fused")], ids=["plain", "fused"])
def test_two_optimizers_are_told_apart(kinds_of):
    def on_train_batch_start(self, batch, batch_idx):
        self.batch = batch

    module = make_module(optimizer=two(kinds_of[0]), manual=both, on_train_batch_start=on_train_batch_start)
    with warned():
        monitor, trainer = run([1] * 5, module=module, plugin=make_plugin(**PLAIN))
    assert monitor.health.totals.steps == {0: 5, 1: 5}
    assert monitor.health.totals.skipped == {0: 0, 1: 1}
    assert trainer.global_step == 10
    assert kinds(monitor) == ["growth_shared", "non_finite_loss"]
    assert monitor.events[1].step == 5
    # Each optimizer has its own half of the gradients.
    norms = [point.grad_norm for point in monitor.health.history.points if not point.skipped]
    assert norms == pytest.approx([6**0.5] * 9, rel=1e-2)


def test_one_backward_for_two_optimizers_is_no_raw_backward():
    def manual(self, loss, batch_idx):
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    module = make_module(optimizer=two(sgd), manual=manual)
    monitor, _ = run([1] * 4, module=module, plugin=make_plugin(**PLAIN))
    assert kinds(monitor) == ["growth_shared"]
    assert [point.skipped for point in monitor.health.history.points] == [False] * 8


def test_accumulation_by_hand():
    def manual(self, loss, batch_idx):
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    with warned():
        monitor, _ = run([1, 1, 1, 1, NAN, 1], module=make_module(manual=manual), plugin=make_plugin(**PLAIN))
    assert monitor.health.totals.steps == {0: 2}
    assert monitor.events[0].figures["bad_batch_idx"] == 4


def test_closures_of_a_run_without_scaler():
    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=1e-3, max_iter=3)

    monitor, trainer = run(
        [1, 2], module=make_module(optimizer=lbfgs), plugin=make_plugin(precision="bf16-mixed")
    )
    assert kinds(monitor) == []
    # A step evaluates its closure three times.
    assert trainer.global_step == 2
    assert monitor.health.totals.steps == {0: 2}
    norms = [point.grad_norm for point in monitor.health.history.points]
    assert norms == pytest.approx([12**0.5, 2 * 12**0.5], rel=1e-2)
