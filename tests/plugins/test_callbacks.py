from __future__ import annotations

import importlib

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_memprec.plugins import MasterWeightPrecision

from .runs import NAMESPACES, Reference, fit, loader, make_module, make_trainer, net, same


def callbacks(name="lightning.pytorch"):
    return importlib.import_module(f"{name}.callbacks")


def reference_average(epochs, **options):
    """Train with masters written out and average them in FP32 after every step."""
    reference = Reference(net())
    average = AveragedModel(reference.masters, **options)
    for batch in list(loader()) * epochs:
        reference.backward(reference.loss(batch))
        reference.step()
        average.update_parameters(reference.masters)
    return reference, average.module.state_dict()


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("validates", [False, True], ids=["train-only", "validating"])
def test_averages_are_those_of_the_masters(validates, name, tmp_path):
    average = callbacks(name).EMAWeightAveraging(decay=0.5)
    save = callbacks(name).ModelCheckpoint(tmp_path, filename="saved")
    module, seen = make_module(name=name), []
    type(module).on_validation_batch_start = lambda self, *_: seen.append(self.state_dict())
    trainer = make_trainer(
        MasterWeightPrecision(), name, max_epochs=2, callbacks=[average, save], enable_checkpointing=True
    )
    trainer.fit(module, loader(), loader(1) if validates else None)
    reference, expected = reference_average(2, avg_fn=get_ema_avg_fn(0.5))
    file = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert any((value != value.bfloat16()).any() for value in expected.values())
    assert same(file["state_dict"], expected)
    assert same(file["current_model_state"], reference.masters.state_dict())
    # Training ends with the average in the model; validation had it, too.
    assert same(module.state_dict(), expected)
    assert same(module.parameters(), [value.bfloat16() for value in expected.values()])
    assert not validates or same(seen[-1], expected)
    assert "on_train_batch_end" not in vars(average)


def test_an_average_made_from_a_half_module_starts_from_its_masters():
    module = make_module()
    fit(module)
    masters = {key: value.clone() for key, value in module.state_dict().items()}
    average = callbacks().EMAWeightAveraging(update_starting_at_step=99)
    fit(module, callbacks=[average])
    assert same(average._average_model.module.state_dict(), masters)


def test_stochastic_weight_averaging_averages_masters():
    ends = []

    class Keep(callbacks().Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            ends.append({key: value.double() for key, value in pl_module.net.state_dict().items()})

    module = make_module(optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    average = callbacks().StochasticWeightAveraging(0.05, swa_epoch_start=2)
    fit(module, max_epochs=4, callbacks=[Keep(), average])
    for key, value in module.net.state_dict().items():
        mean = sum(end[key] for end in ends[1:]) / 3
        assert torch.allclose(value.double(), mean, rtol=0, atol=1e-6)  # A running mean, rounded in FP32.


def test_an_average_of_ones_own_can_see_the_masters():
    averages = []

    def update(self, *_):
        if not averages:
            averages.append(AveragedModel(net()))
        with self.trainer.precision_plugin.show_masters():
            averages[0].update_parameters(self.net)
        assert {p.dtype for p in self.parameters()} == {torch.bfloat16}

    module = make_module(on_train_batch_end=update)
    trainer = fit(module)
    reference, expected = reference_average(1)
    assert same(averages[0].module.state_dict(), expected)
    assert same(module.net.state_dict(), reference.masters.state_dict())
    with pytest.raises(RuntimeError, match="needs a run"):
        trainer.precision_plugin.show_masters()


def test_writing_to_shown_masters_reaches_the_parameters():
    def halve(self, *_):
        with torch.no_grad(), self.trainer.precision_plugin.show_masters():
            for parameter in self.parameters():
                parameter.mul_(0.7)

    module = make_module(on_train_batch_end=halve)
    fit(module)
    reference = Reference(net())
    for batch in loader():
        reference.backward(reference.loss(batch))
        reference.step()
        with torch.no_grad():
            for master in reference.masters.parameters():
                master.mul_(0.7)
        reference.round()
    assert same(module.net.state_dict(), reference.masters.state_dict())
    assert same(module.parameters(), reference.half.parameters())


@pytest.mark.parametrize("name", NAMESPACES)
def test_fine_tuning_unfreezes_fp32_values(name):
    class Unfreeze(callbacks(name).BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=1e-5)

    def sgd(parameters):
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)

    module, callback = make_module(name=name, optimizer=sgd), Unfreeze()
    fit(module, name=name, max_epochs=2, callbacks=[callback])
    reference = Reference(net())
    for index, (half, master) in enumerate(
        zip(reference.half.parameters(), reference.masters.parameters(), strict=True)
    ):
        half.requires_grad_(index > 1)
        master.requires_grad_(index > 1)
    reference.optimizer = sgd(reference.masters.parameters())
    reference.fit(loader())
    reference.half.requires_grad_(True)
    reference.optimizer.add_param_group({"params": list(reference.masters[0].parameters()), "lr": 1e-5})
    reference.fit(loader())
    assert same(module.net.state_dict(), reference.masters.state_dict())
    assert all(p.requires_grad for p in module.parameters())
    names = [group["params"] for group in callback._internal_optimizer_metadata[0]]
    assert names == [["net.2.weight", "net.2.bias"], ["net.0.weight", "net.0.bias"]]


def test_scheduled_accumulation():
    module = make_module()
    fit(module, max_epochs=2, callbacks=[callbacks().GradientAccumulationScheduler({0: 1, 1: 2})])
    reference = Reference(net())
    reference.fit(loader())
    reference.fit(loader(), accumulate=2)
    assert same(module.net.state_dict(), reference.masters.state_dict())
