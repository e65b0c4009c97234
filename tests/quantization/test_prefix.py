"""Blocks that learn from recorded calls get what they get from passes over the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.quantization.measure import call
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.padding import MaskedForward
from lightning_memprec.quantization.reconstruction import GPTQ, AdaQuant, adaquant, solving
from lightning_memprec.quantization.targets import find_targets


class Block(nn.Module):
    """Two layers of one input, and one behind them; counts how often it runs."""

    runs = 0

    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, *, gate):
        Block.runs += 1
        return (x + self.out(torch.tanh(self.left(x)) * self.right(x) * gate), "not a tensor")


class Chain(nn.Module):
    """Blocks with a keyword that all share, an output that is a tuple, and dropout between them."""

    def __init__(self, count=3):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, 2)

    def walk(self):
        return list(self.blocks)

    def forward(self, x, attention_mask=None):
        h, gate = self.first(x), x.mean(-1, keepdim=True)
        outputs = []
        for block in self.walk():
            h = self.dropout(block(h, gate=gate)[0])
            outputs.append(h)
        # Reads what each block gave, not the last one only.
        return self.head(sum(outputs))


class Twice(Chain):
    def walk(self):
        return [self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]]


class Sometimes(Chain):
    def forward(self, x, attention_mask=None):
        self.second = bool(x[0, 0, 0] > 0)
        return super().forward(x)

    def walk(self):
        return [self.blocks[0], *([self.blocks[1]] * 2 * self.second), self.blocks[2]]


class Interleaved(Chain):
    """Calls a layer of its first block by itself, after the second."""

    def forward(self, x, attention_mask=None):
        gate = x.mean(-1, keepdim=True)
        h = self.blocks[1](self.first(x), gate=gate)[0]
        return self.head(self.blocks[2](self.blocks[0].out(h), gate=gate)[0])


class Outside(Chain):
    """Calls layers of its blocks from outside, too, with other inputs."""

    def forward(self, x, attention_mask=None):
        h, gate = self.first(x), x.mean(-1, keepdim=True)
        memory = 9 * torch.tanh(h).roll(1, -1)
        for block in self.walk():
            h = h + block.left(memory) + block(h, gate=gate)[0]
        return self.head(h)


class Branches(Chain):
    """All layers of all blocks are given the same tensor."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.out = nn.Identity()

    def forward(self, x, attention_mask=None):
        h, gate = self.first(x), x.mean(-1, keepdim=True)
        return self.head(sum(block(h, gate=gate)[0] for block in self.walk()))


class Remembering(Chain):
    """Its middle block gives something else each time."""

    def __init__(self):
        super().__init__()
        self.times = 0
        inner = self.blocks[1].forward

        def forward(x, *, gate):
            self.times += 1
            return inner(x * self.times, gate=gate)

        self.blocks[1].forward = forward


DATA = [torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
PADDED = [{"x": x, "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1] * 5])} for x in DATA]
MODELS = {"chain": Chain, "shared": Twice, "not in all batches": Sometimes, "interleaved": Interleaved,
          "shared input": Branches, "called from outside": Outside}  # fmt: skip
SOLVERS = {"gptq": GPTQ(), "adaquant": AdaQuant(iterations=10)}


def solve(model, data=DATA, forward=call, solver=SOLVERS["gptq"]):
    targets, _ = find_targets(model, Scheme(bits=4))
    solution = solver(model, targets, data, forward)
    return {name: weights["weight"].values for name, weights in solution.items()}


def by_whole_passes(monkeypatch, model, *rest, **solver):
    with monkeypatch.context() as patch:
        for module in (solving, adaquant):
            patch.setattr(module, "find_blocks", lambda *_: [])
        return solve(model, *rest, **solver)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_integers_are_those_of_passes_over_the_whole_model(monkeypatch, kind, solver):
    found, expected = solve(kind(), solver=solver), by_whole_passes(monkeypatch, kind(), solver=solver)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_padding_is_left_out(monkeypatch):
    found = solve(Chain(), PADDED, MaskedForward(call))
    expected = by_whole_passes(monkeypatch, Chain(), PADDED, MaskedForward(call))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(not torch.equal(found[name], other) for name, other in solve(Chain()).items())


def test_a_block_that_answers_differently_alone_is_left_to_whole_passes():
    model = Remembering()
    assert solve(model).keys() == solve(Chain()).keys()
    # The survey, the recording, its two steps, the recording of what follows, and the head.
    assert model.times >= 6 * len(DATA)


def test_adaquant_runs_each_block_some_times_not_all_of_them_once_a_layer(monkeypatch):
    counts = []
    for solve_ in (solve, lambda model, **solver: by_whole_passes(monkeypatch, model, **solver)):
        Block.runs = 0
        solve_(Chain(6), solver=SOLVERS["adaquant"])
        counts.append(Block.runs)
    assert counts[0] < 0.6 * counts[1]


def test_runs_grow_with_the_number_of_blocks_not_with_its_square():
    runs = []
    for count in (3, 6, 12):
        Block.runs = 0
        solve(Chain(count))
        runs.append(Block.runs)
    assert runs[1] == 2 * runs[0]
    assert runs[2] == 4 * runs[0]


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("fails", [False, True], ids=["finished", "refused"])
def test_the_model_is_left_as_it_was(fails, solver):
    model = Chain()
    model.blocks[1].eval()
    inner = model.blocks[2].forward

    def own(x, *, gate):
        return inner(x, gate=gate / 0 if fails else gate)

    model.blocks[2].forward = own
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = [(part.training, set(part.__dict__)) for part in model.modules()]
    state = torch.get_rng_state()
    if fails:
        with pytest.raises(ValueError, match="NaN or infinite"):
            solve(model, solver=solver)
    else:
        solve(model, solver=solver)
    assert [(part.training, set(part.__dict__)) for part in model.modules()] == before
    assert model.blocks[2].forward is own
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
