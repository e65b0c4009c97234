"""Calibration with data and models as others write them: they work in place, skip batches, and are compiled."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_memprec.quantization.calibration import feed
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.measure import call, run_batches

LEARNING = ["layer_wise", "gptq", "obq", "brecq", "zeroquant", "adaquant"]
QUICK = {name: {"iterations": 20} for name in ("brecq", "zeroquant", "adaquant")}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class InPlace(Block):
    """Changes its input, and with it the batch; autograd refuses that, for `first` needs its input."""

    def forward(self, x):
        return x.add_(self.second(torch.relu(self.first(x))))


class Net(nn.Module):
    def __init__(self, block=Block, inference=False):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(block() for _ in range(2)), nn.Linear(8, 3)
        self.inference = inference

    def forward(self, x):
        with torch.inference_mode() if self.inference else nullcontext():
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def net(*args):
    torch.manual_seed(0)
    return Net(*args).eval()


def batches(count=5, rows=10):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 8, generator=generator) for _ in range(count)]


def quantized(model, method, data, **options):
    report = quantize_(model, method, bits=4, calibration=data, method_options=QUICK.get(method), **options)
    return model, {row.name: row.note or "" for row in report.layers}


def same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("method", [*LEARNING, "vectorwise"])
def test_a_model_that_works_in_place_leaves_the_batches_and_sees_the_same_ones_in_each_pass(method):
    class Copies(InPlace):
        def forward(self, x):
            return super().forward(x.clone())

    data = batches()
    model, _ = quantized(net(InPlace), method, data)
    assert all(torch.equal(batch, before) for batch, before in zip(data, batches(), strict=True))
    if method != "brecq":  # Whose gradients come only with the copies.
        assert same(model.state_dict(), quantized(net(Copies), method, batches())[0].state_dict())


@pytest.mark.parametrize("method", ["brecq", "zeroquant"])
def test_a_block_without_gradients_is_rounded_to_nearest_and_named(method):
    model, notes = quantized(net(InPlace), method, batches(), activations="float")
    assert "rounded to nearest: no finite gradients reach its weights" in notes["blocks.0.first"]
    assert "rounded to nearest" not in notes["head"]
    assert torch.isfinite(model(batches()[0])).all()


def made_in_inference_mode(make):
    with torch.inference_mode():
        return make()


@pytest.mark.parametrize(
    "build",
    [lambda: net(Block, True), lambda: made_in_inference_mode(net)],
    ids=["forward in inference mode", "weights of inference mode"],
)
def test_brecq_does_without_the_gradients_of_a_model_in_inference_mode(build):
    _, notes = quantized(build(), "brecq", batches())
    assert all(
        "no gradient of a loss reached it, so all outputs count alike" in note for note in notes.values()
    )


def test_batches_of_inference_mode_teach_as_any_others():
    learned = [quantized(net(), "brecq", data)[0] for data in (batches(), made_in_inference_mode(batches))]
    assert same(learned[0].state_dict(), learned[1].state_dict())


def test_a_fault_of_the_model_is_raised_and_leaves_no_trace():
    model = net()
    before = copy.deepcopy(model.state_dict())

    def forward(module, batch):
        module(batch)
        raise RuntimeError("the model's own")

    with pytest.raises(RuntimeError, match="the model's own"):
        quantize_(model, "brecq", calibration=batches(), forward=forward)
    assert same(model.state_dict(), before)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("method", LEARNING)
def test_empty_batches_teach_nothing(method):
    _, notes = quantized(net(), method, [torch.empty(0, 8)])
    assert all("rounded to nearest: no calibration data reached it" in note for note in notes.values())


@pytest.mark.parametrize("method", ["brecq", "zeroquant"])
def test_empty_batches_among_others_change_nothing(method):
    # The last ones judge, so that without them another batch would.
    learned = [quantized(net(), method, data)[0] for data in (batches(), [*batches(), torch.empty(0, 8)])]
    assert same(learned[0].state_dict(), learned[1].state_dict())


@pytest.mark.parametrize("method", ["layer_wise", "gptq", "obq"])
def test_inputs_whose_squares_overflow_fp32_teach_as_smaller_ones_do(method):
    # A power of two changes nothing but exponents; of biases there are none.
    learned = []
    for factor in (1.0, 2.0**70):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
        learned.append(quantized(model, method, [batch * factor for batch in batches()])[0])
    for first, second in zip(learned[0][::2], learned[1][::2], strict=True):
        # FP64 products are more exact, which may tip a tie.
        assert (first.weight != second.weight).float().mean() < 0.05


@pytest.mark.parametrize("method", ["brecq", "zeroquant"])
def test_errors_that_cannot_be_squared_are_named(method):
    _, notes = quantized(net(), method, [batch * 1e25 for batch in batches()])
    assert "rounded to nearest: its mean squared error on held-out batches is inf" in notes["blocks.0.first"]


def test_a_batch_with_nan_is_left_out_of_the_error_and_counted():
    usable = batches()
    exact = quantize_(net(), "vectorwise", calibration=usable)
    report = quantize_(net(), "vectorwise", calibration=[*usable, torch.full((2, 8), math.nan)])
    for row, expected in zip(report.layers, exact.layers, strict=True):
        assert row.output_error == expected.output_error
        assert row.note == "error without 1 of 6 calls, which give NaN or infinite values"


@pytest.mark.parametrize("method", ["gptq", "zeroquant"])
def test_a_model_that_was_compiled_learns_the_same_integers(method):
    exact, _ = quantized(net(), method, batches())
    model = net()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(batches()[0])
        # Compiled code ignores hooks, so this would show nothing to learn from.
        quantized(compiled, method, batches())
        assert same(exact.state_dict(), model.state_dict())
        # The backend sums in another order.
        torch.testing.assert_close(compiled(batches()[0]), exact(batches()[0]), rtol=1e-4, atol=1e-5)


def test_hooks_see_each_batch_of_a_compiled_model():
    model, seen = net(), []
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(batches()[0])
    handle = model.head.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    run_batches(compiled, batches())
    handle.remove()
    assert seen == [10] * 5


class Forces(Net):
    """Switches gradients on for itself."""

    def forward(self, x):
        with torch.enable_grad():
            energy = super().forward(x.requires_grad_())
            return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def test_graphs_of_a_model_that_differentiates_itself_are_not_held():
    torch.manual_seed(0)
    model, seen = Forces().eval(), []
    feed(model, batches(), call, {"head": model.head}, lambda name, rows: seen.append(rows.requires_grad))
    assert seen == [False] * 5


@pytest.mark.parametrize("method", [*LEARNING, "vectorwise"])
def test_a_model_that_differentiates_itself_is_quantized(method):
    torch.manual_seed(0)
    model = Forces().eval()
    _, notes = quantized(model, method, batches())
    assert notes.keys() == {"blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second", "head"}
    assert torch.isfinite(model(batches()[0])).all()
