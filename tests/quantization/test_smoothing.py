"""Smoothing: factors move from inputs into weights without changing the float model, only where that can be shown."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from lightning_memprec.quantization.checkpoint import load_quantized, save_quantized
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.measure import call
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.smoothing import smoothed, smoothing_factors
from lightning_memprec.quantization.smoothing_pairs import proven_pairs
from lightning_memprec.quantization.targets import find_targets

WIDTH = 8


class RMSNorm(nn.Module):
    def __init__(self, offset=0.0):
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.rand(WIDTH) + 0.5), offset

    def forward(self, x):
        return (self.offset + self.weight) * x / x.square().mean(-1, keepdim=True).sqrt()


class Gated(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, hidden),
            nn.Linear(WIDTH, hidden),
            nn.Linear(hidden, WIDTH),
        )

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self, shared=1):
        super().__init__()
        self.shared = shared
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH // shared), nn.Linear(WIDTH, WIDTH // shared)

    def forward(self, x):
        query, key, value = (
            part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        key, value = (part.repeat_interleave(self.shared, dim=1) for part in (key, value))
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm block; ``cache`` grows with each call, as that of keys and values does."""

    def __init__(self, norm=RMSNorm, mixer=Gated):
        super().__init__()
        self.norm, self.mixer = norm(), mixer()

    def forward(self, x, cache=None):
        if cache is not None:
            cache.append(x)
            x = x * len(cache)
        return x + self.mixer(self.norm(x))


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        cache = []
        for block in self.blocks:
            x = block(x, cache=cache)
        return x


class AfterNorm(nn.Module):
    """The norm's output is the residual as well, as in BERT."""

    def __init__(self):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.norm(x)
        return x + self.mixer(x)


class TwoHeads(nn.Module):
    """Data of the other kind goes another way, in which the norm is read as well."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = RMSNorm(), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.norm(x)
        return self.first(x) if x.dim() == 3 else self.second(x)


def chain(activation):
    return nn.Sequential(nn.Linear(WIDTH, 16), activation, nn.Linear(16, WIDTH))


def tied():
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    net[2].weight = net[0].weight
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), net)


GATED = {"mixer.up": ("mixer.down",), "norm": ("mixer.gate", "mixer.up")}
PAIRS = {
    "gated": (Block, GATED),
    "layer norm": (lambda: Block(norm=lambda: nn.LayerNorm(WIDTH)), GATED),
    "a norm that adds one to its weight": (lambda: Block(norm=lambda: RMSNorm(1.0)), {"mixer.up": ("mixer.down",)}),
    "attention": (
        lambda: Block(mixer=Attention),
        {"mixer.value": ("mixer.out",), "norm": ("mixer.query", "mixer.key", "mixer.value")},
    ),
    "attention with shared values": (
        lambda: Block(mixer=lambda: Attention(2)), {"norm": ("mixer.query", "mixer.key", "mixer.value")},
    ),
    "relu": (lambda: chain(nn.ReLU()), {"0": ("2",)}),
    "gelu": (lambda: chain(nn.GELU()), {}),
    "two linear": (lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, 4)), {"0": ("1",)}),
    "norm that is the residual": (AfterNorm, {}),
    "a reader that the data does not reach": (TwoHeads, {}),
    "shared weight": (tied, {}),
    "with a cache": (
        Cached, {f"blocks.{i}.{p}": tuple(f"blocks.{i}.{r}" for r in rs) for i in range(2) for p, rs in GATED.items()},
    ),
}  # fmt: skip


def data(batches=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 10, WIDTH, generator=generator) for _ in range(batches)]


def found(net):
    linear = {name: part for name, part in net.named_modules() if isinstance(part, nn.Linear)}
    return {pair.producer: pair.readers for pair in proven_pairs(net.eval(), linear, data(), call)}


@pytest.mark.parametrize("case", PAIRS)
def test_factors_go_where_they_change_nothing(case):
    torch.manual_seed(0)
    build, expected = PAIRS[case]
    net = build()
    before = copy.deepcopy(net.state_dict())
    assert found(net) == expected
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def with_outliers(net, channels=(1, 5)):
    """Make two channels of every norm's output and of the gate's inputs large, which the float model undoes."""
    with torch.no_grad():
        for channel in channels:
            net.norm.weight[channel] *= 100
            for part in (net.mixer.gate, net.mixer.up):
                part.weight[:, channel] /= 100
            net.mixer.up.weight[channel] *= 50
            net.mixer.up.bias[channel] *= 50
            net.mixer.down.weight[:, channel] /= 50
    return net.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_float_model_computes_the_same_bits(dtype):
    torch.manual_seed(0)
    net = with_outliers(Block()).to(dtype)
    batches = [batch.to(dtype) for batch in data()]
    before, fresh = copy.deepcopy(net.state_dict()), torch.randn(3, 7, WIDTH).to(dtype)
    expected = net(fresh)
    targets, _ = find_targets(net, Scheme(activations="static"))
    seen = []

    def fold_and_fail():
        with torch.no_grad(), smoothed(net, targets, batches, call, 0.8) as notes:
            seen.extend([notes, net(fresh), net.norm.weight.clone()])
            raise RuntimeError("later")

    with pytest.raises(RuntimeError, match="later"):
        fold_and_fail()
    notes, output, weight = seen
    assert not notes
    assert torch.equal(output, expected)
    assert not torch.equal(weight, before["norm.weight"])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("mapping", ["symmetric", "affine"])
@pytest.mark.parametrize("method", ["absmax", "vectorwise"])
def test_outliers_of_inputs_no_longer_decide(method, mapping):
    torch.manual_seed(0)
    exact = with_outliers(Block())
    plain, smooth = copy.deepcopy(exact), copy.deepcopy(exact)
    options = {"activations": "static", "mapping": mapping, "calibration": data()}
    quantize_(plain, method, **options)
    report = quantize_(smooth, method, smoothing=0.8, **options)
    fresh = torch.randn(20, 10, WIDTH)
    with torch.no_grad():
        errors = [(net(fresh) - exact(fresh)).norm() for net in (plain, smooth)]
    assert errors[1] < errors[0] / 4
    assert all(row.note is None for row in report.quantized)


def test_files_and_layers_are_the_usual_ones(tmp_path):
    torch.manual_seed(0)
    net = with_outliers(Block())
    plain = copy.deepcopy(net)
    quantize_(plain, "vectorwise", activations="static", calibration=data())
    quantize_(net, "vectorwise", activations="static", calibration=data(), smoothing=0.8)
    save_quantized(net, tmp_path / "int8")
    stored = load_file(tmp_path / "int8" / "model.safetensors")
    assert {name: value.shape for name, value in stored.items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }
    again = load_quantized(tmp_path / "int8", Block()).eval()
    fresh = torch.randn(2, 3, WIDTH)
    assert torch.equal(again(fresh), net(fresh))


def test_layers_that_are_not_smoothed_are_named():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(10, 10, 3, padding=1), nn.GELU(), *chain(nn.ReLU()))
    with torch.no_grad():
        net[2].weight[3] *= 50
    report = quantize_(net, "vectorwise", activations="static", calibration=data(), smoothing=0.8)
    notes = {row.name: row.note for row in report.layers}
    assert notes["4"] is None
    for name in ("0", "2"):
        assert "no layer before it was found that could take the factors" in notes[name]


def test_factors_that_do_not_help_are_not_used():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(2))
        net[1].weight.copy_(torch.tensor([[1.0, 1.0], [64.0, 1.0]]))
    # Inputs of one size and one scale for a weight with a large column: both are on the grid until a factor moves
    # the column's size into the inputs.
    batches = [torch.tensor([[127.0, 127.0], [-3.0, 5.0], [127.0, -1.0], [2.0, 9.0]])]
    report = quantize_(net, "vectorwise", activations="static", calibration=batches, smoothing=0.1)
    assert {row.name: row.note for row in report.layers}["1"] == "not smoothed: it would err no less"
    assert torch.equal(net[0].dequantize(), torch.eye(2))


@pytest.mark.parametrize("strength", [0.0, 0.5, 0.8, 1.0])
def test_factors_are_the_papers_up_to_powers_of_two(strength):
    torch.manual_seed(0)
    inputs, weights = torch.rand(50) * 100 + 0.1, torch.rand(50) + 0.01
    expected = inputs.double() ** strength / weights.double() ** (1 - strength)
    expected /= expected.log().mean().exp()
    factors = smoothing_factors(inputs, weights, strength)
    assert torch.equal(torch.exp2(torch.log2(factors).round()), factors)
    ratio = factors.double() / expected
    # Half an octave each way, and what FP32 logarithms lose.
    assert 2**-0.501 < ratio.min() <= ratio.max() < 2**0.501


@pytest.mark.parametrize("silent", ["inputs", "weights", "both"])
def test_channels_without_values_have_the_factor_one(silent):
    inputs, weights = torch.tensor([8.0, 2.0, 1.0]), torch.tensor([1.0, 1.0, 1.0])
    for values in {"inputs": [inputs], "weights": [weights], "both": [inputs, weights]}[silent]:
        values[1] = 0
    factors = smoothing_factors(inputs, weights, 0.5)
    assert factors[1] == 1
    assert factors[0] > factors[2]
    assert torch.equal(smoothing_factors(torch.zeros(3), weights, 0.5), torch.ones(3))


@pytest.mark.parametrize(
    "options",
    [{"method": "vectorwise"}, {"method": "llm_int8", "activations": "static"}],
    ids=["measured at run time", "outliers apart"],
)
def test_it_needs_static_inputs(options):
    net = Block()
    with pytest.raises(ValueError, match="`smoothing` is for inputs with one static scale"):
        quantize_(net, **options, calibration=data(), smoothing=0.8)
    assert type(net.mixer.up) is nn.Linear


@pytest.mark.parametrize("strength", [0.0, -1.0, 1.5, float("nan")])
def test_strengths_out_of_range_are_refused(strength):
    with pytest.raises(ValueError, match="`smoothing` must be larger than 0 and at most 1"):
        quantize_(Block(), "vectorwise", activations="static", calibration=data(), smoothing=strength)


class Remembers(nn.Module):
    """Keeps the norm's output where a caller finds it."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.seen = self.norm(x)
        return self.linear(self.seen)


class ReadsAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Remembers()

    def forward(self, x):
        return self.inner(x) + self.inner.seen


class ReadsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Remembers()

    def forward(self, x):
        return self.inner(x) + self.inner.norm.weight.sum()


class ActsByValue(Remembers):
    def forward(self, x):
        output = super().forward(x)
        return output if x.abs().max() < 10 else output + self.seen.mean()


@pytest.mark.parametrize("kind", [ReadsAttribute, ReadsWeight, ActsByValue])
def test_what_is_used_elsewhere_takes_no_factors(kind):
    torch.manual_seed(0)
    net = kind().eval()
    with torch.no_grad():
        next(part for part in net.modules() if isinstance(part, nn.LayerNorm)).weight[3] *= 300
    before = {name: value.clone() for name, value in net.state_dict().items() if "norm" in name}
    batches = [torch.randn(16, WIDTH), 20 * torch.randn(16, WIDTH)]
    report = quantize_(net, "vectorwise", activations="static", calibration=batches, smoothing=0.8)
    (row,) = report.layers
    assert "not smoothed" in row.note
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
