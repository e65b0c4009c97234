from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec.plugins import MasterWeightPrecision

from .runs import DTYPES, NAMESPACES, Reference, fit, loader, make_module, make_trainer, net, same


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("precision", DTYPES)
def test_fit_is_the_plain_loop_with_masters(precision, name):
    module = make_module(name=name)
    fit(module, precision, name=name, max_epochs=2)
    # The scale is a power of two, which shifts exponents only: gradients are the same bits without it.
    reference = Reference(net(), dtype=DTYPES[precision], scale=2.0**15 if precision == "16-master" else 1.0)
    losses = reference.fit([*loader(), *loader()])
    assert same(module.losses, losses)
    assert same(module.net.state_dict(), reference.masters.state_dict())
    assert same(module.net.parameters(), reference.half.parameters())


@pytest.mark.parametrize("accumulate", [2, 4])
def test_gradients_accumulate_in_fp32(accumulate):
    module = make_module()
    fit(module, accumulate_grad_batches=accumulate)
    reference = Reference(net())
    assert same(module.losses, reference.fit(loader(), accumulate=accumulate))
    assert same(module.net.state_dict(), reference.masters.state_dict())


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [
        ("norm", lambda p: nn.utils.clip_grad_norm_(p, 0.1)),
        ("value", lambda p: nn.utils.clip_grad_value_(p, 0.1)),
    ],
)
@pytest.mark.parametrize("name", NAMESPACES)
def test_clipping_acts_on_unscaled_fp32_gradients(precision, algorithm, clip, name):
    module = make_module(name=name)
    fit(module, precision, name=name, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)
    reference = Reference(net(), dtype=DTYPES[precision], scale=2.0**15 if precision == "16-master" else 1.0)
    reference.fit(loader(), clip=clip)
    assert same(module.net.state_dict(), reference.masters.state_dict())


def test_hooks_see_one_fp32_gradient_on_both_sides():
    seen = []

    def look(self, *_):
        masters = self.trainer.optimizers[0].param_groups[0]["params"]
        for parameter, master in zip(self.parameters(), masters, strict=True):
            assert parameter.dtype == torch.bfloat16
            assert parameter.grad is master.grad
            assert master.grad.dtype == torch.float32
        seen.append(len(masters))

    def last(self, outputs, batch, batch_idx):
        look(self)

    module = make_module(on_after_backward=look, on_before_optimizer_step=look, on_train_batch_end=last)
    fit(module)
    assert seen == [4] * 12


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_skipped_step_leaves_both_sides_and_every_other_one_keeps_them_equal(fused):
    seen = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return loss * 1e6 if batch_idx == 1 else loss

    def look(self, *_):
        masters = [p.detach().clone() for p in self.trainer.optimizers[0].param_groups[0]["params"]]
        assert same([master.half() for master in masters], self.parameters())
        seen.append(masters)

    module = make_module(
        optimizer=lambda p: torch.optim.AdamW(p, fused=fused),
        training_step=training_step,
        on_train_batch_end=look,
    )
    trainer = fit(module, "16-master")
    assert same(seen[0], seen[1])
    assert not any(torch.equal(a, b) for a, b in zip(seen[1], seen[2], strict=True))
    assert trainer.scaler.get_scale() == 2.0**14
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {3}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
def test_a_batch_may_be_passed_over(precision):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else nn.functional.mse_loss(self.net(batch[0]), batch[1])

    module = make_module(training_step=training_step)
    fit(module, precision)
    reference = Reference(net(), dtype=DTYPES[precision], scale=2.0**15 if precision == "16-master" else 1.0)
    reference.fit([batch for index, batch in enumerate(loader()) if index != 1])
    assert same(module.net.state_dict(), reference.masters.state_dict())


def test_a_scaler_may_guard_bfloat16():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    module = make_module()
    trainer = fit(module, plugin=MasterWeightPrecision("bf16-master", scaler=scaler))
    reference = Reference(net(), scale=2.0**20)
    reference.fit(loader())
    assert trainer.scaler is scaler
    assert same(module.net.state_dict(), reference.masters.state_dict())


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_before_a_fused_optimizer_unscales_is_refused(algorithm):
    module = make_module(optimizer=lambda p: torch.optim.AdamW(p, fused=True))
    with pytest.raises(RuntimeError, match="Pass `fused=False` to the optimizer"):
        fit(module, "16-master", gradient_clip_val=1.0, gradient_clip_algorithm=algorithm)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_each_step_sees_its_own_gradient_only(set_to_none):
    norms = []

    def configure_gradient_clipping(self, *_, **__):
        norms.append(torch.cat([p.grad.flatten() for p in self.parameters()]).norm())

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=set_to_none)

    module = make_module(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        configure_gradient_clipping=configure_gradient_clipping,
        optimizer_zero_grad=optimizer_zero_grad,
    )
    batch = next(iter(loader()))
    fit(module, train=DataLoader(TensorDataset(*(t.repeat(3, 1) for t in batch)), batch_size=4))
    assert norms[0] == norms[1] == norms[2] > 0


def test_lbfgs_sees_the_weights_it_tries():
    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=1, max_iter=5)

    module = make_module(optimizer=lbfgs)
    fit(module)
    reference = Reference(net(), optimizer=lbfgs)
    losses = []
    for batch in loader():

        def closure(batch=batch):
            reference.round()
            reference.optimizer.zero_grad()
            loss = reference.loss(batch)
            losses.append(loss.detach().clone())
            reference.backward(loss)
            return loss

        reference.optimizer.step(closure)
        reference.round()
    assert len(losses) > 4
    assert same(module.losses, losses)
    assert same(module.net.state_dict(), reference.masters.state_dict())


def test_lbfgs_with_a_loss_scale_is_refused():
    module = make_module(optimizer=lambda p: torch.optim.LBFGS(p))
    with pytest.raises(Exception, match="LBFGS evaluates the loss several times") as caught:
        fit(module, "16-master")
    assert type(caught.value).__name__ == "MisconfigurationException"


def clamp_data(parameter):
    parameter.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def clamp_in_place(parameter):
    parameter.clamp_(-0.1, 0.1)


@torch.no_grad()
def copy_clamped(parameter):
    parameter.copy_(parameter.float().clamp(-0.1, 0.1))


@pytest.mark.parametrize("write", [clamp_data, clamp_in_place, copy_clamped])
def test_an_external_write_is_kept_and_so_is_every_other_mantissa(write):
    def clamp(self, *_):
        for parameter in self.parameters():
            write(parameter)

    module = make_module(on_train_batch_end=clamp)
    fit(module)
    reference = Reference(net())
    for batch in loader():
        reference.backward(reference.loss(batch))
        reference.step()
        with torch.no_grad():
            for half, master in zip(reference.half.parameters(), reference.masters.parameters(), strict=True):
                clamped = half.clamp(-0.1, 0.1)
                master.copy_(torch.where(clamped != half, clamped.float(), master))
                half.copy_(clamped)
    state = module.net.state_dict()
    assert same(state, reference.masters.state_dict())
    assert any((value != value.bfloat16()).any() for value in state.values())


def test_unused_parameters_keep_torch_semantics():
    network = net()
    network.unused = nn.Linear(3, 3)
    before = network.unused.weight.detach().clone()

    def training_step(self, batch, batch_idx):
        return self.net[2](self.net[1](self.net[0](batch[0]))).square().mean()

    module = make_module(network, training_step=training_step)
    fit(module)
    assert module.net.unused.weight.grad is None
    # No gradient, no step: not even the weight decay of AdamW.
    assert torch.equal(module.state_dict()["net.unused.weight"], before)


def test_tied_weights_have_one_master():
    network = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 2))
    network[1].weight = network[0].weight
    module = make_module(network)
    fit(module)
    state = module.state_dict()
    assert state["net.0.weight"].data_ptr() == state["net.1.weight"].data_ptr()
    assert module.net[0].weight is module.net[1].weight


def test_frozen_parameters_are_saved_exactly():
    network = net()
    network[0].requires_grad_(False)
    before = network[0].weight.detach().clone()
    module = make_module(
        network, configure_optimizers=lambda self: torch.optim.SGD(self.net[2].parameters(), lr=0.1)
    )
    fit(module)
    assert module.net[0].weight.dtype == torch.bfloat16
    assert torch.equal(module.state_dict()["net.0.weight"], before)


def test_parameters_unfrozen_on_the_way_start_from_fp32():
    network = net()
    network[0].requires_grad_(False)
    before = network[0].weight.detach().clone()

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.net[0].requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.net[0].parameters()), "lr": 1e-6})

    module = make_module(
        network,
        configure_optimizers=lambda self: torch.optim.SGD(self.net[2].parameters(), lr=0.1),
        on_train_batch_start=on_train_batch_start,
    )
    fit(module)
    moved = module.state_dict()["net.0.weight"] - before
    # Steps of 1e-6 are far below half an ulp of bfloat16, about 1e-3 here.
    assert 0 < moved.abs().max() < 1e-4


def test_running_statistics_stay_in_fp32():
    module = make_module(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    fit(module)
    norm = module.net[1]
    assert {norm.weight.dtype, norm.running_mean.dtype} == {torch.float32}
    assert module.net[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("keep", ["LayerNorm", "net.1", "*.1"])
@pytest.mark.parametrize("several", [True, False], ids=["list", "string"])
def test_chosen_modules_stay_in_fp32(keep, several):
    module = make_module(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
    fit(module, plugin=MasterWeightPrecision(keep_fp32=[keep] if several else keep))
    assert module.net[0].weight.dtype == torch.bfloat16
    assert module.net[1].weight.dtype == torch.float32
    assert module.net[1](torch.ones(1, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert module.net[1](torch.ones(1, 8)).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "meant"),
    [("linear", "'Linear'"), ("Liner", "'Linear'"), ("net.0.wieght", "'net.0.weight'"), ("Conv2d", None)],
)
def test_a_name_that_matches_nothing_is_told(name, meant):
    plugin = MasterWeightPrecision(keep_fp32=[name, "net.0", "net.*.bias", "Linear"])
    with pytest.warns(UserWarning, match=rf"`keep_fp32` has \['{name}'\], which match nothing") as caught:
        fit(make_module(), plugin=plugin)
    (text,) = [str(warning.message) for warning in caught if "keep_fp32" in str(warning.message)]
    assert (f"Did you mean {meant}?" in text) if meant else ("Did you mean" not in text)


def test_what_stays_in_fp32_is_given_by_names():
    with pytest.raises(ValueError, match=r"takes names, got .*LayerNorm.*such as 'LayerNorm'"):
        MasterWeightPrecision(keep_fp32=[nn.LayerNorm])


def test_buffers_that_half_would_ruin_are_named():
    network = net()
    network.register_buffer("table", torch.arange(1000.0))
    network.register_buffer("inv_freq", torch.rand(8))
    module = make_module(network)
    with pytest.warns(UserWarning, match=r"keep_fp32=\['net.table'\]"):
        fit(module)
    assert module.net.inv_freq.dtype == torch.float32
    assert module.net.table.dtype == torch.bfloat16


def test_validation_and_a_second_fit_keep_the_masters():
    module, straight = make_module(), make_module()
    trainer = fit(module, limit_val_batches=1)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    trainer.validate(module, loader(), verbose=False)
    assert same(module.state_dict(), before)
    for again in (trainer, None):  # The same Trainer, then a new one.
        if again is None:
            again = make_trainer(MasterWeightPrecision())
        again.fit_loop.epoch_progress.reset()
        again.fit(module, loader())
        before = {key: value.clone() for key, value in module.state_dict().items()}
        assert any((value != value.bfloat16()).any() for value in before.values())
    reference = Reference(straight.net)
    for _ in range(3):
        reference.optimizer = torch.optim.AdamW(reference.masters.parameters(), lr=1e-2, weight_decay=0.1)
        reference.fit(loader())
    assert same(module.net.state_dict(), reference.masters.state_dict())


def test_the_module_of_an_earlier_run_keeps_its_masters():
    plugin, first = MasterWeightPrecision(), make_module()
    fit(first, plugin=plugin)
    before = {key: value.clone() for key, value in first.state_dict().items()}
    second = make_module()
    fit(second, plugin=plugin)
    assert same(first.state_dict(), before)
    assert same(second.state_dict(), before)
