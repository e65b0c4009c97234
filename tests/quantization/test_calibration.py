"""What layers are shown of the data, and that looking leaves no trace."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_memprec.quantization import calibration as calibrating
from lightning_memprec.quantization.calibration import InputProducts, feed, input_rows
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.measure import call
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction import solving
from lightning_memprec.quantization.reconstruction.gptq import GPTQ
from lightning_memprec.quantization.reconstruction.hessian import damped
from lightning_memprec.quantization.targets import find_targets

LAYERS = {
    "linear": (nn.Linear(6, 4, bias=False), (2, 5, 6)),
    "linear, one vector": (nn.Linear(6, 4, bias=False), (6,)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding="same", dilation=2, bias=False), (2, 4, 9)),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2, bias=False), (3, 4, 7, 6)),
    "depth-wise": (nn.Conv2d(4, 8, 3, groups=4, padding=1, padding_mode="reflect", bias=False), (3, 4, 5, 5)),
    "conv3d": (nn.Conv3d(2, 3, 2, dilation=(1, 2, 1), padding_mode="circular", padding=1, bias=False), (1, 2, 4, 5, 3)),
    "no batch": (nn.Conv2d(4, 6, 3, bias=False), (4, 5, 5)),
}  # fmt: skip


@pytest.mark.parametrize("block", [2**24, 40], ids=["one block", "small blocks"])
@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS)
def test_rows_times_the_weight_matrix_are_the_output(monkeypatch, layer, shape, block):
    monkeypatch.setattr(calibrating, "_BLOCK", block)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows = torch.cat(list(input_rows(layer, values)))
    matrix = layer.weight.detach().flatten(1)
    output = torch.einsum("ngk,gok->ngo", rows, matrix.reshape(rows.shape[1], -1, rows.shape[2])).flatten(1)
    expected = layer(values).detach()
    if not isinstance(layer, nn.Linear):
        expected = (expected if values.dim() == layer.weight.dim() else expected[None]).movedim(1, -1)
    # FP32 sums of up to 36 products in another order.
    torch.testing.assert_close(output, expected.reshape(output.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("calls", [[40], [1] * 40, [3, 2, 30, 4, 1]], ids=str)
def test_products_are_those_of_all_rows_and_a_fifth_is_held_out(calls):
    rows = torch.randn(40, 2, 5, generator=torch.Generator().manual_seed(0))
    products = InputProducts()
    for block in rows.split(calls):
        products.add(block)
    exact = torch.einsum("ngi,ngj->gij", rows.double(), rows.double())
    # FP32 products of up to 40 rows.
    torch.testing.assert_close(products.learned_from + products.held_out, exact, rtol=1e-5, atol=1e-5)
    assert products.rows == 40
    assert torch.linalg.matrix_rank(products.held_out[0]) == 5
    assert products.judge is products.held_out
    if calls == [40]:
        tail = rows[32:].double()
        torch.testing.assert_close(
            products.held_out, torch.einsum("ngi,ngj->gij", tail, tail), rtol=1e-5, atol=1e-5
        )


def test_too_few_rows_to_hold_one_out_judge_themselves():
    products = InputProducts()
    products.add(torch.ones(4, 1, 2))
    assert torch.equal(products.judge, torch.full((1, 2, 2), 4.0, dtype=torch.float64))


class Net(nn.Module):
    """A layer that runs twice, dropout and batch norm, and layers out of order or never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)
        self.shared = nn.Linear(4, 4)
        self.dropout, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(4)

    def forward(self, x, scale=1.0):
        return self.last(self.norm(self.dropout(self.shared(self.shared(input=x) * scale))))


def listen(net, batches, forward=call):
    seen = {}
    layers = {name: part for name, part in net.named_modules() if isinstance(part, nn.Linear)}
    feed(net, batches, forward, layers, lambda name, rows: seen.setdefault(name, []).append(rows[:, 0]))
    return seen


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "batch", [X, (X, 1.0), [X], {"x": X, "scale": 1.0}], ids=["tensor", "tuple", "list", "mapping"]
)
def test_every_use_of_a_layer_is_seen_in_evaluation_mode(batch):
    net = Net()
    seen = listen(net, [batch])
    with torch.no_grad():
        first = F.linear(X, net.shared.weight, net.shared.bias)
        second = F.linear(first, net.shared.weight, net.shared.bias)
    assert torch.equal(torch.stack(seen["shared"]), torch.stack([X, first]))
    torch.testing.assert_close(seen["last"][0], second / (1 + net.norm.eps) ** 0.5)


def test_looking_leaves_no_trace():
    net = Net().train()
    net.last.eval()
    state = copy.deepcopy(net.state_dict())
    before = (random.getstate(), torch.get_rng_state())

    def forward(module, batch):
        return module(batch + 0 * torch.rand(1) * random.random())

    report = quantize_(net, "gptq", bits=4, calibration=[X, X], forward=forward, include=["last"])
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert net.training
    assert net.norm.training
    assert not net.last.training
    assert all(
        torch.equal(value, state[name]) for name, value in net.state_dict().items() if "last" not in name
    )
    assert [row.name for row in report.quantized] == ["last"]
    assert not net.last._forward_hooks
    assert not net.last._forward_pre_hooks


def test_a_batch_with_nan_is_refused_and_named_and_nothing_changes():
    net = Net()
    with pytest.raises(ValueError, match=r"Calibration batch 1 gives `shared` an input with NaN or infinite"):
        quantize_(net, "gptq", calibration=[X, X.clone().fill_(torch.nan)])
    assert type(net.shared) is nn.Linear
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


def test_no_batches_are_refused():
    with pytest.raises(ValueError, match="There are no calibration batches"):
        quantize_(Net(), "gptq", calibration=[])


@dataclass(frozen=True)
class Recorder(GPTQ):
    """Remembers the Hessians it was given."""

    seen: list = field(default_factory=list)

    def solve(self, matrix, hessian, grid):
        self.seen.append(hessian)
        return super().solve(matrix, hessian, grid)


def solved(net, solver, data, **scheme):
    targets, _ = find_targets(net, Scheme(**scheme))
    return {target.name: target for target in targets}, solver(net, targets, data, call)


def test_sequential_inputs_come_from_the_quantized_prefix():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    values = torch.randn(4, 8)  # Too few to hold one out.
    float_hidden = net[:2](values).detach()
    solvers = {sequential: Recorder(sequential=sequential, damping=1e-3) for sequential in (True, False)}
    for sequential, solver in solvers.items():
        targets, solution = solved(net, solver, [values], bits=3)
        hidden = float_hidden
        if sequential:
            hidden = net[1](targets["0"].build(dict(solution["0"]))(values)).detach()
            assert not torch.allclose(hidden, float_hidden, atol=1e-3)
        # FP32 products.
        expected = damped((hidden.T @ hidden).double(), 1e-3)
        torch.testing.assert_close(solver.seen[1], expected, rtol=1e-5, atol=1e-5)


def test_passes_in_parallel_mode_keep_to_the_budget_and_change_nothing(monkeypatch):
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), [torch.randn(20, 8)]
    calls = []
    monkeypatch.setattr(solving, "feed", lambda *args: (calls.append(list(args[3])), feed(*args))[1])
    _, together = solved(net, GPTQ(sequential=False), data, bits=4)
    monkeypatch.setattr(solving, "_BUDGET", 1)
    _, apart = solved(net, GPTQ(sequential=False), data, bits=4)
    assert calls == [["0", "2"], ["0"], ["2"]]
    assert all(
        torch.equal(together[name]["weight"].values, apart[name]["weight"].values) for name in together
    )


class Padded(nn.Module):
    """Kinds of layers that do not learn, and a transformer whose fast path packs padded batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.up = nn.ConvTranspose1d(16, 16, 1)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.spare = nn.Linear(16, 2)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, mask):
        x = self.encoder(self.embedding(ids), src_key_padding_mask=mask)
        return self.head(self.rnn(self.up(x.mT).mT)[0])


def test_what_does_not_learn_is_rounded_to_nearest_and_named():
    net = Padded().eval()
    ids = torch.randint(0, 20, (8, 10), generator=torch.Generator().manual_seed(0))
    data = [(ids, torch.arange(10) >= torch.arange(3, 11)[:, None])]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    nearest, learned = copy.deepcopy(net), copy.deepcopy(net)
    quantize_(nearest, bits=4, calibration=data)
    report = quantize_(learned, "gptq", bits=4, calibration=data)
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    kind = "rounded to nearest: only linear layers and convolutions learn"
    expected = {
        "embedding": kind,
        "encoder.layers.0.self_attn": kind,
        "up": kind,
        "rnn": kind,
        "spare": "rounded to nearest: no calibration data reached it",
        "head": "rounded to nearest: its weight is tied to another layer's",
    }
    notes = {row.name: row.note for row in report.layers if row.note and "channels" not in row.note}
    assert notes == expected
    assert report.to_dict()["layers"][0]["note"] == kind
    assert f"W4 channel symmetric; {kind}" in str(report)
    assert learned.head.stored() is learned.embedding.stored()
    for name, value in nearest.state_dict().items():
        same = torch.equal(value, learned.state_dict()[name])
        learns = name.endswith(("linear1.weight_packed", "linear2.weight_packed"))
        assert same != learns, name


def test_little_data_and_channels_that_gain_nothing_are_named():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32))
    nearest, learned = copy.deepcopy(net), copy.deepcopy(net)
    quantize_(nearest, bits=4)
    # Independent inputs, fewer than features: what is learned from them does not hold for others.
    (row,) = quantize_(learned, "gptq", bits=4, calibration=[torch.randn(40, 64)]).layers
    kept = int((nearest[0].weight == learned[0].weight).all(1).sum())
    assert 0 < kept < 32
    assert row.note == (
        f"{kept} of 32 channels rounded to nearest: that errs less on held-out rows;"
        " learned from only 40 rows for 64 features"
    )
