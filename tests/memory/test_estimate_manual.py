"""Manual optimization, several optimizers, schedulers."""

from __future__ import annotations

import pytest
import torch

from lightning_memprec import estimate_memory
from tests.memory.small_lightning import DEVICES, Module, X, module_with, run_for_real


def manual(build_optimizers, step):
    def build(self):
        self.automatic_optimization = False

    return module_with(
        build=build,
        configure_optimizers=build_optimizers,
        training_step=lambda self, batch, batch_idx: step(self, batch),
    )


def two_optimizers(self):
    return [torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.Adam(self.net[2].parameters())], []


def alternate(self, batch):
    first, second = self.optimizers()
    self.toggle_optimizer(first)
    assert not self.net[2].weight.requires_grad
    self.manual_backward(self.net(batch).sum())
    assert self.net[2].weight.grad is None
    first.step()
    first.zero_grad()
    self.untoggle_optimizer(first)
    with second.toggle_model():
        self.manual_backward(self.net(batch).sum())
        self.clip_gradients(second, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        second.step()
        second.zero_grad()


@pytest.mark.parametrize("device", DEVICES)
def test_manual_optimization_with_two_optimizers(device):
    estimate = estimate_memory(manual(two_optimizers, alternate), X, device=device)
    states = {s.owner for s in estimate.events.storages if s.category == "optimizer states"}
    assert states == {"net.2.weight", "net.2.bias"}  # SGD has none
    gradients = {s.owner for s in estimate.events.storages if s.category == "gradients"}
    assert gradients == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    run_for_real(manual(two_optimizers, alternate), X)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_schedulers_can_be_stepped_by_hand(count):
    seen = []

    def configure(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for _ in range(count)]

    def step(self, batch):
        optimizer, schedulers = self.optimizers(), self.lr_schedulers()
        assert (schedulers is None) == (count == 0)
        optimizer.zero_grad()
        self.manual_backward(self.net(batch).sum())
        optimizer.step()
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers] if schedulers else []:
            scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])

    estimate_memory(manual(configure, step), X, device="cpu")
    traced = seen.copy()
    seen.clear()
    run_for_real(manual(configure, step), X)
    assert traced == seen


def test_schedulers_may_ask_for_the_length_of_the_run():
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            },
        }

    estimate_memory(module_with(configure_optimizers=configure_optimizers), X, device="cpu")


def test_no_optimizer_is_a_run_without_steps():
    estimate = estimate_memory(module_with(configure_optimizers=lambda self: None), X, device="cpu")
    assert estimate.breakdown.optimizer_states_bytes == 0
    assert not any(p.name == "optimizer_step" for p in estimate.phases)


def test_an_argument_goes_before_the_modules_own_optimizer_and_step():
    own = estimate_memory(Module(), X, device="cpu")
    sgd = estimate_memory(Module(), X, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), device="cpu")
    assert own.breakdown.optimizer_states_bytes > sgd.breakdown.optimizer_states_bytes == 0
    estimate = estimate_memory(
        Module(), X, loss=lambda module, batch: module.net(batch[:1]).sum(), device="cpu"
    )
    assert estimate.phases[1].peak_allocated_bytes <= own.phases[1].peak_allocated_bytes
