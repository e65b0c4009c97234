"""Outlier features: the decomposition of LLM.int8(), and its statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memprec.quantization import kernels
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.outliers import OutlierStatistics


class Block(nn.Module):
    """A pre-norm residual block, as in a transformer."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, values):
        return values + self.down(nn.functional.gelu(self.up(self.norm(values))))


def inject_outliers(model, columns, factor):
    """Scale features up in each norm and down in the layer that it feeds: the same function, with outliers inside."""
    with torch.no_grad():
        for block in model:
            block.norm.weight[columns] *= factor
            block.norm.bias[columns] *= factor
            block.up.weight[:, columns] /= factor


def relative(output, exact):
    output, exact = output.detach(), exact.detach()
    return float((output - exact).norm() / exact.norm())


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(*[Block(64) for _ in range(4)]).eval()


@pytest.fixture(params=["chosen kernel", "portable kernel"])
def _kernel(request, monkeypatch):
    if request.param == "portable kernel":
        monkeypatch.setattr(kernels, "KERNELS", ())


@pytest.mark.usefixtures("_kernel")
def test_absmax_collapses_under_outliers_and_llm_int8_does_not(model):
    values = torch.randn(32, 64)
    exact = model(values)
    update = exact - values  # What the blocks add; the residual itself is never quantized.
    clean = copy.deepcopy(model)
    quantize_(clean, "vectorwise")
    usual = relative(clean(values) - values, update)
    inject_outliers(model, [3, 17, 40], 60.0)
    torch.testing.assert_close(model(values), exact, rtol=1e-4, atol=1e-4)
    errors = {}
    for name, (method, settings) in {
        "absmax": ("absmax", {}),
        "vectorwise": ("vectorwise", {}),
        "llm_int8": ("llm_int8", {}),
        "exact columns": ("llm_int8", {"calibration": [torch.randn(32, 64)]}),
    }.items():
        rounded = copy.deepcopy(model)
        quantize_(rounded, method, **settings)
        errors[name] = relative(rounded(values) - values, update)
    # Outliers cost nothing with exact columns; with int8 ones the weights made small by the injection lose digits.
    assert errors["exact columns"] < 1.1 * usual
    assert errors["llm_int8"] < 5 * usual
    assert errors["vectorwise"] > 3 * errors["llm_int8"]
    assert errors["vectorwise"] > 10 * errors["exact columns"]
    assert errors["absmax"] > 20 * errors["exact columns"]


@pytest.mark.usefixtures("_kernel")
def test_outlier_columns_are_multiplied_in_floating_point():
    torch.manual_seed(0)
    model, values = nn.Sequential(nn.Linear(16, 8)), torch.rand(5, 16)
    values[2, 4] = 1e4
    values[1, 7] = -6.0  # Exactly at the threshold.
    quantize_(model, "llm_int8")
    weight = model[0].dequantize()
    # By the book: two products, one of integers without columns 4 and 7, one of floats with them alone.
    regular = values.clone()
    regular[:, [4, 7]] = 0
    scale = regular.abs().amax(1, keepdim=True) / 127
    expected = (regular / scale).round() * scale @ weight.t() + values[:, [4, 7]] @ weight[:, [4, 7]].t()
    torch.testing.assert_close(model(values), expected + model[0].bias, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("_kernel")
def test_kept_columns_are_exact_even_without_outliers_in_the_batch():
    torch.manual_seed(0)
    model, values = nn.Sequential(nn.Linear(16, 8)), torch.rand(5, 16)
    weight, bias, batch = model[0].weight.detach().clone(), model[0].bias, torch.rand(3, 16)
    batch[:, [2, 9]] = 7
    quantize_(model, "llm_int8", calibration=[batch], exact_outliers=True)
    assert model[0].outlier_indices.tolist() == [2, 9]
    torch.testing.assert_close(model[0].dequantize()[:, [2, 9]], weight[:, [2, 9]], rtol=0, atol=0)
    values[0, 11] = 8
    regular, columns = values.clone(), [2, 9, 11]
    regular[:, columns] = 0
    scale = regular.abs().amax(1, keepdim=True) / 127
    rounded = model[0].dequantize()
    expected = (regular / scale).round() * scale @ rounded.t() + values[:, columns] @ rounded[:, columns].t()
    torch.testing.assert_close(model(values), expected + bias, rtol=1e-5, atol=1e-5)
    twin = nn.Sequential(nn.Linear(16, 8))
    quantize_(twin, "llm_int8")
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(values), model(values))
    assert torch.equal(copy.deepcopy(model)(values), model(values))


@pytest.mark.parametrize(
    "arguments", [{"method": "vectorwise", "calibration": [1]}, {"method": "llm_int8"}], ids=str
)
def test_exact_columns_need_a_threshold_and_batches(arguments):
    with pytest.raises(ValueError, match="`exact_outliers` needs an outlier threshold, and batches"):
        quantize_(nn.Sequential(nn.Linear(2, 2)), exact_outliers=True, **arguments)


@pytest.mark.parametrize(
    ("settings", "columns"),
    [({}, [2, 9]), ({"exact_outliers": True}, [2, 9]), ({"exact_outliers": False}, None)],
    ids=["default", "on", "off"],
)
def test_exact_columns_are_kept_where_there_are_batches(settings, columns):
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(16, 8)), torch.rand(3, 16)
    batch[:, [2, 9]] = 7
    report = quantize_(model, "llm_int8", calibration=[batch], **settings)
    kept = model[0].outlier_indices
    assert (None if kept is None else kept.tolist()) == columns
    assert report.layers[0].outlier_columns == 2
    added = 0 if columns is None else 2 * (8 + 4 * 8)  # int64 indices and FP32 columns.
    assert report.layers[0].bytes_after == 16 * 8 + 4 * 8 + 4 * 8 + added


@pytest.mark.parametrize(("count", "kept"), [(11, True), (12, False)])
def test_columns_that_would_not_save_memory_are_not_kept(count, kept):
    # 16 columns of 4 bytes take 64 for each channel; int8 takes 16, and 12 columns in FP32 the other 48.
    model, batch = nn.Sequential(nn.Linear(16, 8)), torch.rand(3, 16)
    batch[:, :count] = 7
    exact = model(batch)
    quantize_(model, "llm_int8", calibration=[batch])
    assert (model[0].outlier_indices is not None) == kept
    assert relative(model(batch), exact) < 0.01


def test_without_outliers_it_is_vector_wise():
    torch.manual_seed(0)
    values = torch.rand(5, 16)
    pair = []
    for method in ("llm_int8", "vectorwise"):
        torch.manual_seed(1)
        layer = nn.Sequential(nn.Linear(16, 8))
        quantize_(layer, method)
        pair.append(layer(values))
    assert torch.equal(*pair)


def test_report_names_the_columns(model):
    inject_outliers(model, [3, 17], 60.0)
    report = quantize_(model, "llm_int8", calibration=[torch.randn(20, 64), torch.randn(7, 64)])
    rows = {row.name: row.outlier_columns for row in report.layers}
    assert [rows[f"{block}.up"] for block in range(4)] == [2, 2, 2, 2]
    assert [rows[f"{block}.down"] for block in range(4)] == [0, 0, 0, 0]
    assert report.outliers["share_of_layers"] == 0.5
    assert report.outliers["share_of_features"] == pytest.approx(4 * 2 / (4 * 64 + 4 * 128))
    assert report.outliers["systematic_features"] == {64: [3, 17]}


def test_statistics_against_a_loop():
    torch.manual_seed(0)
    statistics, batches = OutlierStatistics(2.0), [torch.randn(3, 4, 9), torch.randn(5, 9), torch.randn(9)]
    for batch in batches:
        statistics.update("layer", batch)
    rows = [row for batch in batches for row in batch.reshape(-1, 9).tolist()]
    hit = [[abs(value) >= 2.0 for value in row] for row in rows]
    assert statistics.columns("layer") == [c for c in range(9) if any(row[c] for row in hit)]
    assert statistics.to_dict()["share_of_tokens"] == pytest.approx(sum(map(any, hit)) / len(rows))
    assert statistics.count("another") is None


def test_systematic_features_need_a_quarter_of_the_layers_and_six_percent_of_the_tokens():
    statistics = OutlierStatistics(6.0)
    for layer in range(8):
        values = torch.zeros(100, 4)
        values[: 6 if layer < 2 else 0, 0] = 7  # 2 of 8 layers, 6 % of the tokens: counts.
        values[:5, 1] = 7  # All layers, 5 % of the tokens.
        values[:, 2] = 7 if layer < 1 else 0  # 1 of 8 layers.
        statistics.update(str(layer), values)
    assert statistics.systematic() == {4: [0]}
