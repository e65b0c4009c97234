"""What ``quantize_`` replaces, what it leaves and why, and that the rest of the model is as it was."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from lightning_memprec.quantization import methods
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.methods import Method, register_method
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.modules.conv import Int8Conv
from lightning_memprec.quantization.modules.linear import Int8Linear


def reasons(report):
    return {row.name: row.reason for row in report.skipped}


class LanguageModel(nn.Module):
    """An embedding tied to its head, and a block that is run twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.block = nn.Linear(16, 16)
        self.again = self.block
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.again(self.block(self.embedding(ids)).relu()))


@pytest.mark.parametrize(
    "scheme", [{}, {"weight_granularity": "tensor"}, {"group_size": 6, "mapping": "affine"}], ids=str
)
def test_tied_weights_stay_tied(scheme):
    torch.manual_seed(0)
    model, ids = LanguageModel().eval(), torch.arange(12)
    exact = model(ids)
    report = quantize_(model, **scheme)
    assert [row.name for row in report.layers] == ["embedding", "block", "head"]
    for version in (model, copy.deepcopy(model), copy.deepcopy(model).to(torch.bfloat16)):
        assert version.embedding.weight is version.head.weight
        assert version.embedding.weight_scale is version.head.weight_scale
        assert version.embedding.weight_zero_point is version.head.weight_zero_point
        assert version.block is version.again
    assert (model(ids) - exact).norm() < 0.03 * exact.norm()
    # The second of the two tied layers holds nothing of its own.
    assert report.layers[2].bytes_before == report.layers[2].bytes_after == 0
    assert report.bytes_before == sum(row.bytes_before for row in report.layers)
    assert report.bytes_after == sum(row.bytes_after for row in report.layers)


def test_tied_weights_stay_tied_on_another_device():
    model = LanguageModel()
    quantize_(model)
    scale = model.head.weight_scale
    model.to("cpu").double()
    assert model.head.weight_scale is model.embedding.weight_scale is scale
    model.to_empty(device="meta")
    assert model.head.weight.is_meta
    assert model.block.weight_scale.is_meta


def test_a_weight_tied_to_one_that_stays_is_left():
    model = LanguageModel()
    report = quantize_(model, exclude=["embedding"])
    assert reasons(report) == {
        "embedding": "excluded by name",
        "head": "tied to `embedding.weight`, which stays in floating point",
    }
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.block, Int8Linear)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, {"a.0", "a.1", "b"}),
        (["a.*"], None, {"a.0", "a.1"}),
        (["Linear"], ["a.*"], {"b"}),
        (None, ["Conv1d", "b"], {"a.0"}),
        ([], None, set()),
    ],
    ids=["all", "pattern", "class", "excluded", "none"],
)
def test_include_and_exclude(include, exclude, expected):
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1)), "b": nn.Linear(4, 4)})
    report = quantize_(model, include=include, exclude=exclude)
    assert {row.name for row in report.quantized} == expected
    assert {row.name for row in report.layers} == {"a.0", "a.1", "b"}


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(
        ValueError, match=r"'lm_haed' matches no module.*names begin with: block, embedding, head"
    ):
        quantize_(LanguageModel(), exclude=["lm_haed"])


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_weight_that_cannot_be_quantized_is_named_and_nothing_changes(bad):
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    with torch.no_grad():
        model[1].weight_hh_l0[1, 2] = bad
    with pytest.raises(ValueError, match=r"`1.weight_hh_l0` cannot be quantized: 1 of 64 values"):
        quantize_(model)
    assert type(model[0]) is nn.Linear


def test_the_model_itself_cannot_be_replaced():
    with pytest.raises(ValueError, match=r"The model itself is a `Linear`.*torch.nn.Sequential"):
        quantize_(nn.Linear(2, 2))


def test_parametrized_weights_are_merged():
    torch.manual_seed(0)
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 5)), parametrizations.spectral_norm(nn.Conv1d(1, 3, 2))
    )
    power = model[1].parametrizations.weight[0]._u.clone()
    values = torch.randn(4, 1, 6)
    exact = copy.deepcopy(model).eval()(values)
    assert not quantize_(model).skipped
    assert model.training
    assert not list(model[1].children())
    assert power.shape == (3,)
    assert (model.eval()(values) - exact).norm() < 0.02 * exact.norm()


class Doubled(nn.Linear):
    def forward(self, values):
        return 2 * super().forward(values)


def patched():
    layer = nn.Linear(4, 4)
    layer.forward = lambda values: values
    return layer


def pruned():
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)


def quantized_elsewhere():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: Doubled(4, 4), "`Doubled` has a `forward` of its own"),
        (patched, "`Linear` has a `forward` of its own"),
        (pruned, "`weight` is computed by a hook"),
        (lambda: nn.LazyLinear(4), "not initialized yet"),
        (lambda: nn.Embedding(4, 4, max_norm=1.0), "`max_norm` changes the weight"),
        (lambda: nn.EmbeddingBag(4, 4), "not supported"),
        (lambda: nn.Bilinear(4, 4, 4), "not supported"),
        (quantized_elsewhere, "holds no floating-point numbers"),
        (lambda: parametrizations.weight_norm(nn.LSTM(4, 4), "weight_ih_l0"), "parametrized; call"),
        (lambda: prune.identity(nn.GRU(4, 4), "weight_ih_l0"), "computed by a hook"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_left_is_named_with_the_reason(layer, reason):
    model = nn.Sequential(layer())
    kind = type(model[0])
    report = quantize_(model)
    assert type(model[0]) is kind
    assert list(reasons(report)) == ["0"]
    assert reasons(report)["0"].startswith(reason) or reason in reasons(report)["0"]
    assert report.bytes_before == report.bytes_after


def test_layers_without_matrices_are_not_rows():
    assert not quantize_(nn.Sequential(nn.LayerNorm(4), nn.ReLU(), nn.BatchNorm1d(4))).layers


def test_gpt2_convolution_is_a_linear_layer():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model, values = nn.Sequential(conv1d(7, 12)), torch.randn(2, 3, 12)
    exact = model(values)
    quantize_(model)
    assert model[0].weight.shape == (7, 12)
    torch.testing.assert_close(model[0].weight_scale[:, 0], model[0].dequantize().abs().amax(1) / 127)
    assert (model(values) - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("dora", [False, True])
def test_lora_adapters_stay_and_are_named(dora):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["0"], use_dora=dora, init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 3)), config).eval()
    values = torch.randn(5, 12)
    exact = model(values)
    left = reasons(quantize_(model))
    assert all("merge it first" in reason for reason in left.values())
    assert any("lora_A" in name for name in left)
    assert any(name.endswith("base_layer") for name in left) == dora
    assert (model(values) - exact).norm() < 0.02 * exact.norm()


def test_hooks_modes_and_other_parameters_are_kept():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[0].eval()
    calls = []
    model[0].register_forward_hook(lambda module, args, output: calls.append(type(module)))
    bias, norm = model[0].bias, model[1].weight
    quantize_(model)
    model(torch.randn(2, 4))
    assert calls == [Int8Linear]
    assert model[0].bias is bias
    assert model[1].weight is norm
    assert not model[0].training
    assert model[1].training


def test_calibration_leaves_modes_and_generators_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4))
    mean, state = model[2].running_mean.clone(), torch.get_rng_state()
    quantize_(model, calibration=iter([torch.randn(3, 4, generator=torch.Generator().manual_seed(0))]))
    assert all(module.training for module in model.modules())
    assert torch.equal(model[2].running_mean, mean)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model[0]._forward_hooks


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return self.layer(x) * scale


@pytest.mark.parametrize(
    ("batch", "forward"),
    [
        (torch.ones(2, 4), None),
        ((torch.ones(2, 4), 2.0), None),
        ({"x": torch.ones(2, 4)}, None),
        ((torch.ones(2, 4), "label"), lambda module, batch: module(batch[0])),
    ],
    ids=["tensor", "tuple", "mapping", "forward"],
)
def test_output_errors_are_what_the_layer_shows(batch, forward):
    torch.manual_seed(0)
    model = Keywords()
    exact = model.layer(torch.ones(2, 4)).detach()
    (row,) = quantize_(model, calibration=[batch], forward=forward).layers
    assert row.output_error == pytest.approx(
        float((model.layer(torch.ones(2, 4)).detach() - exact).norm() / exact.norm()), rel=1e-3
    )


def test_no_batches_are_refused():
    with pytest.raises(ValueError, match="There are no calibration batches"):
        quantize_(nn.Sequential(nn.Linear(2, 2)), calibration=[])


def test_report_adds_up():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.LayerNorm(8))
    weight = model[0].weight.detach().clone()
    report = quantize_(model, exclude=["2"])
    first, second = report.layers
    assert first.bytes_before == 4 * (64 * 32 + 32)
    assert first.bytes_after == 64 * 32 + 4 * 32 + 4 * 32
    assert second.bytes_before == second.bytes_after == 4 * (32 * 8 + 8)
    assert report.bytes_before - report.bytes_after == first.bytes_before - first.bytes_after
    noise = (model[0].dequantize() - weight).double().square().sum()
    assert first.sqnr_db == pytest.approx(10 * math.log10(weight.double().square().sum() / noise))
    assert json.loads(json.dumps(report.to_dict()))["layers"][1]["reason"] == "excluded by name"
    text = str(report)
    assert "1 layers quantized, 1 left" in text
    assert "left: excluded by name" in text


def test_an_exact_weight_has_no_noise():
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.zero_()
    report = quantize_(model)
    assert report.layers[0].sqnr_db == math.inf
    assert report.to_dict()["layers"][0]["sqnr_db"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "gguf"}, "no method 'gguf'. Choose one of: weight_only, absmax"),
        ({"outlier_threshold": 6.0}, "`activations` is 'float'"),
        ({"method": "llm_int8", "outlier_threshold": -1.0}, "must be larger than 0, got -1.0"),
        ({"activations": "row"}, "`activations` must be 'float', 'tensor', 'token' or 'static', got 'row'"),
        ({"weight_granularity": "group"}, "`group_size` must be a positive integer, got None"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize_(nn.Sequential(nn.Linear(2, 2)), **arguments)


def test_keywords_override_a_preset():
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(1, 2, 3), nn.Embedding(4, 4))
    quantize_(model, "llm_int8", group_size=4, bits=6)
    expected = Scheme(6, "symmetric", "group", 4, "token", 6.0)
    assert model[0].scheme == expected
    # What does not apply to a layer is not claimed for it.
    assert isinstance(model[1], Int8Conv)
    assert model[1].scheme.outlier_threshold is None
    assert model[2].scheme.activations == "float"
    model = nn.Sequential(nn.Linear(8, 8))
    quantize_(model, "llm_int8", activations="float")
    assert model[0].scheme == Scheme()


def test_a_registered_method_finds_the_integers(monkeypatch):
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    seen = []

    def zeros(module, targets, calibration, forward):
        seen.append(([target.name for target in targets], calibration))
        return {
            target.name: {key: target.scheme.quantize(0 * read()) for key, read in target.weights.items()}
            for target in targets
        }

    register_method(Method("zeros", Scheme(bits=4), solver=zeros, needs_calibration=True))
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with pytest.raises(ValueError, match="'zeros' learns from data"):
        quantize_(model, "zeros")
    batch = torch.ones(1, 4)
    quantize_(model, "zeros", calibration=[batch])
    assert seen == [(["0"], [batch])]
    assert not model(batch).any()
    with pytest.raises(ValueError, match="There is a method 'zeros' already"):
        register_method(Method("zeros", Scheme()))


def test_quantizing_inside_inference_mode_leaves_normal_tensors():
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.inference_mode():
        quantize_(model)
    assert not model[0].weight.is_inference()
    values = torch.randn(2, 4, requires_grad=True)
    model(values).sum().backward()
    assert values.grad is not None


def test_half_precision_weights_keep_their_dtype_outside():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    report = quantize_(model)
    assert model(torch.arange(3)).dtype == torch.bfloat16
    assert report.layers[1].bytes_before == 2 * (16 + 4)
