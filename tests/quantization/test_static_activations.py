"""Static activations: scales from calibration data, in linear and convolutional layers, files and other tools."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_memprec.quantization import kernels
from lightning_memprec.quantization.checkpoint import load_quantized, save_quantized
from lightning_memprec.quantization.checkpoint_layout import QuantizedFileError
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.kernels import explain
from lightning_memprec.quantization.methods import Method, Solution, register_method
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.modules.linear import Int8Linear

from . import digits

MAPPINGS = {"symmetric": (-127, 127), "affine": (-128, 127), "affine_textbook": (-128, 127)}


def by_the_book(values, data, mapping):
    """Round values to 8 bits in float64, with the range that data spans."""
    low, high = MAPPINGS[mapping]
    smallest, largest = data.double().min(), data.double().max()
    if mapping == "affine":
        smallest = smallest.clamp(max=0)
    scale, zero = (largest - smallest) / 255, 0
    if mapping == "symmetric":
        scale = data.double().abs().max() / 127
    else:
        zero = low - torch.round(smallest / scale)
    integers = (torch.round(values.double() / scale) + zero).clamp(low, high)
    return (integers - zero) * scale


NETS = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), (4, 9)),
    "conv2d, reflect": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (3, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (3, 5, 5)),
}


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("kind", NETS)
def test_inputs_are_rounded_with_the_range_of_the_calibration_data(kind, mapping):
    torch.manual_seed(0)
    build, shape = NETS[kind]
    net = nn.Sequential(build())
    # All positive, so that the textbook's range leaves zero out.
    batches = [torch.rand(5, *shape) + 0.5 for _ in range(3)]
    quantize_(net, "vectorwise", activations="static", mapping=mapping, calibration=batches)
    values = torch.rand(7, *shape) * 3  # Some beyond the range.
    plain = build()
    plain.weight.data, plain.bias.data = net[0].dequantize(), net[0].bias.data
    expected = plain.double()(by_the_book(values, torch.cat(batches), mapping))
    # FP32 scales and sums; an input at the border of two integers may go to the other, 1/255 of the range.
    torch.testing.assert_close(net(values).double(), expected, rtol=1e-4, atol=1e-4)


def test_the_range_covers_all_uses_of_a_layer():
    layer = nn.Linear(2, 2)
    net = nn.Sequential(layer, nn.Hardtanh(-9, 9), layer)
    with torch.no_grad():
        layer.weight.copy_(3 * torch.eye(2))
        layer.bias.zero_()
    quantize_(net, "vectorwise", activations="static", calibration=[torch.ones(1, 2)])
    assert net[0] is net[2]
    assert net[0].input_scale.item() == pytest.approx(3 / 127, rel=1e-6)


@pytest.mark.parametrize("kernel", kernels.KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_use_the_stored_scale(kernel, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "KERNELS", (kernel,))
    scheme = Scheme(activations="static")
    layer = Int8Linear(scheme.quantize(torch.randn(24, 64)), None, scheme, torch.float32)
    layer.set_inputs(torch.tensor([0.02]), None)
    values = torch.randn(5, 64) * 2
    rounded = (values / 0.02).round().clamp(-127, 127) * 0.02
    torch.testing.assert_close(layer(values), rounded @ layer.dequantize().t(), rtol=1e-4, atol=1e-4)
    # One row alone gives what it gives among others: nothing is measured.
    torch.testing.assert_close(layer(values[:1]), layer(values)[:1], rtol=1e-6, atol=1e-6)


def test_fbgemm_says_that_it_measures():
    scheme = Scheme(activations="static")
    layer = Int8Linear(scheme.quantize(torch.randn(8, 64)), None, scheme, torch.float32)
    assert kernels.Fbgemm().fits(layer) == "it measures the scale of activations anew"
    assert explain(layer)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_compiled_and_eager_agree():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8))
    quantize_(net, "absmax", activations="static", calibration=[torch.randn(20, 16)])
    values = torch.randn(4, 16) * 2
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(values), net(values), rtol=1e-4, atol=1e-5)


def test_gradients_pass_straight_through():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4))
    quantize_(net, "vectorwise", activations="static", calibration=[torch.randn(20, 6)])
    values = torch.randn(3, 6, requires_grad=True)
    net(values).sum().backward()
    torch.testing.assert_close(values.grad, net[0].dequantize().sum(0).expand(3, 6))


def test_outlier_features_do_not_count_for_the_range():
    torch.manual_seed(0)
    data = torch.randn(50, 8).clamp(-3, 3)
    data[:, 5] = 0
    data[::10, 5] = 100.0
    net = nn.Sequential(nn.Linear(8, 4))
    exact = copy.deepcopy(net)
    report = quantize_(net, "llm_int8", activations="static", calibration=[data], exact_outliers=False)
    assert net[0].input_scale.item() == pytest.approx(data[:, :5].abs().max().item() / 127, rel=1e-2)
    assert report.layers[0].outlier_columns == 1
    clipped = nn.Sequential(copy.deepcopy(exact[0]))
    quantize_(clipped, "vectorwise", activations="static", calibration=[data])
    with torch.no_grad():
        errors = [(model(data) - exact(data)).norm() for model in (net, clipped)]
    assert errors[0] < errors[1] / 5


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt", ""], ids=["file", "checkpoint", "folder"])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_files_hold_the_scales(tmp_path, suffix, mapping):
    net = digits.trained("conv")
    quantize_(net, "vectorwise", activations="static", mapping=mapping, calibration=digits.calibration(100))
    save_quantized(net, tmp_path / f"net{suffix}")
    again = load_quantized(tmp_path / f"net{suffix}", digits.build("conv"))
    images = digits.images()[2][:20]
    with torch.no_grad():
        assert torch.equal(net(images), again(images))
    for name, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert {name for name in again.state_dict() if name.startswith("0.input")} == (
        {"0.input_scale"} if mapping == "symmetric" else {"0.input_scale", "0.input_zero_point"}
    )


def test_a_file_with_a_wrong_scale_is_refused(tmp_path):
    net = nn.Sequential(nn.Linear(4, 3))
    quantize_(net, "vectorwise", activations="static", calibration=[torch.ones(1, 4)])
    net[0].input_scale = torch.ones(3)
    save_quantized(net, tmp_path / "net.safetensors")
    with pytest.raises(QuantizedFileError, match=r"'0\.input_scale' as torch\.float32"):
        load_quantized(tmp_path / "net.safetensors", nn.Sequential(nn.Linear(4, 3)))


def test_scales_stay_in_fp32_and_copies_have_their_own():
    net = nn.Sequential(nn.Linear(4, 3))
    quantize_(net, "vectorwise", activations="static", calibration=[torch.rand(3, 4)])
    twin = copy.deepcopy(net).to(torch.bfloat16)
    assert twin[0].input_scale.dtype == torch.float32
    assert torch.equal(twin[0].input_scale, net[0].input_scale)
    assert twin[0].input_scale is not net[0].input_scale
    assert twin(torch.rand(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_without_data_it_says_what_is_missing():
    net = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"Static activations need data\. Give batches with `calibration`"):
        quantize_(net, "absmax", activations="static")
    assert type(net[0]) is nn.Linear
    with pytest.raises(ValueError, match="There are no calibration batches"):
        quantize_(net, "absmax", activations="static", calibration=[])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_batches_that_are_not_finite_are_refused(bad):
    net = nn.Sequential(nn.Linear(4, 3))
    batches = [torch.ones(2, 4), torch.full((2, 4), bad)]
    with pytest.raises(ValueError, match="Calibration batch 1 gives `0` an input with NaN or infinite"):
        quantize_(net, "absmax", activations="static", calibration=batches)
    assert type(net[0]) is nn.Linear


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values, second=False):
        return self.unused(values) if second else self.used(values)


def test_layers_that_no_data_reached_measure_and_are_named(tmp_path):
    net = TwoBranches()
    report = quantize_(net, "vectorwise", activations="static", calibration=[torch.rand(3, 4)])
    rows = {row.name: row for row in report.layers}
    assert rows["used"].note is None
    assert "static" in rows["used"].scheme
    assert (
        rows["unused"].note == "no calibration data reached it, so its inputs' scale is measured at run time"
    )
    assert "A8 tensor" in rows["unused"].scheme
    save_quantized(net, tmp_path / "net.safetensors")
    again = load_quantized(tmp_path / "net.safetensors", TwoBranches())
    values = torch.rand(2, 4)
    assert torch.equal(again(values, second=True), net(values, second=True))


def test_embeddings_and_attention_stay_weight_only():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.attention = nn.Embedding(7, 8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, ids):
            values = self.table(ids)
            return self.head(self.attention(values, values, values)[0])

    net = Net()
    report = quantize_(net, "vectorwise", activations="static", calibration=[torch.randint(7, (2, 5))])
    assert {row.name: "A8 static" in row.scheme for row in report.layers} == {
        "table": False, "attention": False, "head": True,
    }  # fmt: skip
    assert [name for name in net.state_dict() if "input_scale" in name] == ["head.input_scale"]


def test_a_solver_can_hand_in_scales_and_biases(monkeypatch):
    from lightning_memprec.quantization import methods

    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    seen = []

    def solve(model, targets, batches, forward):
        seen.extend(target.inputs for target in targets)
        solution = Solution(
            {t.name: {"weight": t.scheme.quantize(t.weights["weight"]())} for t in targets}, {}
        )
        solution.inputs["0"] = (torch.tensor([0.5]), None)
        solution.biases["0"] = torch.tensor([7.0, 8.0])
        return solution

    register_method(Method("given", Scheme(activations="static"), solve, needs_calibration=True))
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    bias = net[0].bias
    quantize_(net, "given", calibration=[torch.full((1, 3), 254.0)])
    assert seen[0][0].item() == pytest.approx(2.0, rel=1e-6)
    assert net[0].input_scale.item() == 0.5
    assert torch.equal(net[0].bias, torch.tensor([7.0, 8.0]))
    assert net[0].bias.requires_grad
    assert not torch.equal(bias, net[0].bias)  # The float layer's is left alone.


@pytest.mark.parametrize("method", ["gptq", "layer_wise"])
def test_methods_that_learn_take_static_activations(method):
    exact = digits.trained("mlp")
    net = copy.deepcopy(exact)
    report = quantize_(net, method, activations="static", calibration=digits.calibration(200))
    assert all("A8 static" in row.scheme and row.output_error < 0.05 for row in report.quantized)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mapping", ["symmetric", "affine"])
def test_transformers_opens_the_folder(tmp_path, mapping):
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    from .test_foreign_readers import TOKENS, difference, llama

    model = llama()
    reference = copy.deepcopy(model)
    quantize_(
        model,
        "vectorwise",
        activations="static",
        mapping=mapping,
        exclude=["lm_head", "Embedding"],
        calibration=[TOKENS],
    )
    save_quantized(model, tmp_path / "int8")
    stored = load_file(tmp_path / "int8" / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.input_scale"].shape == (1,)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8", dtype=torch.float32).eval()
    assert 0 < difference(opened, reference) < 0.05
    # Both round the same way, but FP32 sums differ, and an input near the border of two integers may take the other.
    assert difference(opened, model) < 0.01
    assert torch.equal(load_quantized(tmp_path / "int8", llama(seed=1))(TOKENS).logits, model(TOKENS).logits)
