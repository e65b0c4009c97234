"""Learned rounding: its parts against their definitions, and the whole against rounding to nearest."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_memprec.quantization.checkpoint import load_quantized, save_quantized
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.blocks import find_blocks
from lightning_memprec.quantization.reconstruction.brecq import (
    BRECQ,
    LearnedRounding,
    annealed,
    rectified_sigmoid,
    rounding_penalty,
    undo_rectified_sigmoid,
)
from lightning_memprec.quantization.reconstruction.learning import substitutes
from lightning_memprec.quantization.reconstruction.recording import TensorStore, record, replay
from lightning_memprec.quantization.reconstruction.task_loss import task_loss
from lightning_memprec.quantization.rounding import round_to_nearest
from lightning_memprec.quantization.targets import find_targets

from . import block_nets
from .block_nets import Transformer, block_errors, call, student_errors

SCHEMES = {
    "channel": Scheme(bits=4),
    "zero points": Scheme(bits=3, mapping="affine"),
    "groups": Scheme(bits=2, weight_granularity="group", group_size=4),
    "8 bits": Scheme(),
}


def test_the_sigmoid_reaches_its_ends_and_is_undone():
    shares = torch.linspace(0, 1, 101, dtype=torch.float64)
    # FP64 with a logarithm and an exponential in between.
    torch.testing.assert_close(rectified_sigmoid(undo_rectified_sigmoid(shares)), shares, rtol=0, atol=1e-12)
    assert rectified_sigmoid(torch.tensor([-2.5, 2.5])).tolist() == [0, 1]


@pytest.mark.parametrize("beta", [20.0, 7.3, 2.0])
def test_gradients_of_the_penalty_are_those_of_the_definition(beta):
    # Away from the ends and from one half, where the definition has kinks.
    values = torch.tensor([-1.5, -0.7, -0.1, 0.2, 0.9, 1.8], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: rounding_penalty(rectified_sigmoid(v), beta), (values,))
    shares = rectified_sigmoid(values.detach())
    by_hand = sum(1 - abs(2 * float(share) - 1) ** beta for share in shares)
    assert float(rounding_penalty(shares, beta)) == pytest.approx(by_hand, rel=1e-12)


def test_the_exponent_falls_in_a_line_after_the_warm_up():
    assert [annealed(progress) for progress in (0.0, 0.19)] == [None, None]
    assert [annealed(progress) for progress in (0.2, 0.4, 0.6, 1.0)] == pytest.approx([20, 15.5, 11, 2])
    assert float(rounding_penalty(torch.tensor([0.0, 1.0]), 2.0)) == 0


def learner_of(scheme, features=8):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(features, 5))
    targets, _ = find_targets(net, scheme)
    block, start = find_blocks(net, targets)[0], round_to_nearest(targets)
    calls = record(net, {"0": net[0]}, [torch.randn(20, features)], call, TensorStore(2**30))["0"]
    return net, block, calls, start, LearnedRounding(block, calls, start, 1.0, 1.0)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_it_starts_at_the_float_weights_and_rounds_to_nearest_then(scheme):
    net, _, _, start, learner = learner_of(scheme)
    # In steps of the grid; half a step may be clipped off at the end of an affine range.
    scale = start["0"]["weight"].scale.max()
    misses = (learner.weights()["weight"] - net[0].weight).abs() / scale
    assert misses.max() < (0.51 if scheme.mapping == "affine" else 1e-4)
    assert torch.equal(learner.quantized()["0"]["weight"].values, start["0"]["weight"].values)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_shares_at_the_ends_give_the_integers_that_are_stored(scheme):
    _, block, _, _, learner = learner_of(scheme)
    with torch.no_grad():
        for shares in learner.parameters:
            shares.copy_(torch.where(torch.rand_like(shares) < 0.5, -9.0, 9.0))
        stored = substitutes(block, learner.quantized())["weight"]
        assert torch.equal(learner.weights()["weight"], stored)


def test_gradients_of_the_shares_are_those_of_the_definition():
    net, _, calls, start, learner = learner_of(SCHEMES["channel"])
    with torch.no_grad():
        learner.parameters[0].uniform_(-2, 2)  # Away from the ends of the sigmoid, where it has kinks.
    output = replay(net[0], calls[0], learner.weights())
    target = torch.randn_like(output)
    (output - target).square().mean().backward()
    shares = learner.parameters[0].detach().double().requires_grad_()
    scale = start["0"]["weight"].scale
    below = torch.floor(net[0].weight.detach() / scale).double()
    soft = scale.double() * (below + (1.2 * torch.sigmoid(shares) - 0.1).clamp(0, 1)).clamp(-7, 7)
    inputs = calls[0].args[0].load().double()
    (F.linear(inputs, soft, net[0].bias.detach().double()) - target.double()).square().mean().backward()
    # FP32 against FP64.
    torch.testing.assert_close(learner.parameters[0].grad.double(), shares.grad, rtol=1e-4, atol=1e-6)


def test_outputs_count_by_the_squared_gradient_of_the_loss():
    net = block_nets.trained("mlp")
    batches = block_nets.calibration("mlp", 60)
    blocks, calls = block_nets.calls_of(net, batches, task_loss())
    targets = blocks[0].targets
    learner = LearnedRounding(blocks[0], calls["1"], round_to_nearest(list(targets)), 1.0, damping=0.5)
    gradients = []
    for batch in batches:
        hidden = net[1](net[0](batch)).detach().requires_grad_()
        logits = net[2:](hidden)
        gradients += torch.autograd.grad(F.cross_entropy(logits, logits.argmax(1)), hidden)
    mean = torch.stack(gradients).square().mean()
    for one, gradient in zip(calls["1"], gradients, strict=True):
        torch.testing.assert_close(learner.importance(one), gradient.square() / mean + 0.5)


RESULTS = {
    "a loss": (lambda x: {"loss": x.sum()}, lambda x: x.sum(), None),
    "an attribute": (lambda x: SimpleNamespace(loss=x.mean(), logits=x), lambda x: x.mean(), None),
    "a scalar": (lambda x: x.sum(), lambda x: x.sum(), None),
    "a matrix": (
        lambda x: x,
        lambda x: F.cross_entropy(x, x.argmax(1)),
        "likeliest classes stand for labels",
    ),
    "logits of tokens": (
        lambda x: {"logits": x.reshape(2, 2, 3)},
        lambda x: F.cross_entropy(x, x.argmax(1)),
        "likeliest classes stand for labels",
    ),
}


@pytest.mark.parametrize("case", RESULTS.values(), ids=RESULTS)
def test_the_loss_is_the_models_or_one_against_its_own_classes(case):
    build, expected, note = case
    logits = torch.arange(12.0).reshape(4, 3).cos()
    said, loss = task_loss()(build(logits))
    assert said == note
    torch.testing.assert_close(loss, expected(logits))


def test_measurements_get_errors_of_variance_one_for_labels():
    output = torch.zeros(1000, 3, 4, requires_grad=True)
    said, loss = task_loss(seed=1)(output)
    (gradient,) = torch.autograd.grad(loss * 1000, output)
    assert said == "own output stands for labels"
    # Mean of 12,000 squares of a standard normal: one standard error is 0.013.
    assert gradient.square().mean() == pytest.approx(1, abs=0.05)
    assert task_loss()("no tensor") is None


@pytest.mark.parametrize("inputs", ["teacher", "student"])
@pytest.mark.parametrize("kind", block_nets.NETS)
def test_every_block_errs_less_on_test_data_than_rounding_to_nearest_at_4_bits(kind, inputs):
    exact = block_nets.trained(kind)
    rounded, learned = copy.deepcopy(exact), copy.deepcopy(exact)
    quantize_(rounded, bits=4)
    # Few steps, so larger ones.
    options = {"inputs": inputs, "iterations": 100, "learning_rate": 0.2}
    quantize_(learned, "brecq", bits=4, calibration=block_nets.calibration(kind, 120), method_options=options)
    if inputs == "teacher":
        before, after = block_errors(kind, exact, rounded), block_errors(kind, exact, learned)
    else:
        before, after = student_errors(kind, exact, learned, rounded)
    # An embedding does not learn.
    assert {name for name in before if not after[name] < before[name]} == {"embed"} & before.keys()


def test_notes_say_what_was_not_there():
    net = block_nets.trained("mlp")

    def forward(module, batch):
        with torch.no_grad():
            return module(batch)

    data = block_nets.calibration("mlp", 60)
    options = {"iterations": 20}
    report = quantize_(net, "brecq", bits=4, calibration=data, forward=forward, method_options=options)
    assert all(
        "no gradient of a loss reached it, so all outputs count alike" in row.note for row in report.layers
    )
    report = quantize_(block_nets.trained("mlp"), "brecq", bits=4, calibration=data, method_options=options)
    assert all("likeliest classes stand for labels" in row.note for row in report.layers)
    with pytest.raises(ValueError, match="learns from data"):
        quantize_(block_nets.trained("mlp"), "brecq")


@pytest.mark.parametrize("scheme", [{"bits": 2, "group_size": 8}, {"bits": 8}], ids=["W2", "W8"])
def test_results_repeat_and_files_hold_them(tmp_path, scheme):
    nets = [block_nets.trained("transformer") for _ in range(2)]
    for seed, net in enumerate(nets):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        options = {"iterations": 15, "memory_bytes": 2**30 * seed}
        quantize_(
            net,
            "brecq",
            calibration=block_nets.calibration("transformer", 60),
            method_options=options,
            **scheme,
        )
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, nets[1].state_dict()[name]) for name, value in nets[0].state_dict().items())
    save_quantized(nets[0], tmp_path / "net.safetensors")
    again = load_quantized(tmp_path / "net.safetensors", Transformer())
    batch = block_nets.test_batches("transformer")[0]
    with torch.no_grad():
        assert torch.equal(nets[0](**batch)["logits"], again(**batch)["logits"])


@pytest.mark.parametrize("option", ["regularization", "damping"])
def test_options_out_of_range_are_refused(option):
    with pytest.raises(ValueError, match=f"`{option}` must be at least 0 and finite, got -1"):
        BRECQ(**{option: -1.0})
