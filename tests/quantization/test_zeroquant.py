"""Layer-by-layer distillation: against rounding to nearest, and its gradient against the definition."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memprec.quantization.checkpoint import load_quantized, save_quantized
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.blocks import find_blocks
from lightning_memprec.quantization.reconstruction.learning import Schedule, errors, learn
from lightning_memprec.quantization.reconstruction.recording import TensorStore, record, replay
from lightning_memprec.quantization.reconstruction.zeroquant import MasterWeights, ZeroQuant
from lightning_memprec.quantization.rounding import round_to_nearest
from lightning_memprec.quantization.targets import find_targets

from . import block_nets
from .block_nets import Transformer, block_errors, call, student_errors

# An embedding does not learn, and this head sees inputs that hardly go together: its errors cannot make up for others.
HARDLY = {"embed", "head"}


def nearest(net, **scheme):
    rounded = copy.deepcopy(net)
    quantize_(rounded, activations="token", **scheme)
    return rounded


def distilled(kind, batches=None, scheme=None, **options):
    net = block_nets.trained(kind)
    batches = block_nets.calibration(kind) if batches is None else batches
    scheme = scheme or {"bits": 4, "group_size": 16}
    report = quantize_(net, "zeroquant", calibration=batches, method_options=options, **scheme)
    return net, report


@pytest.mark.parametrize("inputs", ["teacher", "student"])
@pytest.mark.parametrize("kind", block_nets.NETS)
def test_every_block_errs_less_on_test_data_than_rounding_to_nearest_at_4_bits(kind, inputs):
    exact = block_nets.trained(kind)
    rounded = nearest(exact, bits=4, group_size=64)
    student, _ = distilled(kind, scheme={"bits": 4, "group_size": 64}, inputs=inputs, iterations=100)
    if inputs == "teacher":
        before, after = block_errors(kind, exact, rounded), block_errors(kind, exact, student)
    else:
        before, after = student_errors(kind, exact, student, rounded)
    assert {name for name in before.keys() - HARDLY if not after[name] < before[name]} == set()
    # What errs no more on held-out batches may err a little more on others.
    assert {name for name in before.keys() & HARDLY if not after[name] < 1.02 * before[name]} == set()


def test_on_held_out_batches_no_block_is_worse_and_what_was_not_learned_is_named():
    _, report = distilled("transformer", iterations=40, learning_rate=0.003)
    notes = {row.name: row.note for row in report.layers}
    assert notes["embed"] == "rounded to nearest: only linear layers, convolutions and attention learn"
    # At a rate that throws weights about, nothing is better than the start, which is kept.
    net, report = distilled("transformer", iterations=10, learning_rate=1e4)
    notes = {row.name: row.note for row in report.layers}
    assert notes["head"] == "rounded to nearest: nothing that was tried errs less on held-out batches"
    exact = nearest(block_nets.trained("transformer"), bits=4, group_size=16)
    for name, value in exact.state_dict().items():
        assert torch.equal(value, net.state_dict()[name])


def test_teacher_and_student_differ_behind_the_first_block():
    nets = [distilled("mlp", iterations=30, inputs=inputs)[0] for inputs in ("teacher", "student")]
    first, second = (net.state_dict() for net in nets)
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert {"1.weight", "1.weight_scale"} <= same or {"1.weight_packed", "1.weight_scale"} <= same
    assert not torch.equal(nets[0][3].dequantize(), nets[1][3].dequantize())


@pytest.mark.parametrize("kind", ["residual", "transformer"])
def test_files_instead_of_memory_change_nothing_and_nothing_random_is_touched(kind):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, _ = distilled(kind, iterations=20, inputs="student")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    second, _ = distilled(kind, iterations=20, inputs="student", memory_bytes=0)
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


def test_the_float_model_is_not_touched_until_it_is_replaced():
    net = block_nets.trained("transformer").train()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    targets, _ = find_targets(net, Scheme(bits=4))
    with torch.no_grad():
        ZeroQuant(iterations=5)(net, targets, block_nets.calibration("transformer", 60), call)
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert all(module.training for module in net.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize(
    "scheme",
    [{"bits": 4, "mapping": "affine", "group_size": 8}, {"weight_granularity": "channel"}],
    ids=["W4 groups", "W8 channel"],
)
def test_files_are_smaller_and_load_again(tmp_path, scheme):
    exact = block_nets.trained("transformer")
    student, _ = distilled("transformer", scheme=scheme, iterations=20)
    torch.save(exact.state_dict(), tmp_path / "float.pt")
    save_quantized(student, tmp_path / "int8.safetensors")
    assert (tmp_path / "int8.safetensors").stat().st_size < (tmp_path / "float.pt").stat().st_size / 2
    again = load_quantized(tmp_path / "int8.safetensors", Transformer())
    batch = block_nets.test_batches("transformer")[0]
    with torch.no_grad():
        assert torch.equal(student(**batch)["logits"], again(**batch)["logits"])


def test_without_data_weights_are_rounded_in_groups_and_the_report_says_so():
    net = block_nets.trained("mlp")
    report = quantize_(net, "zeroquant", bits=4)
    assert {row.note for row in report.layers} == {"rounded to nearest: no calibration data to learn from"}
    expected = nearest(block_nets.trained("mlp"), bits=4, group_size=64)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in expected.state_dict().items())


def test_what_stands_in_padding_does_not_count():
    nets = []
    for filler in (0, 7):
        batches = []
        for tokens in block_nets.sentences(60, seed=1).split(20):
            mask = torch.ones_like(tokens)
            mask[::2, 6:] = 0
            batches.append({"tokens": tokens.where(mask.bool(), filler), "attention_mask": mask})
        net = block_nets.trained("transformer")
        # What follows is hidden from the tokens before it, so that padding reaches nothing but its own outputs.
        quantize_(
            net, "zeroquant", bits=4, calibration=batches, method_options={"iterations": 15},
            forward=lambda model, batch: model(batch["tokens"]),
        )  # fmt: skip
        nets.append(net.state_dict())
    assert all(torch.equal(value, nets[1][name]) for name, value in nets[0].items())


def test_random_data_teaches_too():
    exact = block_nets.trained("transformer")
    random = [{"tokens": torch.randint(32, (20, 12))} for _ in range(10)]
    student, _ = distilled("transformer", batches=random, scheme={"bits": 4, "group_size": 64}, iterations=80)
    before = block_errors("transformer", exact, nearest(exact, bits=4, group_size=64))
    after = block_errors("transformer", exact, student)
    assert after["layers.0"] < before["layers.0"]
    assert after["layers.1"] < before["layers.1"]


def test_the_attention_of_torch_learns():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)).eval()
    exact = copy.deepcopy(net)
    batches = [torch.randn(8, 6, 16) for _ in range(10)]
    report = quantize_(net, "zeroquant", bits=4, calibration=batches, method_options={"iterations": 60})
    assert [row.note for row in report.layers if row.kind == "MultiheadAttention"] == [None, None]
    inputs = torch.randn(50, 6, 16)
    with torch.no_grad():
        target = exact[0].layers[0](inputs)
        rounded = nearest(exact, bits=4, group_size=64)[0].layers[0](inputs)
        assert (net[0].layers[0](inputs) - target).square().mean() < (rounded - target).square().mean()


def test_the_gradient_is_that_of_the_error_at_the_rounded_weights():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4))
    targets, _ = find_targets(net, Scheme(bits=4, weight_granularity="group", group_size=3))
    block, start = find_blocks(net, targets)[0], round_to_nearest(targets)
    inputs = torch.randn(10, 6)
    call_ = record(net, {"0": net[0]}, [inputs], call, TensorStore(2**30))["0"][0]
    learner = MasterWeights(block, start)
    weight = learner.weights()["weight"]
    (replay(net[0], call_, learner.weights()) - net[0](inputs)).square().mean().backward()
    # By hand in FP64: the rounding is skipped on the way back, and a master is in units of its group's scale.
    exact, rounded = net[0].weight.detach().double(), weight.detach().double()
    at_weight = 2 / 40 * (inputs.double() @ (rounded - exact).T).T @ inputs.double()
    scale = start["0"]["weight"].scale.repeat_interleave(3, dim=1).double()
    # FP32 sums of ten products.
    torch.testing.assert_close(learner.parameters[0].grad.double(), at_weight * scale, rtol=1e-4, atol=1e-6)


def test_what_is_kept_is_the_best_that_was_seen():
    net = block_nets.trained("mlp")
    targets, _ = find_targets(net, Scheme(bits=3))
    start = round_to_nearest(targets)
    blocks, calls = block_nets.calls_of(net, block_nets.calibration("mlp", 100))
    own, block = calls["3"], blocks[1]
    learner = MasterWeights(block, {"3": start["3"]})
    with torch.no_grad():
        found, note = learn(block, own, {"3": start["3"]}, learner, Schedule(50, 0.01, 0))
        first, last = (errors(block, own[-1:], learner, which).plain for which in ({"3": start["3"]}, found))
    assert note is None
    assert last < first
    alone, note = learn(block, own[:1], {"3": start["3"]}, learner, Schedule(5, 0.001, 0))
    assert note == "judged by the batch it learned from, the only one" or alone["3"] is start["3"]


@pytest.mark.parametrize("size", [0.0, 1e25], ids=["zeros", "beyond the squares of FP32"])
def test_inputs_that_teach_nothing_leave_rounding_to_nearest(size):
    net = block_nets.trained("mlp")
    inputs = size * torch.rand(20, 1, 8, 8)
    quantize_(net, "zeroquant", bits=4, calibration=[inputs] * 3, method_options={"iterations": 5})
    expected = nearest(block_nets.trained("mlp"), bits=4, group_size=64)
    assert torch.equal(net[1].dequantize(), expected[1].dequantize())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": "both"}, "`inputs` must be 'teacher' or 'student', got 'both'"),
        ({"iterations": 0}, "`iterations` must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "`learning_rate` must be larger than 0 and finite, got 0.0"),
        ({"memory_bytes": -1}, "`memory_bytes` must be at least 0, got -1"),
    ],
    ids=["inputs", "iterations", "learning_rate", "memory_bytes"],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ZeroQuant(**options)
