from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.plugins import MasterWeightPrecision

from .runs import DTYPES, adamw, fit, loader, make_module, make_trainer, same

SEPARABLE = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
]  # fmt: skip


def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def two_groups(kind, **options):
    def make(parameters):
        parameters = list(parameters)
        return kind([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.003}], lr=0.01, **options)

    return make


def trained(precision="bf16-master", optimizer=adamw, train_options=None, net=None, **options):
    module = make_module(net or network(), optimizer=optimizer)
    trainer = fit(module, plugin=MasterWeightPrecision(precision, **options), **(train_options or {}))
    return module, trainer


def assert_same_run(left, right):
    assert same(left[0].state_dict(), right[0].state_dict())
    assert same(left[0].parameters(), right[0].parameters())
    one, two = (t.optimizers[0].state_dict()["state"] for _, t in (left, right))
    assert one.keys() == two.keys()
    assert all(same(one[key], two[key]) for key in one)


@pytest.mark.parametrize("option", ["low_memory", "step_in_backward"])
@pytest.mark.parametrize("name", SEPARABLE)
def test_trajectory_is_the_default_one(name, option):
    optimizer = two_groups(getattr(torch.optim, name))
    assert_same_run(trained(optimizer=optimizer), trained(optimizer=optimizer, **{option: True}))


@pytest.mark.parametrize("option", ["low_memory", "step_in_backward"])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_trajectory_is_the_default_one_in_every_implementation(implementation, option):
    optimizer = two_groups(torch.optim.AdamW, **{implementation: True})
    assert_same_run(trained(optimizer=optimizer), trained(optimizer=optimizer, **{option: True}))


def test_muon_is_separable():
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False))
    runs = []
    for low in (False, True):
        with torch.no_grad():
            for index, parameter in enumerate(net.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * (index + 1))
        net.float()
        runs.append(trained(optimizer=torch.optim.Muon, net=__import__("copy").deepcopy(net), low_memory=low))
    assert_same_run(*runs)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_bit_equal(precision, algorithm):
    options = {"train_options": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}}
    assert_same_run(trained(precision, **options), trained(precision, low_memory=True, **options))


def test_an_overflow_is_skipped_as_by_default():
    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return loss * 1e6 if batch_idx == 1 else loss

    runs = []
    for low in (False, True):
        module = make_module(network(), training_step=training_step)
        runs.append((module, fit(module, plugin=MasterWeightPrecision("16-master", low_memory=low))))
    assert_same_run(*runs)
    scalers = [trainer.scaler.state_dict() for _, trainer in runs]
    assert scalers[0] == scalers[1]
    assert scalers[0]["scale"] == 2.0**14


@pytest.mark.parametrize(
    ("options", "trainer_options", "message"),
    [
        ({"low_memory": True}, {"accumulate_grad_batches": 2}, "do not add up exactly in half"),
        ({"step_in_backward": True}, {"gradient_clip_val": 1.0}, "clipping needs all gradients"),
        ({"step_in_backward": True, "precision": "16-master"}, {}, "a scaler must see all gradients"),
    ],
)
def test_what_cannot_be_right_is_refused(options, trainer_options, message):
    trainer = make_trainer(MasterWeightPrecision(**options), **trainer_options)
    with pytest.raises(Exception, match=message) as caught:
        trainer.fit(make_module(), loader())
    assert type(caught.value).__name__ == "MisconfigurationException"


def test_two_ways_at_once_are_refused():
    with pytest.raises(ValueError, match="two ways to save memory: pass one of them"):
        MasterWeightPrecision(low_memory=True, step_in_backward=True)


class Derived(torch.optim.SGD):
    pass


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Derived])
def test_optimizers_that_may_couple_parameters_are_refused(kind):
    trainer = make_trainer(MasterWeightPrecision(low_memory=True))
    with pytest.raises(
        Exception, match=f"`{kind.__name__}` is not known to treat every parameter on its own"
    ):
        trainer.fit(make_module(optimizer=lambda p: kind(p, lr=0.1)), loader())


def test_manual_optimization_is_refused():
    module = make_module()
    module.automatic_optimization = False
    with pytest.raises(Exception, match="in manual optimization the steps are the module's own"):
        make_trainer(MasterWeightPrecision(low_memory=True)).fit(module, loader())
