from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec.plugins import MasterWeightPrecision

from .runs import Reference, adamw, fit, loader, make_module, make_trainer, net, same


def wide():
    """Large enough for bitsandbytes to keep 8-bit states: from 4096 elements."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 1024), nn.Tanh(), nn.Linear(1024, 2))


def foreign(package, name, **options):
    return lambda parameters: getattr(pytest.importorskip(package), name)(parameters, lr=1e-2, **options)


FOREIGN = {
    "bitsandbytes-AdamW8bit": foreign("bitsandbytes.optim", "AdamW8bit"),
    "bitsandbytes-PagedAdamW8bit": foreign("bitsandbytes.optim", "PagedAdamW8bit"),
    "bitsandbytes-Lion8bit": foreign("bitsandbytes.optim", "Lion8bit"),
    "optimi-AdamW": foreign("optimi", "AdamW", kahan_sum=False),
    # Compensated summation is for half weights: it must see FP32 masters, and keep no compensation for them.
    "optimi-AdamW-kahan": foreign("optimi", "AdamW", kahan_sum=True),
    "optimi-Lion": foreign("optimi", "Lion"),
}


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", FOREIGN)
def test_optimizers_of_other_packages_step_the_masters(name):
    network = wide() if name.startswith("bits") else net()
    module = make_module(copy.deepcopy(network), optimizer=FOREIGN[name])
    fit(module)
    reference = Reference(network, optimizer=FOREIGN[name])
    assert same(module.losses, reference.fit(loader()))
    assert same(module.net.state_dict(), reference.masters.state_dict())
    assert same(module.net.parameters(), reference.half.parameters())


def test_schedule_free_validates_its_average():
    # Its `eval()` puts the average into the parameters it steps, and `train()` takes it out again.
    kind = pytest.importorskip("schedulefree").AdamWScheduleFree
    seen, expected = [], []

    def switch(name):
        def hook(self):
            getattr(self.trainer.optimizers[0], name)()
            getattr(self, name)()

        return hook

    def validation_step(self, batch, batch_idx):
        seen.append(self.net[0].weight.detach().clone())

    def make(parameters):
        return kind(parameters, lr=1e-2)

    module = make_module(
        optimizer=make,
        on_train_epoch_start=switch("train"),
        on_validation_model_eval=switch("eval"),
        on_validation_model_train=switch("train"),
        validation_step=validation_step,
    )
    trainer = make_trainer(MasterWeightPrecision(), val_check_interval=2, num_sanity_val_steps=0)
    trainer.fit(module, loader(), loader(1))
    reference = Reference(net(), optimizer=make)
    reference.optimizer.train()
    for index, batch in enumerate(loader()):
        reference.backward(reference.loss(batch))
        reference.step()
        if index % 2:
            reference.optimizer.eval()
            expected.append(reference.masters[0].weight.detach().bfloat16())
            reference.optimizer.train()
            reference.round()
    assert same(seen, expected)
    assert same(module.net.state_dict(), reference.masters.state_dict())
    assert same(module.net.parameters(), reference.half.parameters())


schedulers = torch.optim.lr_scheduler
SCHEDULERS = {
    "OneCycle-betas": (adamw, lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=9)),
    "OneCycle-momentum": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=9),
    ),
    "plateau": (adamw, lambda o: schedulers.ReduceLROnPlateau(o, patience=0)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_reach_the_optimizer(name):
    make, schedule = SCHEDULERS[name]

    def configure_optimizers(self):
        optimizer = make(self.parameters())
        scheduler = {"scheduler": schedule(optimizer), "interval": "step", "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    module = make_module(configure_optimizers=configure_optimizers, training_step=training_step)
    trainer = fit(module, max_epochs=2)
    reference = Reference(net(), optimizer=make)
    scheduler = schedule(reference.optimizer)
    for batch in [*loader(), *loader()]:
        loss = reference.loss(batch)
        reference.backward(loss)
        reference.step()
        scheduler.step(*([loss.detach().float()] if name == "plateau" else []))
    assert reference.optimizer.param_groups[0]["lr"] != scheduler.optimizer.defaults["lr"]
    assert trainer.optimizers[0].param_groups[0]["lr"] == reference.optimizer.param_groups[0]["lr"]
    assert same(module.net.state_dict(), reference.masters.state_dict())


class Bag(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.table = nn.Embedding(10, 2, sparse=True)

    def forward(self, x):
        return self.table(x).sum(1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sparse_gradients(accumulate):
    def sparse_adam(parameters):
        return torch.optim.SparseAdam(list(parameters), lr=0.1)

    x = torch.randint(10, (8, 3), generator=torch.Generator().manual_seed(1))
    batches = DataLoader(TensorDataset(x, torch.ones(8, 2)), batch_size=2)
    module = make_module(Bag(), optimizer=sparse_adam)
    fit(module, train=batches, accumulate_grad_batches=accumulate)
    masters, half = Bag(), Bag().bfloat16()
    optimizer = sparse_adam(masters.parameters())
    for index, (inputs, targets) in enumerate(batches):
        (nn.functional.mse_loss(half(inputs), targets.bfloat16()) / accumulate).backward()
        gradient, half.table.weight.grad = half.table.weight.grad.float(), None
        before = masters.table.weight.grad
        masters.table.weight.grad = gradient if before is None else before + gradient
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            half.load_state_dict(masters.state_dict())
    assert same(module.net.state_dict(), masters.state_dict())


def test_an_optimizer_inside_another_is_refused(tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer as Sharding

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        module = make_module(optimizer=lambda p: Sharding(list(p), torch.optim.AdamW, lr=1e-2))
        with pytest.raises(Exception, match="`ZeroRedundancyOptimizer` steps the half parameters") as caught:
            fit(module)
    finally:
        torch.distributed.destroy_process_group()
    assert type(caught.value).__name__ == "MisconfigurationException"


def test_adam_in_float16_stays_finite_where_pure_half_does_not():
    # In float16 Adam's eps of 1e-8 is 0, and the second moment of a gradient below 5e-3 underflows.
    gradient = torch.tensor([0.0, 1e-7, 1e-4, 5e-3], dtype=torch.float16)
    pure = nn.Parameter(torch.ones(4, dtype=torch.float16))
    pure.grad = gradient.clone()
    torch.optim.Adam([pure]).step()
    assert not pure.isfinite().any()

    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    def training_step(self, batch, batch_idx):
        return (self.net.weight * gradient).sum()

    module = make_module(Weight(), optimizer=torch.optim.Adam, training_step=training_step)
    fit(module, "16-master", max_steps=2)
    single = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([single])
    for _ in range(2):
        single.grad = gradient.float()
        optimizer.step()
    assert torch.equal(module.state_dict()["net.weight"], single)
