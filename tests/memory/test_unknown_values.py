"""Values that a step reads without letting them steer it, and checks for what is not finite."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch
import torchmetrics
from torch import nn

from lightning_memprec import DataDependentError
from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.unknown_values import UnknownNumber
from tests.memory.small_lightning import X as BATCH
from tests.memory.small_lightning import module_with

DEVICES = ["cpu", "cuda"]
X = torch.randn(256, 64)


def peak(use, device="cpu", batch=X):
    """Estimate a step that does something with its output on the way."""
    seen = []

    def loss(module, batch):
        out = module(batch).pow(2)
        seen.append(use(out))
        return out.mean()

    estimate = estimate_memory(
        nn.Linear(64, 64), batch, loss=loss, optimizer=torch.optim.AdamW, device=device
    )
    return estimate, seen


def nothing(out):
    return None


def fails_on(check):
    def use(out):
        if check(out):
            raise AssertionError("not finite")

    return use


READS = {
    "logged": lambda out: f"{out.mean().item():.3f} {out.sum().item():d}",
    "rounded": lambda out: round(out.mean().item(), 4),
    "averaged": lambda out: (3 * out.mean().item() - 1) / 2 + sum([out.max().item(), 1.0]),
    "a perplexity": lambda out: math.exp(out.mean().item()),
    "checked": lambda out: fails_on(lambda x: math.isnan(x.mean().item()))(out),
    "times a tensor": lambda out: out.mean().item() * torch.ones(2),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", READS)
def test_numbers_that_steer_nothing_may_be_read(name, device):
    estimate, seen = peak(READS[name], device)
    # What is kept of them keeps no tensor and no graph alive.
    small = 1024 if device == "cpu" else 8 * 512
    assert abs(estimate.peak_allocated_bytes - peak(nothing, device)[0].peak_allocated_bytes) <= small
    assert len(seen) == 2
    (note,) = [each for each in estimate.assumptions if each.name == "values_read"]
    assert __file__ in note.text


@pytest.mark.parametrize(
    "steer",
    [
        lambda number: 1 if number > 0.5 else 2,
        lambda number: 1 if number else 2,
        lambda number: number == 1,
        lambda number: max(number, 2.0),
        lambda number: range(int(number)),
        lambda number: [0] * round(number),
        lambda number: float(number),
        lambda number: number * 2 + 1 < 3,
        lambda number: number.is_integer(),
        lambda number: bool(torch.tensor([number, 1.0]).max() > 0),
    ],
    ids=[
        "greater",
        "true",
        "equal",
        "max",
        "int",
        "round",
        "float",
        "after arithmetic",
        "is_integer",
        "a tensor",
    ],
)
def test_a_number_that_steers_is_refused_where_it_was_read(steer):
    with pytest.raises(DataDependentError, match="asks for the value") as caught:
        peak(lambda out: steer(out.mean().item()))
    assert caught.value.location.startswith(__file__)


def test_unknown_numbers_can_be_copied():
    number = UnknownNumber(DataDependentError("why", "file.py:3"))
    for twin in (copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
        assert str(twin) == "nan"
        with pytest.raises(DataDependentError, match="why"):
            bool(twin)


CHECKS = {
    "torch.isnan": lambda out: torch.isnan(out.sum()),
    "isnan().any()": lambda out: out.isnan().any(),
    "isinf": lambda out: torch.isinf(out).sum() > 0,
    "isfinite().all()": lambda out: not out.isfinite().all(),
    "isposinf": lambda out: torch.isposinf(out).any() or torch.isneginf(out).any(),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHECKS)
def test_values_that_a_step_checks_are_finite(name, device):
    estimate, _ = peak(fails_on(CHECKS[name]), device)
    assert "finite_values" in {each.name for each in estimate.assumptions}


def test_what_is_known_not_to_be_finite_stays_so():
    batch = X.clone()
    batch[3, 5] = torch.nan
    with pytest.raises(Exception, match="not finite"):
        estimate_memory(
            nn.Linear(64, 64),
            batch,
            loss=lambda module, batch: [fails_on(torch.Tensor.isnan)(batch[3, 5]), module(batch).sum()][1],
            device="cpu",
        )


class CheckedLoss(torchmetrics.Metric):
    """A loss that is a metric, as in pytorch-forecasting."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, out):
        assert torch.isfinite(out).all()
        self.total = self.total + out.pow(2).sum()
        self.count = self.count + out.shape[0]

    def compute(self):
        loss = self.total / self.count
        assert not torch.isnan(loss)
        return loss


class Rare(torchmetrics.Metric):
    """Its update asks for a value; its result would be not-a-number without it."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, out):
        if out.mean() > 0.5:
            self.total += 1

    def compute(self):
        assert self.total > 0
        return self.total


def test_a_metric_can_be_the_loss():
    def build(self):
        self.loss, self.rare = CheckedLoss(), Rare()

    def training_step(self, batch, batch_idx):
        out = self.net(batch)
        self.rare(out.detach())
        return self.loss(out)

    module = module_with(build=build, training_step=training_step)
    estimate = estimate_memory(module, BATCH, device="cpu")
    left_out = {each.name for each in estimate.assumptions if each.name.startswith("metric_left_out")}
    assert left_out == {"metric_left_out:rare"}
    assert estimate.breakdown.gradients_bytes > 0  # The graph went through the metric.


class Graph:
    """A batch that can be called, like the graphs of PyTorch Geometric."""

    def __init__(self, x):
        self.x = x

    def __call__(self, *names):
        yield from ()

    def to(self, device):
        return Graph(self.x.to(device))


@pytest.mark.parametrize(
    ("batch", "x"),
    [
        (Graph(X), lambda batch: batch.x),
        (lambda: X, lambda x: x),
        (functools.partial(torch.randn, 256, 64), lambda x: x),
    ],
    ids=["object", "function", "partial"],
)
def test_objects_that_can_be_called_are_batches_and_functions_make_them(batch, x):
    estimate = estimate_memory(
        nn.Linear(64, 64), batch, loss=lambda module, batch: module(x(batch)).pow(2).mean(), device="cpu"
    )
    assert estimate.peak_allocated_bytes > 2 * X.nbytes
