from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.plugins import MasterWeightPrecision

from .runs import NAMESPACES, Reference, fit, loader, make_module, net, same


@pytest.mark.parametrize("scale", [None, 128.0], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", NAMESPACES)
def test_a_gan_with_toggling(name, scale):
    module = make_gan(name)
    if scale is None:
        fit(module, name=name)
        masters, halves = gan_reference(torch.bfloat16)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        fit(module, plugin=MasterWeightPrecision("16-master", scaler=scaler), name=name)
        masters, halves = gan_reference(torch.float16, scale)
    assert same(module.state_dict(), masters.state_dict())
    assert same(module.parameters(), halves.parameters())
    assert all(p.requires_grad for p in module.parameters())


def make_gan(name="lightning.pytorch"):
    def training_step(self, batch, batch_idx):
        x = batch[0]
        optimizers = self.optimizers()
        for which, optimizer in zip("gd", optimizers, strict=True):
            self.toggle_optimizer(optimizer)
            loss = gan_loss(self.net.g, self.net.d, x, which)
            optimizer.zero_grad()
            self.manual_backward(loss)
            others = self.net.d if which == "g" else self.net.g
            assert not any(p.requires_grad for p in others.parameters())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.g.parameters(), 0.01), torch.optim.Adam(
            self.net.d.parameters(), 0.02
        )

    torch.manual_seed(2)
    network = nn.ModuleDict({"g": nn.Linear(6, 6), "d": nn.Linear(6, 1)})
    module = make_module(
        network, name=name, training_step=training_step, configure_optimizers=configure_optimizers
    )
    module.automatic_optimization = False
    return module


def gan_loss(g, d, x, which):
    if which == "g":
        return (d(g(x)) - 1).square().mean()
    return (d(x) - 1).square().mean() + d(g(x).detach()).square().mean()


def gan_reference(dtype, scale=1.0):
    torch.manual_seed(2)
    masters = nn.ModuleDict({"g": nn.Linear(6, 6), "d": nn.Linear(6, 1)})
    halves = nn.ModuleDict({"g": nn.Linear(6, 6), "d": nn.Linear(6, 1)}).to(dtype)
    halves.load_state_dict(masters.state_dict())
    optimizers = {k: torch.optim.Adam(masters[k].parameters(), lr) for k, lr in (("g", 0.01), ("d", 0.02))}
    for batch in loader():
        for which in "gd":
            halves.zero_grad()
            gan_loss(halves["g"], halves["d"], batch[0].to(dtype), which).mul(scale).backward()
            for half, master in zip(halves[which].parameters(), masters[which].parameters(), strict=True):
                master.grad = half.grad.float() / scale
            optimizers[which].step()
            halves.load_state_dict(masters.state_dict())
    return masters, halves


def test_several_backward_passes_in_a_step():
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for x, y in zip(batch[0].split(1), batch[1].split(1), strict=True):
            self.manual_backward(nn.functional.mse_loss(self.net(x), y) / 4)
        optimizer.step()

    module = make_module(training_step=training_step)
    module.automatic_optimization = False
    fit(module)
    reference = Reference(net())
    for x, y in loader():
        for one in zip(x.split(1), y.split(1), strict=True):
            reference.backward(reference.loss(one) / 4)
        reference.step()
    assert same(module.net.state_dict(), reference.masters.state_dict())


def test_raw_backward_and_raw_step_work_in_manual_optimization():
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers().optimizer
        optimizer.zero_grad()
        nn.functional.mse_loss(self.net(batch[0]), batch[1]).backward()
        optimizer.step()

    module = make_module(training_step=training_step)
    module.automatic_optimization = False
    fit(module)
    reference = Reference(net())
    reference.fit(loader())
    assert same(module.net.state_dict(), reference.masters.state_dict())


def test_clipping_in_manual_optimization_comes_after_unscaling():
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()

    module = make_module(training_step=training_step)
    module.automatic_optimization = False
    fit(module, "16-master")
    reference = Reference(net(), dtype=torch.float16, scale=2.0**15)
    reference.fit(loader(), clip=lambda p: nn.utils.clip_grad_norm_(p, 0.1))
    assert same(module.net.state_dict(), reference.masters.state_dict())
