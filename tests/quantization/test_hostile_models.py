"""Models as others write them: they read weights, hang hooks everywhere, and are fed with the wrong things."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.modules.dequantizing import DequantizingModule
from lightning_memprec.quantization.modules.linear import Int8Linear


def relative(output, exact):
    return float((output - exact).detach().norm() / exact.detach().norm())


class Casts(nn.Module):
    """Casts its input to a weight's dtype, as vision transformers do."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 4)

    def forward(self, values):
        return self.head(self.stem(values.to(self.stem[0].weight.dtype)))


class CastsByPath(Casts):
    def __init__(self):
        super().__init__()
        self.stem = nn.ModuleDict({"proj": nn.Linear(8, 8)})

    def forward(self, values):
        return self.head(self.stem.proj(values.to(self.stem.proj.weight.dtype)))


class Multiplies(CastsByPath):
    def forward(self, values):
        return self.head(nn.functional.linear(values, self.stem.proj.weight))


class KnowsInt8(CastsByPath):
    def forward(self, values):
        if self.stem.proj.weight.dtype != torch.int8:
            values = values.to(self.stem.proj.weight.dtype)
        return self.head(self.stem.proj(values))


class AsksForTheShape(CastsByPath):
    def forward(self, values):
        return self.head(self.stem.proj(values[..., : self.stem.proj.weight.shape[1]]))


@pytest.mark.parametrize("kind", [CastsByPath, Multiplies])
def test_a_layer_whose_weight_is_read_outside_is_left_and_named(kind):
    torch.manual_seed(0)
    model, values = kind(), torch.randn(3, 8)
    exact = model(values)
    report = quantize_(model)
    (left,) = report.skipped
    assert left.name == "stem.proj"
    assert left.reason == f"`{kind.__name__}.forward` reads its weight, which would be int8"
    assert [row.name for row in report.quantized] == ["head"]
    assert relative(model(values), exact) < 0.02


@pytest.mark.parametrize("kind", [KnowsInt8, AsksForTheShape])
def test_harmless_reads_are_no_reason(kind):
    torch.manual_seed(0)
    model, values = kind(), torch.randn(3, 8)
    exact = model(values)
    assert not quantize_(model).skipped
    assert relative(model(values), exact) < 0.02


def test_what_the_source_does_not_show_is_refused_with_a_way_out():
    model = Casts()
    quantize_(model)
    with pytest.raises(TypeError, match="leave that layer in floating point with `exclude`"):
        model(torch.randn(3, 8))
    model = Casts()
    quantize_(model, exclude=["stem.0"])
    assert model(torch.randn(3, 8)).shape == (3, 4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:FutureWarning")
def test_a_scripted_part_is_left_alone():
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 4))
    assert [row.name for row in quantize_(model).quantized] == ["1"]
    assert model(torch.randn(3, 8)).shape == (3, 4)


WHOLE = {
    "attention": (lambda: nn.MultiheadAttention(8, 2), lambda: (torch.randn(4, 3, 8),) * 3),
    "LSTM": (lambda: nn.LSTM(8, 6), lambda: (torch.randn(4, 3, 8),)),
    "GRU cell": (lambda: nn.GRUCell(8, 6), lambda: (torch.randn(4, 8),)),
    "linear": (lambda: nn.Linear(8, 6), lambda: (torch.randn(4, 8),)),
}


@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE)
def test_hooks_act_once(case):
    build, values = case
    torch.manual_seed(0)
    model = nn.ModuleDict({"part": build()}).eval()
    calls = []
    model.part.register_forward_pre_hook(lambda module, args: tuple(2 * value for value in args))
    model.part.register_forward_hook(lambda module, args, output: calls.append(type(module)))
    args = values()
    exact = model.part(*args)
    quantize_(model)
    calls.clear()
    output = model.part(*args)
    assert calls == [type(model.part)]
    first = [result[0] if isinstance(result, tuple) else result for result in (output, exact)]
    assert relative(*first) < 0.02


@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE)
def test_calibration_measures_every_kind_of_layer(case):
    build, values = case
    torch.manual_seed(0)
    model = nn.ModuleDict({"part": build()}).eval()
    report = quantize_(model, calibration=[values()], forward=lambda module, batch: module.part(*batch))
    assert 0 < report.layers[0].output_error < 0.02
    assert isinstance(model.part, (DequantizingModule, Int8Linear))
    assert not model.part._forward_hooks


@pytest.mark.parametrize("method", ["weight_only", "vectorwise", "llm_int8"])
@pytest.mark.parametrize("features", [1, 12])
def test_the_wrong_number_of_features_is_refused(method, features):
    model = nn.Sequential(nn.Linear(features, 7))
    quantize_(model, method)
    # 24 is divisible by both, so that a reshape alone would not notice.
    with pytest.raises(ValueError, match=rf"takes {features} features, got an input of shape \[2, 24\]"):
        model(torch.randn(2, 24))


@pytest.mark.parametrize("method", ["weight_only", "absmax", "zeropoint", "vectorwise", "llm_int8"])
@pytest.mark.parametrize("sizes", [(0, 3), (8, 0)], ids=str)
@pytest.mark.parametrize("shape", [(2,), (0,), (2, 3), ()], ids=str)
def test_layers_and_inputs_without_elements(method, sizes, shape):
    with pytest.warns(UserWarning, match="Initializing zero-element tensors"):
        model = nn.Sequential(nn.Linear(*sizes))
    values = torch.randn(*shape, sizes[0])
    exact = model(values)
    quantize_(model, method, calibration=[values])
    torch.testing.assert_close(model(values), exact)


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.LSTM(4, 4)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_float_state_is_refused_and_changes_nothing(layer, strict):
    model = nn.Sequential(layer)
    state = copy.deepcopy(model.state_dict())
    quantize_(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        RuntimeError, match=r"is in floating point in the state, but int8 in this model\. Load"
    ):
        model.load_state_dict(state, strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_without_values_is_refused():
    model = nn.Sequential(nn.Linear(4, 4, device="meta"))
    with pytest.raises(ValueError, match=r"`0\.weight` cannot be quantized: It is on the meta device"):
        quantize_(model)


def tiny(name):
    """Return a Transformers model with random weights, and its input."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ids = {"input_ids": torch.arange(1, 7)[None]}
    if name == "BERT":
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **small)), ids
    if name == "GPT-2":
        config = transformers.GPT2Config(
            vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config), ids
    if name == "T5":
        config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        return transformers.T5ForConditionalGeneration(config), {**ids, "decoder_input_ids": ids["input_ids"]}
    config = transformers.ViTConfig(image_size=16, patch_size=8, **small)
    return transformers.ViTModel(config), {"pixel_values": torch.randn(1, 3, 16, 16)}


@pytest.mark.slow  # Imports Transformers' models.
@pytest.mark.parametrize("method", ["weight_only", "vectorwise", "llm_int8"])
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "T5", "ViT"])
def test_transformers_run_and_are_near(name, method):
    torch.manual_seed(0)
    model, batch = tiny(name)
    model.eval()
    with torch.no_grad():
        exact = model(**batch)[0]
        report = quantize_(model, method, calibration=[batch])
        rounded = model(**batch)[0]
        again = copy.deepcopy(model)(**batch)[0]
    assert relative(rounded, exact) < 0.03
    assert torch.equal(again, rounded)
    assert [row.name for row in report.skipped] == (
        ["embeddings.patch_embeddings.projection"] if name == "ViT" else []
    )
