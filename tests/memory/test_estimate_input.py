from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memprec import MemoryEstimate, TraceError, estimate_memory
from lightning_memprec._devices import find_device
from tests.memory.small_mlp import BATCH, DEVICES, IN, NUMEL, X, mlp, sgd, total


@dataclass
class Sample:
    x: torch.Tensor
    name: str = "a"


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    inner: Any = None


Named = namedtuple("Named", "x y")


BATCHES = {
    "tensor": (X, lambda b: b),
    "tuple": ((X, 1), lambda b: b[0]),
    "list": ([X, "text", None], lambda b: b[0]),
    "dict": ({"x": X, "id": "a"}, lambda b: b["x"]),
    "ordered": (OrderedDict(x=X), lambda b: b["x"]),
    "nested": ({"a": [{"x": X}, (None, 3)], "names": ["p", "q"]}, lambda b: b["a"][0]["x"]),
    "dataclass": (Sample(X), lambda b: b.x),
    "frozen": (Frozen(X, Sample(X)), lambda b: b.inner.x),
    "namedtuple": (Named(X, None), lambda b: b.x),
    "user_dict": (UserDict(x=X), lambda b: b["x"]),
    "counter": ([Counter("aab"), X], lambda b: b[1]),
    "callable": (lambda: X, lambda b: b),
    "meta": (torch.empty(BATCH, IN, device="meta"), lambda b: b),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("batch", "read"), BATCHES.values(), ids=BATCHES)
def test_batches_of_every_kind_give_the_same_estimate(batch, read, device):
    def loss(module, given):
        assert read(given).device.type == device
        return module(read(given)).sum()

    expected = estimate_memory(mlp(), X, loss=total, optimizer=sgd, device=device)
    estimate = estimate_memory(mlp(), batch, loss=loss, optimizer=sgd, device=device)
    copies = 2 if isinstance(batch, Frozen) else 1  # The same tensor twice is moved twice.
    assert estimate.peak_allocated_bytes - expected.peak_allocated_bytes == (copies - 1) * X.nbytes


class Output(dict):
    def __getattr__(self, name):
        return self[name]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda out: out,
        lambda out: (out, "text", out.detach()),
        lambda out: {"a": out, "b": [out.argmax(-1)]},
        lambda out: {"loss": out.mean(), "logits": out},
        lambda out: Output(loss=out.mean(), logits=out),
    ],
)
def test_default_loss_is_found_in_the_output(wrap):
    class Wraps(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return wrap(self.net(x))

    estimate = estimate_memory(Wraps(), X, optimizer=sgd, device="cpu")
    assert estimate.breakdown.gradients_bytes > 0 or any(p.name == "optimizer_step" for p in estimate.phases)
    assert {s.owner for s in estimate.events.storages if s.category == "gradients"} == {
        "net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"
    }  # fmt: skip


def test_mappings_are_keywords_and_sequences_positional_arguments():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, a, b):
            return (self.weight * a - b).sum()

    a, b = torch.ones(3), torch.ones(2, 3)
    peaks = {
        estimate_memory(Two(), batch, device="cpu").peak_allocated_bytes
        for batch in ({"b": b, "a": a}, (a, b))
    }
    assert len(peaks) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "A9000"}, ValueError, "A9000"),
        ({"precision": "8-true"}, ValueError, r"`precision` must be one of .*, got '8-true'"),
        ({"steps": 0}, ValueError, "`steps` must be an integer of at least 1, got 0"),
        ({"accumulate_grad_batches": 1.5}, ValueError, "`accumulate_grad_batches` must be .* got 1.5"),
        ({"num_devices": -1}, ValueError, "`num_devices` must be"),
        ({"gradient_clip_algorithm": "max"}, ValueError, "must be 'norm' or 'value', got 'max'"),
        ({"batch": None}, TraceError, "The batch is `None`. Pass a batch"),
        ({"batch": torch.ones(2, 3)}, TraceError, "raised RuntimeError"),
        ({"module": 3}, TypeError, "`module` must be an `nn.Module` or build one, got a `int`"),
        ({"module": lambda: 3}, TraceError, "must build an `nn.Module`, but returned a `int`"),
        ({"optimizer": lambda params: "adam"}, TraceError, "returned a `str`"),
        ({"loss": lambda module, batch: 3.0}, TraceError, "returned a `float` as the loss"),
        (
            {"loss": lambda module, batch: module(batch)},
            TraceError,
            "grad can be implicitly created only for scalar",
        ),
        (
            {"loss": lambda module, batch: 1 / 0},
            TraceError,
            r"raised ZeroDivisionError at .*test_estimate_input\.py:\d+",
        ),
        (
            {"loss": None, "module": nn.Flatten(), "optimizer": None},
            TraceError,
            "no differentiable tensor to train on. Pass `loss=`",
        ),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    good = {"module": mlp(), "batch": X, "loss": total, "optimizer": sgd, "device": "cpu"}
    with pytest.raises(error, match=message):
        estimate_memory(**{**good, **arguments})


def test_no_optimizer_and_no_loss_are_runs_too():
    estimate = estimate_memory(mlp(), X, loss=lambda module, batch: None, device="cpu")
    assert estimate.peak_allocated_bytes == 4 * NUMEL + X.nbytes
    optimizerless = estimate_memory(mlp(), X, loss=total, optimizer=lambda params: None, device="cpu")
    assert optimizerless.breakdown.optimizer_states_bytes == 0


def test_estimate_is_plain_data():
    import json

    estimate = estimate_memory(mlp(), X, loss=total, optimizer=sgd, device="cuda")
    assert isinstance(estimate, MemoryEstimate)
    values = json.loads(json.dumps(estimate.to_dict()))
    assert values["peak_allocated_bytes"] == estimate.peak_allocated_bytes
    assert values["breakdown"]["parameters_bytes"] == estimate.breakdown.parameters_bytes
    assert estimate.fits(estimate.minimum_device_bytes)
    assert not estimate.fits(estimate.minimum_device_bytes - 1)
    assert not estimate.fits(estimate.minimum_device_bytes, safety_margin=0.01)
    with pytest.raises(ValueError, match=r"\[0, 1\), got 1.0"):
        estimate.fits("1GiB", safety_margin=1.0)
    with pytest.raises(ValueError, match="Cannot read '24 gigs' as a size"):
        estimate.fits("24 gigs")
    with pytest.raises(ValueError, match="H900"):
        estimate.fits("H900")


def test_named_device_is_judged_with_its_own_context():
    estimate = estimate_memory(mlp(), X, loss=total, optimizer=sgd, device="cuda")
    spec = find_device("T4-16GB")
    room = spec.memory_bytes - spec.context_bytes
    for reserved, fits in ((room, True), (room + 1, False)):
        changed = dataclasses.replace(estimate, minimum_reserved_bytes=reserved)
        assert changed.fits("t4") == fits
        assert changed.fits(spec.memory_bytes)  # No device was named, so no context counts.


def test_a_named_device_adds_its_context():
    generic = estimate_memory(mlp(), X, loss=total, device="cuda")
    named = estimate_memory(mlp(), X, loss=total, device="A100-80GB")
    assert generic.outside_allocator_bytes == 0
    assert named.outside_allocator_bytes > 100 * 1024**2
    assert named.device == "A100-80GB"
    assert named.peak_device_bytes == named.peak_reserved_bytes + named.outside_allocator_bytes
    assert {a.name for a in named.assumptions} >= {"traced_batch", "device_context", "allocator"}


def test_an_estimate_prints_in_one_line_with_units():
    text = str(estimate_memory(mlp(), X, loss=total, device="cpu"))
    assert "needed on cpu in 32-true" in text
    assert "parameters" in text
    assert "\n" not in text


def test_only_the_part_of_a_larger_tensor_is_brought_to_the_device():
    whole = torch.empty(64, 32, device="meta")
    inputs = [
        estimate_memory(torch.nn.Linear(32, 32), batch, device="cpu").breakdown.inputs_bytes
        for batch in (whole[:8], torch.empty(8, 32, device="meta"), torch.empty(64, 32)[:8])
    ]
    assert inputs == [8 * 32 * 4] * 3
