from __future__ import annotations

import copy
import json
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from lightning_memprec.scaling.capabilities import Capabilities, capabilities_of_cuda
from lightning_memprec.scaling.compare import compare_precisions
from lightning_memprec.scaling.short_run import MODES

A100 = capabilities_of_cuda("A100", (8, 0))
T4 = capabilities_of_cuda("Tesla T4", (7, 5))
NO_UNITS = Capabilities("plain", "cpu", True, True, False, tf32=False, reason="test")
HALVES = [mode for mode in MODES if mode != "32-true"]


def net(seed=0, *, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=generator), torch.randn(16, 1, generator=generator))
        for _ in range(count)
    ]


def loss(module, batch):
    return mse_loss(module(batch[0]), batch[1])


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def compare(module=None, data=None, **arguments):
    arguments = {"optimizer": adam, "loss": loss, "steps": 4, "capabilities": A100, **arguments}
    return compare_precisions(module or net(), data or batches(), **arguments)


def reference_losses(precision, optimizer, steps):
    """Train by other means: masters are the module's own FP32 parameters, cast inside the graph."""
    module, data = net(), batches()
    mode = MODES[precision]
    opt = optimizer(module.parameters())
    fp16 = mode.dtype is torch.float16
    scale = (2.0**15 if mode.masters else 2.0**16) if fp16 else 1.0  # powers of two change no digit
    losses = []
    for step in range(steps):
        x, y = data[step % len(data)]
        opt.zero_grad()
        if mode.masters:
            half = {name: p.to(mode.dtype) for name, p in module.named_parameters()}
            out = torch.func.functional_call(module, half, (x.to(mode.dtype),))
            value = mse_loss(out, y.to(mode.dtype))
        elif mode.dtype is not None:
            with torch.autocast("cpu", mode.dtype):
                value = mse_loss(module(x), y)
        else:
            value = mse_loss(module(x), y)
        (value * torch.tensor(scale)).backward()
        for p in module.parameters():
            p.grad /= scale
        opt.step()
        losses.append(value.item())
    with torch.no_grad():
        final = sum(
            mse_loss(module(data[i % len(data)][0]), data[i % len(data)][1]).item() for i in range(steps)
        )
    return losses, final / steps


@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        adam,
        lambda p: torch.optim.Adagrad(p, lr=0.1),  # has its state before the first step
    ],
    ids=["sgd", "adam", "adagrad"],
)
def test_every_mode_is_the_plain_loop_bit_for_bit(precision, optimizer):
    found = compare(modes=[precision], optimizer=optimizer, steps=6, reorderings=0).results[-1]
    losses, final = reference_losses(precision, optimizer, 6)
    assert found.precision == precision
    assert list(found.losses) == losses
    assert found.final_loss == pytest.approx(final, rel=1e-12)  # a mean of six floats, summed in float64
    assert found.skipped_steps == 0


class Noted(nn.Module):
    """Changes everything that a forward pass can change."""

    def __init__(self):
        super().__init__()
        self.body = net(dropout=0.5)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.calls, self.seen = 0, []
        self.body[0].calls = 0

    def forward(self, x):
        self.calls += 1
        self.body[0].calls += 1
        self.seen.append(random.random() + np.random.rand())
        return self.body(self.norm(x)) * self.frozen


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "raises"])
def test_everything_is_as_it_was(fails):
    module, data = Noted(), batches()
    module.eval()
    module.norm.train()
    hooked = []
    module.body[0].register_forward_hook(lambda *args: hooked.append(1))
    loss(module, data[0]).backward()
    stored = {name: (p, p.data_ptr()) for name, p in module.named_parameters()}
    before = copy.deepcopy(
        ([(n, p.detach(), p.grad) for n, p in module.named_parameters()], dict(module.named_buffers()))
    )
    flags = [(m.training, vars(m).get("calls")) for m in module.modules()]
    notes, hooks, inputs = (module.calls, list(module.seen)), list(hooked), copy.deepcopy(data)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def user_loss(module, batch):
        value = loss(module, batch)
        if fails and value.dtype is torch.bfloat16:  # in the midst of half weights
            raise KeyError("user")
        return value

    if fails:
        with pytest.raises(KeyError):
            compare(module, data, loss=user_loss)
    else:
        compare(module, data, loss=user_loss)
    for (name, value, grad), (_, p) in zip(before[0], module.named_parameters(), strict=True):
        assert stored[name] == (p, p.data_ptr())
        assert torch.equal(p, value)
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)
    assert all(torch.equal(b, before[1][name]) for name, b in module.named_buffers())
    assert flags == [(m.training, vars(m).get("calls")) for m in module.modules()]
    assert (module.calls, module.seen) == notes
    assert hooked == hooks
    assert all(
        torch.equal(a, b) for x, y in zip(data, inputs, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[2], strict=True))
    assert torch.get_default_dtype() is torch.float32


def test_the_same_call_gives_the_same_figures_with_dropout():
    runs = [compare(net(dropout=0.3)).to_dict() for _ in range(2)]
    for run in runs:
        for result in run["results"]:
            result.pop("seconds_per_step")
    assert runs[0] == runs[1]


def test_dropout_adds_no_noise_to_the_ruler():
    still = compare(net(dropout=0.5), modes=[], optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    assert still.reference_spread == 0.0


class MakesTensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x):
        return self.body(torch.cat([x[:, :4], torch.ones(len(x), 4)], dim=1))


def test_tensors_made_in_a_forward_pass_are_half_where_weights_are():
    assert all(np.isfinite(r.losses).all() for r in compare(MakesTensors()).results)


class Remembers(torch.optim.Optimizer):
    """Makes its state in its constructor, and steps along it."""

    def __init__(self, params):
        super().__init__(params, {})
        for p in self.param_groups[0]["params"]:
            self.state[p]["direction"] = torch.ones_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p -= 0.125 * self.state[p]["direction"]


def test_states_made_by_the_constructor_go_to_the_masters():
    found = compare(
        Gain(1.0),
        [torch.ones(1, 1)],
        loss=lambda m, x: m(x).float().sum(),
        optimizer=Remembers,
        reorderings=0,
    )
    assert all(r.losses == (1.0, 0.875, 0.75, 0.625) for r in found.results)


def test_it_runs_where_gradients_are_off():
    with torch.no_grad():
        assert compare(modes=["bf16-master"]).results[1].losses


class Gain(nn.Module):
    """One weight."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[value]]))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def test_skips_are_counted_and_the_step_is_repeated():
    # The gradient that enters the fp16 product is 3 * scale: infinite at 65536 and 32768, 49152 at 16384.
    found = compare(
        Gain(1.0),
        [torch.ones(1, 1)],
        loss=lambda module, x: 3.0 * module(x).float().sum(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.125),
        modes=["16-mixed"],
        reorderings=0,
    )
    assert found.results[1].skipped_steps == 2
    assert found.results[1].losses == found.results[0].losses == (3.0, 1.875, 0.75, -0.375)


@pytest.mark.parametrize(
    ("capabilities", "best"), [(A100, "bf16-mixed"), (T4, "32-true")], ids=["a100", "t4"]
)
def test_a_forward_pass_that_overflows_fp16_is_not_recommended(capabilities, best):
    # 300 * 300 is beyond 65504, so every fp16 loss is infinite and no step is taken.
    found = compare(
        Gain(300.0),
        [torch.full((1, 1), 300.0)],
        loss=lambda module, x: (module(x).float() / 9e4).sum() ** 2,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e3),
        capabilities=capabilities,
    )
    by_name = {r.precision: r for r in found.results}
    assert found.recommended == best
    for name in ("16-mixed", "16-master"):
        assert by_name[name].skipped_steps == 4
        assert not by_name[name].within_tolerance
    assert json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("rate", [1e-7, 1e-2], ids=["hardly-learns", "learns"])
def test_a_precision_that_does_not_learn_never_passes(rate):
    data = [torch.ones(1, 1)]

    def stuck_in_half(module, x):
        half = torch.is_autocast_enabled("cpu")
        return (module(x).float().sum() * (0.0 if half else 1.0) + (0.0 if not half else 1.0)) ** 2

    found = compare(
        Gain(1.0),
        data,
        loss=stuck_in_half,
        optimizer=lambda p: torch.optim.SGD(p, lr=rate),
        modes=["bf16-mixed"],
    )
    assert found.reference_spread == 0.0  # one batch, nothing random
    assert not found.results[1].within_tolerance
    assert found.recommended == "32-true"


def test_weights_that_rest_are_not_stalled():
    module = nn.Linear(2, 1, bias=False)
    nn.init.ones_(module.weight)
    found = compare(
        module,
        [torch.tensor([[1.0, 0.0]])],  # no gradient reaches the second weight
        loss=lambda module, x: module(x).float().sum(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        modes=["bf16-mixed"],
        steps=1,
    )
    assert found.results[1].stalled_share == 0.0


@pytest.mark.parametrize(
    ("optimizer", "share"),
    # Adam moves a weight of 1 by 1e-5 a step; the nearest bf16 numbers are 0.0039 and 0.0078 away.
    [(lambda p: torch.optim.Adam(p, lr=1e-5), 1.0), (lambda p: torch.optim.SGD(p, lr=0.5), 0.0)],
    ids=["lost", "kept"],
)
def test_share_of_updates_that_half_weights_would_lose(optimizer, share):
    found = compare(
        Gain(1.0),
        [torch.ones(1, 1)],
        loss=lambda module, x: module(x).float().sum(),
        optimizer=optimizer,
        steps=1,
        reorderings=0,
    )
    assert [r.stalled_share for r in found.results] == [None] + [share] * 4


@pytest.mark.parametrize(
    ("capabilities", "best"),
    [(A100, "bf16-mixed"), (T4, "16-mixed"), (NO_UNITS, "32-true")],
    ids=lambda v: str(v)[:8],
)
def test_the_first_fast_precision_that_is_good_enough(capabilities, best):
    found = compare(capabilities=capabilities)
    assert found.recommended == best
    assert found.results[0].precision == "32-true"
    assert found.results[0].final_gap == found.results[0].mean_gap == 0.0
    assert ("No matrix units" in found.rule) == (capabilities is not A100)


def test_the_tolerance_is_what_fp32_does_to_itself():
    def final_loss(order):
        """Train in FP32 in another order; the module draws no random numbers, so the order is all."""
        module, data = net(), batches()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        for batch in random.Random(order).sample(data, 4) if order else data:
            optimizer.zero_grad()
            loss(module, batch).backward()
            optimizer.step()
        with torch.no_grad():
            return sum(loss(module, batch).item() for batch in data) / 4

    found = compare(modes=[], reorderings=3, optimizer=lambda p: torch.optim.SGD(p, lr=0.3))
    changes = [abs(final_loss(order) / final_loss(0) - 1) for order in (1, 2, 3)]
    assert max(changes) > 0.0025  # else the floor would be the tolerance
    # Differences of figures that agree to 1e-7 of the loss.
    assert found.tolerance == found.reference_spread == pytest.approx(max(changes), abs=1e-9)
    assert f"The tolerance is {max(changes):.3%}: FP32's own final loss moved" in found.rule
    alone = compare(modes=[], reorderings=0)
    assert alone.tolerance == 0.0025  # ten times that was gained
    assert "The tolerance is 0.250%." in alone.rule
    assert "moved" not in alone.rule


def test_steps_that_tell_little_are_called_so():
    found = compare(optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    assert "tell little" in found.rule
    assert "tell little" not in compare().rule


def test_fp32_that_diverges_is_the_finding():
    found = compare(optimizer=lambda p: torch.optim.SGD(p, lr=1e30))
    assert found.recommended == "32-true"
    assert "did not stay finite" in found.rule
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["results"][0]["final_loss"] is None


def test_clipping_is_that_of_torch():
    module = net()
    expected = adam(module.parameters())
    for x, y in batches():
        expected.zero_grad()
        mse_loss(module(x), y).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        expected.step()
    with torch.no_grad():
        final = sum(mse_loss(module(x), y).item() for x, y in batches()) / 4
    clipped = compare(modes=[], reorderings=0, gradient_clip_val=0.01)
    by_value = compare(modes=[], reorderings=0, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    assert clipped.results[0].final_loss == pytest.approx(final, rel=1e-12)
    assert by_value.results[0].final_loss != clipped.results[0].final_loss


def test_table_and_figure():
    found = compare()
    table = found.table({"32-true": 2**30})
    assert "1.00 GiB" in table
    assert all(mode in table for mode in MODES)
    assert "memory" not in str(found)
    assert max(map(len, table.splitlines())) <= 88
    pytest.importorskip("matplotlib").use("Agg")
    figure, axes = found.plot()
    assert [line.get_label() for line in axes.lines] == list(MODES)
    assert list(axes.lines[1].get_ydata()) == list(found.results[1].losses)
    from matplotlib import pyplot

    pyplot.close(figure)


class Stepper(nn.Module):
    """What a LightningModule is to this package."""

    def __init__(self, configured, *, manual=False):
        super().__init__()
        self.body = net()
        self.configured = configured
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        return {"loss": loss(self.body, batch)}

    def configure_optimizers(self):
        return self.configured(self)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "configured",
    [
        sgd,
        lambda m: [sgd(m)],
        lambda m: ([sgd(m)], [object()]),
        lambda m: {"optimizer": sgd(m), "lr_scheduler": None},
    ],
    ids=["optimizer", "list", "pair", "dict"],
)
def test_the_modules_own_step_and_optimizer(configured):
    found = compare(Stepper(configured), optimizer=None, loss=None, modes=["bf16-master"])
    expected = compare(modes=["bf16-master"], optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert [r.losses for r in found.results] == [r.losses for r in expected.results]


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_a_lightning_module_that_has_been_trained(namespace):
    pl = pytest.importorskip(namespace)

    seen = []

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = net()

        def training_step(self, batch, batch_idx):
            value = loss(self.body, batch)
            self.log("loss", value)
            seen.append(self.trainer)
            return value

        def configure_optimizers(self):
            return adam(self.parameters())

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*map(torch.cat, zip(*batches(), strict=True))), 16
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning about workers and pytree
        trainer.fit(module, loader)
    logged = dict(trainer.callback_metrics)
    found = compare(module, optimizer=None, loss=None)
    assert module.trainer is trainer
    assert dict(trainer.callback_metrics) == logged
    assert all(t is trainer for t in seen)
    assert found.results[0].losses[0] == loss(module.body, batches()[0]).item()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"modes": ["bf16-true"]}, "bf16-true"),
        ({"steps": 0}, "`steps`"),
        ({"reorderings": -1}, "`reorderings`"),
        ({"gradient_clip_algorithm": "max"}, "'max'"),
        ({"data": iter(())}, "empty"),
        ({"module": net().bfloat16()}, "bfloat16"),
        ({"module": net().requires_grad_(False)}, "no trainable"),
        ({"optimizer": torch.optim.LBFGS}, "closure"),
        ({"optimizer": None}, "configure_optimizers"),
        ({"loss": None}, "training_step"),
        ({"loss": lambda module, batch: None}, "must be a tensor"),
        ({"module": Stepper(lambda m: [sgd(m), sgd(m)]), "optimizer": None, "loss": None}, "one optimizer"),
        ({"module": Stepper(sgd, manual=True), "optimizer": None, "loss": None}, "automatic"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_do_it_refuses(arguments, words):
    arguments = dict(arguments)
    with pytest.raises(ValueError, match=words):
        compare(arguments.pop("module", None), arguments.pop("data", None), **arguments)


def test_a_module_that_cannot_be_copied_is_refused():
    module = net()
    module.cache = module(torch.ones(1, 8))  # not a leaf
    with pytest.raises(ValueError, match="copied"):
        compare(module)
