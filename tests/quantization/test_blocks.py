"""Finding the blocks of a model, recording what they are called with, and calling them again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.padding import MaskedForward
from lightning_memprec.quantization.reconstruction.blocks import as_parameter, find_blocks, single_layers
from lightning_memprec.quantization.reconstruction.recording import (
    TensorStore,
    record,
    replay,
    replays,
    temporary_store,
)
from lightning_memprec.quantization.reconstruction.survey import survey
from lightning_memprec.quantization.targets import find_targets

from . import block_nets
from .block_nets import Layer, Residual, Transformer, call


def linear(*sizes):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x):
        return self.conv(x)


def shared():
    layer = Layer(8)
    model = Transformer(depth=1, width=8)
    model.layers = nn.ModuleList([layer, layer])
    return model


FOUND = {
    "layers beside each other": (lambda: linear(4, 4, 4), ["0", "1"]),
    "transformer": (Transformer, ["embed", "layers.0", "layers.1", "head"]),
    "one layer in a list": (lambda: Transformer(depth=1), ["embed", "layers.0", "head"]),
    "the same layer twice": (shared, ["embed", "layers.0", "head"]),
    "stages of residual blocks": (
        lambda: nn.Sequential(Stem(), nn.Sequential(Residual(4), Residual(4)), nn.Sequential(Residual(4))),
        ["0.conv", "1.0", "1.1", "2.0"],
    ),
    "attention of torch": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2, enable_nested_tensor=False
        ),
        ["layers.0", "layers.1"],
    ),
}


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_blocks_are_what_repeats_and_each_target_is_in_one(case):
    build, names = case
    model = build()
    targets, _ = find_targets(model, Scheme())
    blocks = find_blocks(model, targets)
    assert [block.name for block in blocks] == names
    assert [target for block in blocks for target in block.targets] == targets
    for block in blocks:
        own = dict(block.module.named_parameters())
        for target in block.targets:
            theirs = dict(target.module.named_parameters())
            assert all(own[block.parameter_name(target, key)] is theirs[key] for key in target.weights)


def gpt2_conv(out, features):
    from transformers.pytorch_utils import Conv1D

    return Conv1D(out, features)


LAYERS = {
    "linear": lambda: nn.Linear(3, 5),
    "grouped convolution": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "Conv1D": lambda: gpt2_conv(5, 3),
    "square Conv1D": lambda: gpt2_conv(4, 4),
    "Conv1D of one feature": lambda: gpt2_conv(4, 1),
    "attention": lambda: nn.MultiheadAttention(4, 2),
}


@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
def test_a_matrix_goes_back_to_where_it_was_read(build):
    targets, _ = find_targets(nn.Sequential(build()), Scheme())
    parameters = dict(targets[0].module.named_parameters())
    for key, read in targets[0].weights.items():
        assert torch.equal(as_parameter(targets[0], key, read()), parameters[key])


@pytest.mark.parametrize(
    "budget", [pytest.param(0, marks=pytest.mark.extended), 2000, 2**30], ids=["files", "both", "memory"]
)
@pytest.mark.parametrize("kind", block_nets.NETS)
def test_blocks_answer_the_same_when_called_alone(kind, budget, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_store(budget) as store:
        _answer_the_same_when_called_alone(kind, store)
        # No folder where memory is enough; the compiler may have made its own here.
        assert len(list(tmp_path.glob("lightning_memprec_*"))) == (budget < 2**30)


def _answer_the_same_when_called_alone(kind, store):
    net = block_nets.trained(kind)
    blocks = find_blocks(net, find_targets(net, Scheme())[0])
    modules = {block.name: block.module for block in blocks}
    batches = block_nets.calibration(kind, 60)
    calls = record(net, modules, batches, call, store)
    assert list(calls) == list(modules)
    with torch.no_grad():
        for name, module in modules.items():
            assert len(calls[name]) == 3
            assert replays(module, calls[name])
            # Twice, since a block may work in place.
            for _ in range(2):
                assert all(torch.equal(replay(module, one), one.output.load()) for one in calls[name])
        # The last block's answer is the model's.
        whole = call(net, batches[1])
        assert torch.equal(calls["head" if kind == "transformer" else blocks[-1].name][1].output.load(),
                           whole["logits"] if kind == "transformer" else whole)  # fmt: skip


def test_files_hold_the_same_tensors_and_are_gone_afterwards():
    net, batches = block_nets.trained("transformer"), block_nets.calibration("transformer", 40)
    modules = {"layer": net.layers[1]}
    with temporary_store(0) as files, temporary_store(2**30) as memory:
        slow, fast = (record(net, modules, batches, call, store)["layer"] for store in (files, memory))
        for a, b in zip(slow, fast, strict=True):
            assert isinstance(a.output.place, Path)
            assert isinstance(b.output.place, torch.Tensor)
            assert torch.equal(a.output.load(), b.output.load())
            assert torch.equal(a.args[0].load(), b.args[0].load())
            assert torch.equal(a.kwargs["mask"].load(), b.kwargs["mask"].load())
        folder = slow[0].output.place.parent
        assert folder.exists()
    assert not folder.exists()


def test_what_several_blocks_see_is_kept_once():
    net, batches = block_nets.trained("transformer"), block_nets.calibration("transformer", 20)
    calls = record(net, {"0": net.layers[0], "1": net.layers[1]}, batches, call, TensorStore(2**30))
    assert calls["0"][0].kwargs["mask"] is calls["1"][0].kwargs["mask"]
    assert calls["0"][0].output is calls["1"][0].args[0]


def test_calls_under_autocast_and_inference_mode_are_made_again_as_they_were():
    net, batches = block_nets.trained("residual"), block_nets.calibration("residual", 40)

    def forward(module, batch):
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return module(batch)

    block = net[1][0]
    calls = record(net, {"block": block}, batches, forward, TensorStore(2**30))["block"]
    assert calls[0].output.load().dtype == torch.bfloat16
    assert replays(block, calls)
    replay(block, calls[0]).float().sum().backward()
    assert block.first.weight.grad is not None


def test_models_of_transformers_fill_no_caches_meanwhile():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    assert model.config.use_cache
    blocks = find_blocks(model, find_targets(model, Scheme())[0])
    assert [block.name for block in blocks] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "lm_head",
    ]
    modules = {block.name: block.module for block in blocks}
    batches = [{"input_ids": torch.randint(32, (2, 7))} for _ in range(2)]
    calls = record(model, modules, batches, call, TensorStore(2**30))
    with torch.no_grad():
        for name, module in modules.items():
            # Twice, since a cache would grow.
            assert replays(module, calls[name])
            assert replays(module, calls[name])
    assert model.config.use_cache


def test_gradients_are_those_of_the_loss():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double()
    batches = [torch.randn(6, 4).double() for _ in range(2)]

    def loss(output):
        return None, output.square().sum()

    calls = record(net, {"0": net[0], "2": net[2]}, batches, call, TensorStore(2**30), loss)
    for index, batch in enumerate(batches):
        hidden = net[0](batch)
        output = net[2](hidden.relu())
        at_output = 2 * output
        at_hidden = at_output @ net[2].weight * (hidden > 0)
        # The same sums in FP64, in another order.
        torch.testing.assert_close(calls["2"][index].gradient.load(), at_output.detach())
        torch.testing.assert_close(calls["0"][index].gradient.load(), at_hidden.detach())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_padding_is_known_where_a_mask_is():
    net = block_nets.trained("transformer")
    tokens = block_nets.sentences(6)
    mask = torch.ones_like(tokens)
    mask[2:, 7:] = 0
    forward = MaskedForward(lambda module, batch: module(batch["tokens"]))
    batches = [{"tokens": tokens, "attention_mask": mask}]
    calls = record(net, {"layer": net.layers[0]}, batches, forward, TensorStore(2**30))
    output = calls["layer"][0].output.load()
    assert torch.equal(calls["layer"][0].without_padding(output), output[mask.bool()])


def test_bytes_are_counted_in_the_order_of_use():
    first, second, never = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 2)
    net = nn.ModuleDict({"never": never, "second": second, "first": first})
    found = survey(net, dict(net.items()), [torch.zeros(3, 4)] * 2, lambda _, batch: second(first(batch)))
    assert list(found.items()) == [("first", 2 * 4 * 3 * (4 + 8)), ("second", 2 * 4 * 3 * (8 + 2))]


class Counting(Layer):
    """A layer that never answers the same twice."""

    count = 0

    def forward(self, x, *, mask):
        self.count += 1
        output, _ = super().forward(x, mask=mask)
        return output + self.count, None


def test_a_block_that_cannot_be_called_alone_is_taken_apart():
    torch.manual_seed(0)
    net = Transformer()
    net.layers[1] = Counting(16)
    net.layers.append(Counting(16))
    batches = block_nets.calibration("transformer", 60)
    report = quantize_(net, "zeroquant", bits=4, calibration=batches, method_options={"iterations": 20})
    notes = {row.name: row.note for row in report.layers}
    for name in ("layers.1.qkv", "layers.2.down"):
        block = name.rpartition(".")[0]
        assert f"learned by itself: `{block}` answers differently when called alone" in notes[name]
    assert "learned by itself" not in (notes["layers.0.qkv"] or "")


def test_a_block_is_taken_apart_into_its_layers():
    net = Transformer()
    layer = find_blocks(net, find_targets(net, Scheme())[0])[1]
    parts = single_layers(layer)
    assert [part.name for part in parts] == [f"layers.0.{key}" for key in ("qkv", "out", "up", "down")]
    assert [part.module for part in parts] == [target.module for target in layer.targets]


class Quiet(nn.Module):
    """Keeps its answer to itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, into):
        into.append(self.inner(x))


class Experts(nn.Module):
    """Uses one of two."""

    def __init__(self):
        super().__init__()
        self.always, self.never = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.always(x)


class Still(Experts):
    """Runs without gradients."""

    @torch.no_grad()
    def forward(self, x):
        return self.always(x)


class Mixed(nn.Module):
    """Has layers of all kinds that do not learn, and two that do although their block gives nothing."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.words.weight
        self.memory = nn.LSTM(4, 4, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.quiet = nn.ModuleList([Quiet(), Quiet()])
        self.unused = nn.Linear(4, 4)
        self.experts = nn.Sequential(Experts(), Experts(), Still(), Still())

    def forward(self, tokens):
        x = self.experts(self.normed(self.memory(self.words(tokens))[0]))
        for part in self.quiet:
            into = []
            part(x, into)
            x = into[0]
        return self.head(x)


@pytest.mark.parametrize("inputs", ["teacher", "student"])
def test_what_does_not_learn_says_why(inputs):
    torch.manual_seed(0)
    batches = [torch.randint(6, (3, 5)) for _ in range(5)]
    options = {"iterations": 20, "inputs": inputs}
    report = quantize_(Mixed(), "zeroquant", bits=4, calibration=batches, method_options=options)
    notes = {row.name: row.note or "" for row in report.layers}
    expected = {
        "words": "rounded to nearest: only linear layers, convolutions and attention learn",
        "head": "rounded to nearest: its weight is tied to another layer's",
        "memory": "rounded to nearest: only linear layers, convolutions and attention learn",
        "normed": "rounded to nearest: its weight is parametrized",
        "unused": "rounded to nearest: no calibration data reached it",
        "experts.0.never": "rounded to nearest: no calibration data reached it",
        "experts.2.always": "rounded to nearest: no finite gradients reach its weights",
        "quiet.0.inner": "learned by itself: `quiet.0` answers differently when called alone",
    }
    assert {name for name, note in expected.items() if note not in notes[name]} == set()
    assert "no calibration data" not in notes["experts.0.always"]


def test_a_batch_that_gives_no_numbers_is_named():
    net = linear(4, 4, 4)
    batches = [torch.zeros(2, 4), torch.full((2, 4), torch.nan)]
    with pytest.raises(ValueError, match="Calibration batch 1 makes `1` give NaN or infinite values"):
        record(net, {"1": net[1]}, batches, call, TensorStore(2**30))
