from __future__ import annotations

import copy
import importlib
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec.plugins import MasterWeightPrecision

from .runs import DTYPES, NAMESPACES, fit, loader, make_module, make_trainer, net, same


def cloned(state):
    return {key: value.clone() for key, value in state.items()}


def overflowing(self, batch, batch_idx):
    """A training step whose gradients are infinite in the second batch of an epoch."""
    loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
    return loss * 1e6 if batch_idx == 1 and self.overflows else loss


def batchnorm_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


@pytest.mark.parametrize("built_in_half", [False, True], ids=["fp32-built", "half-built"])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", NAMESPACES)
def test_one_and_one_epochs_are_two_bit_for_bit(precision, name, built_in_half, tmp_path):
    def module():
        network = batchnorm_net()
        if built_in_half:
            network[0].to(DTYPES[precision])
        made = make_module(network, name=name, training_step=overflowing)
        made.overflows = precision == "16-master"
        return made

    straight = module()
    whole = fit(straight, precision, name=name, max_epochs=2)
    first = module()
    half_way = fit(first, precision, name=name)
    half_way.save_checkpoint(tmp_path / "one.ckpt")
    second = module()
    resumed = make_trainer(MasterWeightPrecision(precision), name=name, max_epochs=2)
    resumed.fit(second, loader(), ckpt_path=tmp_path / "one.ckpt")
    assert same(second.state_dict(), straight.state_dict())
    assert same(second.parameters(), straight.parameters())
    assert same(second.buffers(), straight.buffers())
    if precision == "16-master":
        assert resumed.scaler.state_dict() == whole.scaler.state_dict()
        assert whole.scaler.get_scale() < 2**15
    left, right = (t.optimizers[0].state_dict()["state"] for t in (resumed, whole))
    assert all(same(left[key], right[key]) for key in right)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("precision", DTYPES)
def test_resuming_in_the_middle_of_an_epoch(precision, tmp_path):
    # Lightning starts a plain loader anew, so all batches are the same.
    batch = next(iter(loader()))
    batches = DataLoader(TensorDataset(*(tensor.repeat(4, 1) for tensor in batch)), batch_size=4)

    def module():
        made = make_module(training_step=overflowing)
        made.overflows = precision == "16-master"
        return made

    straight, resumed = module(), module()
    whole = fit(straight, precision, train=batches, callbacks=[Keep(tmp_path)])
    again = make_trainer(MasterWeightPrecision(precision))
    again.fit(resumed, batches, ckpt_path=tmp_path / "mid.ckpt")
    assert again.global_step == whole.global_step == 4
    assert same(resumed.state_dict(), straight.state_dict())
    assert same(resumed.parameters(), straight.parameters())


def test_an_fp32_run_continues_from_its_own_values(tmp_path):
    single = make_module()
    trainer = make_trainer()
    trainer.fit(single, loader())
    trainer.save_checkpoint(tmp_path / "single.ckpt")
    module, states = make_module(net(seed=9)), []
    type(module).on_train_start = lambda self: states.append(cloned(self.state_dict()))
    resumed = make_trainer(MasterWeightPrecision(), max_epochs=2)
    resumed.fit(module, loader(), ckpt_path=tmp_path / "single.ckpt")
    assert same(states[0], single.state_dict())


def test_evaluation_leaves_the_masters_alone(tmp_path):
    module = make_module(
        test_step=lambda self, *_: None, predict_step=lambda self, batch, _: self.net(batch[0])
    )
    fresh = cloned(module.state_dict())
    make_trainer(MasterWeightPrecision()).test(module, loader(), verbose=False)
    assert same(module.state_dict(), fresh)
    trainer = fit(module)
    masters = cloned(module.state_dict())
    for evaluating in (trainer, make_trainer(MasterWeightPrecision()), make_trainer(precision="bf16-true")):
        evaluating.test(module, loader(), verbose=False)
        assert evaluating.predict(module, loader())[0].dtype == torch.bfloat16
        assert same(module.state_dict(), masters)


def test_the_module_becomes_fp32_again_by_its_state():
    module = make_module()
    fit(module)
    masters = cloned(module.state_dict())
    module.float().load_state_dict(masters)
    assert same(module.parameters(), masters.values())
    make_trainer().fit(module, loader())
    assert same(module.state_dict().values(), module.parameters())


def saved_by(how, tmp_path, name="lightning.pytorch"):
    """Train, save in one of the ways, and return the trained module and the file."""
    module, path = make_module(name=name), tmp_path / "saved.ckpt"
    callbacks, plugins = [], []
    if how.startswith("callback"):
        callbacks = [
            importlib.import_module(f"{name}.callbacks").ModelCheckpoint(
                tmp_path, filename="saved", save_weights_only=how.endswith("weights")
            )
        ]
    elif how == "async":
        plugins = [importlib.import_module(f"{name}.plugins.io").AsyncCheckpointIO()]
        callbacks = [importlib.import_module(f"{name}.callbacks").ModelCheckpoint(tmp_path, filename="saved")]
    trainer = fit(
        module, name=name, callbacks=callbacks, plugins=plugins, enable_checkpointing=bool(callbacks)
    )
    if not callbacks:
        trainer.save_checkpoint(path, weights_only=how == "weights")
    return module, path


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
@pytest.mark.parametrize("how", ["full", "weights", "callback-full", "callback-weights", "async"])
def test_every_way_of_saving_holds_the_masters(how, tmp_path):
    module, path = saved_by(how, tmp_path)
    file = torch.load(path, weights_only=True)
    masters = module.state_dict()
    assert any((value != value.bfloat16()).any() for value in masters.values())
    assert same(file["state_dict"], masters)
    assert list(file["state_dict"]) == [f"net.{key}" for key in net().state_dict()]


def test_files_open_elsewhere(tmp_path):
    module, path = saved_by("full", tmp_path)
    masters = cloned(module.state_dict())
    # In an FP32 Trainer, with the optimizer's moments.
    single = make_module()
    trainer = make_trainer(max_epochs=2, limit_train_batches=1)
    trainer.fit(single, loader(), ckpt_path=path)
    moments = trainer.optimizers[0].state_dict()["state"].values()
    assert {value.dtype for state in moments for value in state.values()} == {torch.float32}
    # In a bf16-true Trainer.
    half = make_module()
    make_trainer(precision="bf16-true", max_epochs=1).validate(half, loader(), ckpt_path=path, verbose=False)
    assert same(half.state_dict(), {key: value.bfloat16() for key, value in masters.items()})
    # Without a Trainer.
    assert same(type(module).load_from_checkpoint(path).state_dict(), masters)


@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint_holds_the_masters(tmp_path):
    from torch.distributed.checkpoint import state_dict as dcp

    module = make_module()
    fit(module)
    masters = cloned(module.state_dict())
    state = dcp.get_model_state_dict(module)
    assert same(state, masters)
    changed = {key: value + 2.0**-20 for key, value in masters.items()}
    dcp.set_model_state_dict(module, changed)
    assert same(module.state_dict(), changed)
    torch.distributed.checkpoint.save(dcp.get_model_state_dict(module), checkpoint_id=tmp_path, no_dist=True)
    other = make_module(net(seed=9))
    fit(other)
    state = dcp.get_model_state_dict(other)
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    dcp.set_model_state_dict(other, state)
    assert same(other.state_dict(), changed)
    assert same(other.parameters(), [value.bfloat16() for value in changed.values()])


def test_submodule_state_is_fp32_too():
    module = make_module()
    fit(module)
    assert same(
        module.net[0].state_dict(), {k[2:]: v for k, v in module.net.state_dict().items() if k[0] == "0"}
    )
    assert module.net[0].state_dict()["weight"].dtype == torch.float32


def test_a_checkpoint_in_half_is_told_apart(tmp_path):
    module = make_module()
    trainer = make_trainer(precision="bf16-true")
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    again = make_module()
    resumed = make_trainer(MasterWeightPrecision(), max_epochs=2)
    with pytest.warns(UserWarning, match="mantissas beyond it were lost"):
        resumed.fit(again, loader(), ckpt_path=tmp_path / "half.ckpt")
    moments = resumed.optimizers[0].state_dict()["state"].values()
    assert {value.dtype for state in moments for value in state.values()} == {torch.float32}


@pytest.mark.parametrize("name", NAMESPACES)
def test_the_scale_of_an_amp_run_is_taken_over(name, tmp_path):
    MixedPrecision = importlib.import_module(f"{name}.plugins").MixedPrecision
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trainer = make_trainer(MixedPrecision("16-mixed", "cpu", scaler), name=name)
    trainer.fit(make_module(name=name), loader())
    trainer.save_checkpoint(tmp_path / "amp.ckpt")
    plugin = MasterWeightPrecision("16-master")
    resumed = make_trainer(plugin, name=name, max_epochs=2)
    resumed.fit(make_module(name=name), loader(), ckpt_path=tmp_path / "amp.ckpt")
    assert resumed.scaler.get_scale() == 64.0


def test_a_scaler_of_the_users_own_takes_the_scale_as_it_is(tmp_path):
    MixedPrecision = importlib.import_module("lightning.pytorch.plugins").MixedPrecision
    trainer = make_trainer(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**18)))
    trainer.fit(make_module(), loader(1))
    trainer.save_checkpoint(tmp_path / "amp.ckpt")
    before = trainer.scaler.get_scale()
    assert before > 2.0**15
    seen = []
    module = make_module(on_train_start=lambda self: seen.append(self.trainer.scaler.get_scale()))
    plugin = MasterWeightPrecision("16-master", scaler=torch.amp.GradScaler("cpu"))
    make_trainer(plugin, max_epochs=2).fit(module, loader(1), ckpt_path=tmp_path / "amp.ckpt")
    assert seen == [before]


@pytest.mark.parametrize("what", ["lr", "batch_size"])
@pytest.mark.filterwarnings("ignore:.*in the `DataLoader` to be able to")
def test_tuners_put_the_masters_back(what, tmp_path):
    from lightning.pytorch.tuner import Tuner

    module = make_module(optimizer=None)
    module.lr, module.batch_size = 1e-2, 2
    type(module).configure_optimizers = lambda self: torch.optim.Adam(self.parameters(), lr=self.lr)
    type(module).train_dataloader = lambda self: loader(8, self.batch_size)
    before = cloned(module.state_dict())
    type(module).val_dataloader = lambda self: loader(1)
    trainer = make_trainer(MasterWeightPrecision(), default_root_dir=tmp_path, logger=False)
    tuner = Tuner(trainer)
    if what == "lr":
        tuner.lr_find(module, num_training=6, early_stop_threshold=None, update_attr=False)
    else:
        tuner.scale_batch_size(module, max_trials=2, steps_per_trial=2)
    assert same(module.state_dict(), before)


def through_file(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_file], ids=["deepcopy", "torch.save"])
def test_a_copy_of_the_module_trains_on_its_own(copied):
    module = make_module()
    fit(module)
    masters = cloned(module.state_dict())
    twin = make_module(copied(module.net))
    assert {value.dtype for value in twin.state_dict().values()} == {torch.bfloat16}
    fit(twin)
    assert same(module.state_dict(), masters)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_weight_averaging_resumes_the_weights_that_were_trained(tmp_path):
    from lightning.pytorch.callbacks import WeightAveraging

    straight = make_module()
    fit(straight, max_epochs=2, callbacks=[WeightAveraging()])
    trainer = fit(make_module(), callbacks=[WeightAveraging(), Keep(tmp_path)])
    assert trainer.current_epoch == 1
    file = torch.load(tmp_path / "mid.ckpt", weights_only=True)
    resumed = make_module()
    again = make_trainer(MasterWeightPrecision(), max_epochs=1, callbacks=[WeightAveraging()])
    states = []
    type(resumed).on_train_start = lambda self: states.append(cloned(self.state_dict()))
    again.fit(resumed, loader(), ckpt_path=tmp_path / "mid.ckpt")
    assert same(states[0], file["current_model_state"])


class Keep(importlib.import_module("lightning.pytorch").Callback):
    """Saves in the middle of an epoch."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint(self.folder / "mid.ckpt")
