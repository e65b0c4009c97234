"""Int8 layers beside the float layers with the same (dequantized) weights."""

from __future__ import annotations

import copy
import io
import pickle
import shutil

import pytest
import torch
from torch import nn

from lightning_memprec.quantization.convert import quantize_

# Once for each process, by the float layer as well.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

SCHEMES = {
    "channel": {},
    "tensor": {"weight_granularity": "tensor"},
    "group with tail": {"group_size": 5},
    "affine": {"mapping": "affine"},
    "textbook group": {"mapping": "affine_textbook", "group_size": 5},
    "4 bits": {"bits": 4},
}


def ids_for(*shape, high=11):
    return torch.randint(0, high, shape)


CASES = {
    "linear": (lambda: nn.Linear(12, 7), lambda: torch.randn(5, 12)),
    "linear, no bias": (lambda: nn.Linear(12, 7, bias=False), lambda: torch.randn(5, 12)),
    "linear, 1-D": (lambda: nn.Linear(12, 7), lambda: torch.randn(12)),
    "linear, 3-D": (lambda: nn.Linear(12, 7), lambda: torch.randn(2, 3, 12)),
    "linear, 0 rows": (lambda: nn.Linear(12, 7), lambda: torch.randn(2, 0, 12)),
    "linear, 1 feature": (lambda: nn.Linear(1, 7), lambda: torch.randn(2, 1)),
    "linear, 1 channel": (lambda: nn.Linear(12, 1), lambda: torch.randn(2, 12)),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3, padding="same", dilation=2), lambda: torch.randn(2, 6, 9)),
    "conv2d": (lambda: nn.Conv2d(6, 4, (3, 1), stride=2, padding=1), lambda: torch.randn(2, 6, 9, 8)),
    "conv2d, unbatched": (lambda: nn.Conv2d(6, 4, 3), lambda: torch.randn(6, 9, 8)),
    "conv2d, circular": (
        lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"),
        lambda: torch.randn(2, 6, 9, 8),
    ),
    "conv2d, grouped": (lambda: nn.Conv2d(6, 4, 3, groups=2, bias=False), lambda: torch.randn(2, 6, 9, 8)),
    "conv2d, depth-wise": (lambda: nn.Conv2d(6, 12, 3, groups=6), lambda: torch.randn(2, 6, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), lambda: torch.randn(2, 2, 3, 4, 5)),
    "transposed 1d": (
        lambda: nn.ConvTranspose1d(6, 4, 3, stride=2, output_padding=1),
        lambda: torch.randn(2, 6, 5),
    ),
    "transposed 2d, grouped": (
        lambda: nn.ConvTranspose2d(6, 4, 3, groups=2, padding=1),
        lambda: torch.randn(2, 6, 5, 4),
    ),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 4, 2), lambda: torch.randn(2, 2, 3, 4, 5)),
    "embedding": (lambda: nn.Embedding(11, 12, padding_idx=0), lambda: ids_for(2, 3)),
    "embedding, 1 index": (lambda: nn.Embedding(11, 12), lambda: torch.tensor(3)),
    "embedding, no index": (lambda: nn.Embedding(11, 12), lambda: ids_for(2, 0)),
    "LSTM": (lambda: nn.LSTM(12, 8, 2, bidirectional=True), lambda: torch.randn(5, 2, 12)),
    "LSTM, projected": (lambda: nn.LSTM(12, 8, proj_size=3), lambda: torch.randn(5, 2, 12)),
    "GRU": (lambda: nn.GRU(12, 8, batch_first=True), lambda: torch.randn(2, 5, 12)),
    "RNN": (lambda: nn.RNN(12, 8, bias=False), lambda: torch.randn(5, 12)),
    "GRU cell": (lambda: nn.GRUCell(12, 8), lambda: torch.randn(5, 12)),
    "packed LSTM": (
        lambda: nn.LSTM(12, 8, batch_first=True),
        lambda: nn.utils.rnn.pack_padded_sequence(torch.randn(2, 5, 12), [5, 3], batch_first=True),
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    layer, values = CASES[request.param]
    return nn.Sequential(layer()).eval(), values()


def rounded_twin(model):
    """Round every matrix of a float model by the plainest loop: one output channel at a time, symmetric."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for module in twin.modules():
            transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
            for name, weight in module._parameters.items():
                if weight is None or weight.dim() < 2 or name in ("bias_k", "bias_v"):
                    continue
                if transposed:
                    inputs, outputs = weight.shape[0] // module.groups, weight.shape[1]
                    channels = [
                        weight[g * inputs : (g + 1) * inputs, o]
                        for g in range(module.groups)
                        for o in range(outputs)
                    ]
                else:
                    channels = list(weight)
                for channel in channels:
                    step = channel.abs().max() / 127
                    channel.copy_((channel / step).round() * step if step else channel)
    return twin


def leaves(output):
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, nn.utils.rnn.PackedSequence):
        return [output.data]
    return [leaf for item in output for leaf in leaves(item)]


def assert_same(output, expected, **tolerance):
    pairs = list(zip(leaves(output), leaves(expected), strict=True))
    assert pairs
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))


def test_weight_only_is_the_float_layer_with_rounded_weights(case):
    model, values = case
    expected = rounded_twin(model)(values)
    report = quantize_(model)
    assert len(report.quantized) == 1
    assert_same(model(values), expected)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_every_scheme_of_every_layer_is_near_the_float_layer(case, scheme):
    model, values = case
    exact = leaves(model(values))
    quantize_(model, **scheme)
    # Half a step is 1/254 of the largest weight at 8 bits, 1/14 at 4; where an output is small by cancellation (the
    # layer with one channel) its relative error is several times that.
    bound = 0.3 if scheme.get("bits") == 4 else 0.02
    for got, wanted in zip(leaves(model(values)), exact, strict=True):
        assert (got - wanted).norm() <= bound * wanted.norm()


@pytest.mark.parametrize("method", ["absmax", "zeropoint", "vectorwise", "llm_int8"])
def test_every_method_of_every_layer_is_near_the_float_layer(case, method):
    model, values = case
    exact = leaves(model(values))
    quantize_(model, method)
    for got, wanted in zip(leaves(model(values)), exact, strict=True):
        assert (got - wanted).norm() <= 0.03 * wanted.norm()


def test_state_is_plain_int8_and_fp32_and_loads_safely(case):
    model, values = case
    twin = copy.deepcopy(model)
    quantize_(model)
    expected = model(values)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert any(tensor.dtype == torch.int8 for tensor in state.values())
    assert all(tensor.dtype in (torch.int8, torch.float32) for tensor in state.values())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    quantize_(twin)
    twin(values)  # Whatever a kernel packs must be packed anew after loading.
    twin.load_state_dict(state)
    assert_same(twin(values), expected, rtol=0, atol=0)


def test_copies_compute_the_same(case):
    model, values = case
    quantize_(model, "vectorwise")
    expected = model(values)
    assert_same(copy.deepcopy(model)(values), expected, rtol=0, atol=0)
    assert_same(pickle.loads(pickle.dumps(model))(values), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_casts_keep_scales_in_fp32(case, dtype):
    model, values = case
    quantize_(model)
    state = copy.deepcopy(model.state_dict())
    expected = leaves(model(values))
    model.to(dtype)
    for name, tensor in model.state_dict().items():
        if name.endswith("_scale"):
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, state[name])
    if isinstance(values, torch.Tensor):
        output = leaves(model(values.to(dtype) if values.is_floating_point() else values))
        assert all(got.dtype == dtype for got in output)
        assert_same([o.float() for o in output], expected, rtol=0.05, atol=0.05)  # bfloat16 has 8 digits.


def test_gradients_reach_the_input(case):
    model, values = case
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        pytest.skip("nothing to differentiate")
    twin = rounded_twin(model)
    quantize_(model)
    gradients = []
    for net in (model, twin):
        point = values.clone().requires_grad_()
        sum(leaf.square().sum() for leaf in leaves(net(point))).backward()
        gradients.append(point.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["absmax", "zeropoint", "vectorwise", "llm_int8"])
def test_gradients_pass_straight_through_rounded_activations(method):
    torch.manual_seed(0)
    model, values = nn.Sequential(nn.Linear(12, 7)), torch.randn(5, 12, requires_grad=True)
    quantize_(model, method)
    output = model(values)
    output.sum().backward()
    expected = model[0].dequantize().sum(0).expand(5, 12)
    torch.testing.assert_close(values.grad, expected, rtol=1e-4, atol=1e-5)
    assert model[0].bias.grad is not None


def test_float16_outputs_do_not_overflow_on_the_way():
    model = nn.Sequential(nn.Linear(512, 4, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    quantize_(model, "vectorwise")
    values = torch.ones(2, 512, dtype=torch.float16)
    # The sum of products of integers is 512 * 127 * 127, far beyond float16's 65504.
    assert torch.equal(model(values), torch.full((2, 4), 512.0, dtype=torch.float16))


def test_autocast_decides_the_output():
    model, values = nn.Sequential(nn.Linear(8, 4), nn.Conv1d(1, 1, 1)), torch.randn(2, 1, 8)
    quantize_(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(values).dtype == torch.bfloat16


def test_an_integer_input_is_refused():
    model = nn.Sequential(nn.Linear(8, 4))
    quantize_(model)
    with pytest.raises(TypeError, match=r"needs a floating-point input, got torch\.int8"):
        model(torch.randn(2, 8).to(model[0].weight.dtype))


@pytest.mark.parametrize("method", ["weight_only", "zeropoint", "vectorwise", "llm_int8"])
def test_a_nan_in_the_input_stays_visible(method):
    model, values = nn.Sequential(nn.Linear(8, 4)), torch.randn(3, 8)
    quantize_(model, method)
    values[1, 2] = float("nan")
    assert model(values)[1].isnan().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # The compiler's own.
@pytest.mark.parametrize(
    ("tokens", "gradients"), [(1, False), (6, False), (6, True)], ids=["one token", "inference", "gradients"]
)
@pytest.mark.parametrize("method", ["weight_only", "zeropoint", "vectorwise", "llm_int8"])
def test_compiles_in_one_graph(method, tokens, gradients):
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    quantize_(model, method)
    # "aot_eager" traces as inductor does, without the time that a C++ compiler takes.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    values = torch.randn(tokens, 8)
    results = []
    for net in (compiled, model):
        point = values.clone().requires_grad_(gradients)
        with torch.set_grad_enabled(gradients):
            output = net(point)
        if gradients:
            output.square().sum().backward()
        results.append((output.detach(), point.grad))
    (output, gradient), (expected, expected_gradient) = results
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)
    if gradients:
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # The compiler's own.
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_fused_code_computes_the_same():
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU())
    quantize_(model, "vectorwise")
    compiled = torch.compile(model, fullgraph=True)
    for shape in ((1, 1, 8), (2, 3, 8)):  # A single token is where inductor's strides mislead `_int_mm`.
        values = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(compiled(values), model(values), rtol=1e-4, atol=1e-5)


def test_attention_reads_rounded_weights():
    torch.manual_seed(0)
    for settings in (
        {},
        {"kdim": 6, "vdim": 10},
        {"add_bias_kv": True},
        {"batch_first": True, "bias": False},
    ):
        model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, **settings)}).eval()
        query = torch.randn(4, 3, 8)
        key, value = torch.randn(4, 3, settings.get("kdim", 8)), torch.randn(4, 3, settings.get("vdim", 8))
        expected = rounded_twin(model).attention(query, key, value)
        report = quantize_(model)
        assert [row.name for row in report.layers] == ["attention"]
        assert_same(model.attention(query, key, value), expected)
        assert model.attention.num_heads == 2
        assert model.attention.out_proj.weight.dtype == torch.int8


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("exclude", [None, ["*.self_attn"], ["*.linear1"]], ids=str)
@pytest.mark.parametrize("masked", [True, False])
def test_transformer_encoder_leaves_its_fast_path(masked, exclude):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    values = torch.randn(2, 5, 8)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = masked
    with torch.no_grad():
        exact = model(values, src_key_padding_mask=mask)
        quantize_(model, exclude=exclude)
        rounded = model(values, src_key_padding_mask=mask)
    assert (rounded - exact)[~mask].norm() < 0.02 * exact[~mask].norm()


def test_dropout_of_a_whole_module_follows_its_mode():
    model = nn.ModuleDict({"rnn": nn.LSTM(8, 8, 2, dropout=0.9)})
    quantize_(model)
    values = torch.randn(5, 2, 8)
    assert not torch.equal(model.rnn(values)[0], model.rnn(values)[0])
    model.eval()
    assert torch.equal(model.rnn(values)[0], model.rnn(values)[0])
