import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_memprec.memory.cuda_attention import AttentionCall, choose_backend
from lightning_memprec.memory.cuda_rnn import reserve_numel
from lightning_memprec.memory.cuda_semantics import cuda_kernels, cuda_optimizer_defaults
from lightning_memprec.memory.interpose import Interposer
from lightning_memprec.memory.trace import Recorder

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
AMPERE, CONSUMER, HOPPER, TURING = (8, 0), (8, 6), (9, 0), (7, 5)
CUDA_WAY = Interposer("AutocastIPU")


def meta(*shape, dtype=FP32, requires_grad=True):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


@pytest.fixture
def on_cuda():
    CUDA_WAY.use(cuda_kernels(AMPERE))
    with CUDA_WAY.active():
        yield


def saved_bytes(function, *inputs):
    """Return a function's result and the bytes that autograd keeps for its backward pass, inputs aside."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*inputs)
    for tensor in inputs:
        kept.pop(tensor.untyped_storage()._cdata, None)
    return out, sum(storage.nbytes() for storage in kept.values())


# -- which attention kernel ---------------------------------------------------------------------------


def call(*, dtype=BF16, size=64, heads=4, kv_heads=None, length=32, kv_length=None, **options):
    query = meta(2, heads, length, size, dtype=dtype)
    shape = (2, kv_heads or heads, kv_length or length)
    value_size = options.pop("value_size", size)
    return AttentionCall(
        query, meta(*shape, size, dtype=dtype), meta(*shape, value_size, dtype=dtype), **options
    )


def mask(*shape, dtype=BF16, requires_grad=False):
    return meta(*shape, dtype=dtype, requires_grad=requires_grad)


@pytest.mark.parametrize(
    ("arguments", "capability", "expected"),
    [
        pytest.param({}, AMPERE, "flash", id="bf16"),
        pytest.param({"dtype": FP16}, AMPERE, "flash", id="fp16"),
        pytest.param({"dtype": FP32}, AMPERE, "efficient", id="fp32"),
        pytest.param({"dtype": FP64}, AMPERE, "math", id="fp64"),
        pytest.param({"size": 30}, AMPERE, "flash", id="head-size-padded"),
        pytest.param({"size": 257}, AMPERE, "math", id="head-size-odd-and-large"),
        pytest.param({"size": 264}, AMPERE, "efficient", id="head-size-large"),
        pytest.param({"size": 30, "dtype": FP32}, AMPERE, "math", id="fp32-head-size-unaligned"),
        pytest.param({"value_size": 128}, AMPERE, "efficient", id="value-size-differs"),
        pytest.param({"mask": mask(32, 32)}, AMPERE, "efficient", id="mask"),
        pytest.param({"mask": mask(32, 32), "size": 30}, AMPERE, "math", id="mask-head-size-unaligned"),
        pytest.param({"is_causal": True}, AMPERE, "flash", id="causal"),
        pytest.param({"is_causal": True, "kv_length": 64}, AMPERE, "efficient", id="causal-not-square"),
        pytest.param({"dropout": 0.1}, AMPERE, "flash", id="dropout"),
        pytest.param({"kv_heads": 2, "enable_gqa": True}, AMPERE, "flash", id="grouped-heads"),
        pytest.param({"kv_heads": 2}, AMPERE, "math", id="heads-differ"),
        pytest.param({"kv_heads": 1}, AMPERE, "flash", id="one-key-head"),
        pytest.param({"size": 256}, AMPERE, "flash", id="a100-head-size-256"),
        pytest.param({"size": 256}, CONSUMER, "flash", id="rtx-head-size-256"),
        pytest.param({"size": 256, "dropout": 0.1}, CONSUMER, "efficient", id="rtx-head-size-256-dropout"),
        pytest.param({"size": 200}, CONSUMER, "efficient", id="rtx-head-size-200"),
        pytest.param({}, TURING, "math", id="turing-bf16"),
        pytest.param({"dtype": FP16}, TURING, "efficient", id="turing-fp16"),
        pytest.param({}, HOPPER, "cudnn", id="hopper"),
        pytest.param({"mask": mask(32, 32)}, HOPPER, "cudnn", id="hopper-mask"),
        pytest.param(
            {"mask": mask(32, 32, requires_grad=True)}, HOPPER, "efficient", id="hopper-mask-learns"
        ),
        pytest.param({"dropout": 0.1}, HOPPER, "flash", id="hopper-dropout-not-in-sixteenths"),
        pytest.param({"dropout": 0.125}, HOPPER, "cudnn", id="hopper-dropout-in-sixteenths"),
        pytest.param({"dtype": FP32}, HOPPER, "efficient", id="hopper-fp32"),
        pytest.param({"size": 30}, HOPPER, "flash", id="hopper-head-size-unaligned"),
    ],
)
def test_attention_kernel_follows_the_rules_of_cuda(arguments, capability, expected):
    assert choose_backend(call(**arguments), capability) == expected


def test_three_dimensions_and_strided_rows_take_the_math_path():
    query = meta(2, 32, 64, dtype=BF16)
    assert choose_backend(AttentionCall(query, query, query), AMPERE) == "math"
    query = meta(2, 4, 64, 32, dtype=BF16).transpose(2, 3)
    assert choose_backend(AttentionCall(query, query, query), AMPERE) == "math"


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ([SDPBackend.MATH], "math"),
        ([SDPBackend.EFFICIENT_ATTENTION], "efficient"),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], "flash"),
        ([SDPBackend.CUDNN_ATTENTION], "cudnn"),
    ],
)
def test_sdpa_kernel_context_is_obeyed(backends, expected):
    with sdpa_kernel(backends):
        assert choose_backend(call(), AMPERE) == expected


def test_order_set_by_the_user_is_obeyed():
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose_backend(call(), HOPPER) == "efficient"


def test_no_enabled_kernel_is_an_error_that_says_what_to_do():
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="Enable the math kernel"):
        choose_backend(call(dtype=FP32), AMPERE)


# -- what attention keeps -----------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "size"), [(100, 64), (128, 128)])
def test_flash_keeps_output_log_sum_exp_and_rng_words(on_cuda, length, size):
    inputs = [meta(2, 4, length, size, dtype=BF16) for _ in range(3)]
    out, kept = saved_bytes(F.scaled_dot_product_attention, *inputs)
    assert out.shape == inputs[0].shape
    assert kept == 2 * 4 * length * (2 * size + 4) + 3 * 8
    out.sum().backward()
    assert inputs[0].grad.dtype is BF16


def test_flash_pads_heads_to_eight(on_cuda):
    inputs = [meta(2, 4, 32, 30, dtype=BF16) for _ in range(3)]
    out, kept = saved_bytes(F.scaled_dot_product_attention, *inputs)
    padded = 2 * 4 * 32 * 32 * 2  # bytes of query, key, value and output, each padded
    assert kept == 4 * padded + 2 * 4 * 32 * 4 + 3 * 8
    assert out.shape[-1] == 30


@pytest.mark.parametrize("length", [96, 100])
def test_efficient_rounds_the_log_sum_exp_to_32_rows(on_cuda, length):
    inputs = [meta(2, 4, length, 64) for _ in range(3)]
    _, kept = saved_bytes(F.scaled_dot_product_attention, *inputs)
    assert kept == 2 * 4 * (length * 64 * 4 + math.ceil(length / 32) * 32 * 4) + 2 * 8


@pytest.mark.parametrize("kind", [torch.bool, BF16])
@pytest.mark.parametrize(("length", "row"), [(128, 128), (100, 112)])
def test_masks_are_kept_in_the_query_dtype_with_aligned_rows(on_cuda, kind, length, row):
    inputs = [meta(2, 4, length, 64, dtype=BF16) for _ in range(3)]
    attention_mask = mask(2, 1, length, length, dtype=kind)
    _, kept = saved_bytes(lambda *x: F.scaled_dot_product_attention(*x, attention_mask), *inputs)
    output, log_sum_exp = 2 * 4 * length * 64 * 2, 2 * 4 * math.ceil(length / 32) * 32 * 4
    assert kept == output + log_sum_exp + 2 * 8 + 2 * length * row * 2


def test_grouped_heads_keep_small_keys(on_cuda):
    query, key = meta(2, 8, 32, 64, dtype=BF16), meta(2, 2, 32, 64, dtype=BF16)
    out = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    out.sum().backward()
    assert out.shape == query.shape
    assert key.grad.shape == key.shape


def test_math_path_keeps_scores(on_cuda):
    inputs = [meta(2, 4, 32, 8, dtype=FP64) for _ in range(3)]
    _, kept = saved_bytes(F.scaled_dot_product_attention, *inputs)
    assert kept >= 2 * 4 * 32 * 32 * 8


def test_dropout_of_the_math_path_keeps_a_byte_mask(on_cuda):
    inputs = [meta(2, 4, 32, 8, dtype=FP64) for _ in range(3)]
    out, _ = saved_bytes(lambda *x: F.scaled_dot_product_attention(*x, dropout_p=0.5), *inputs)
    names = set()
    nodes = [out.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    assert "NativeDropoutBackward0" in names


def test_empty_batches_run(on_cuda):
    query = meta(0, 4, 32, 64, dtype=BF16)
    assert F.scaled_dot_product_attention(query, query, query).shape == query.shape


# -- other operators ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_dropout_keeps_one_byte_an_element(on_cuda, dtype):
    _, kept = saved_bytes(F.dropout, meta(10, 10, dtype=dtype))
    assert kept == 100


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_idle_dropout_keeps_nothing(on_cuda, p, training):
    _, kept = saved_bytes(lambda x: F.dropout(x, p, training), meta(10, 10))
    assert kept == 0


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
@pytest.mark.parametrize(("dtype", "births"), [(FP16, 1), (BF16, 2)])
def test_softmax_of_fp16_needs_no_float32_copy(on_cuda, function, dtype, births):
    with Recorder() as recorder:
        function(meta(4, 8, dtype=dtype, requires_grad=False), -1, dtype=FP32)
    assert len(recorder.events.storages) == 1 + births


@pytest.mark.parametrize("with_weight", [True, False])
def test_rms_norm_keeps_one_statistic_a_row(on_cuda, with_weight):
    x, weight = meta(4, 6, 8, dtype=BF16), meta(8, dtype=BF16)
    inputs = (x, weight) if with_weight else (x,)
    out, kept = saved_bytes(lambda x, weight=None: F.rms_norm(x, (8,), weight), *inputs)
    assert out.dtype is BF16
    assert kept == 4 * 6 * 4
    out.sum().backward()
    assert [t.grad.shape for t in inputs] == [t.shape for t in inputs]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_rms_norm_of_mixed_dtypes_stays_composite(on_cuda):
    _, kept = saved_bytes(lambda x, w: F.rms_norm(x, (8,), w), meta(4, 8, dtype=BF16), meta(8))
    assert kept > 4 * 4


def test_lstm_cell_keeps_its_gates(on_cuda):
    cell = nn.LSTMCell(8, 4, device="meta")
    (hidden, _), kept = saved_bytes(lambda x, h, c: cell(x, (h, c)), meta(2, 8), meta(2, 4), meta(2, 4))
    hidden.sum().backward()
    weights = sum(p.numel() for p in cell.parameters())
    # Gates from input and from state, the activated gates, the new cell; and the weights, which live anyway.
    assert kept == 4 * (3 * 2 * 16 + 2 * 4 + weights)


def test_host_tensors_are_computed_as_ever(on_cuda):
    torch.manual_seed(0)
    x = torch.randn(2, 2, 4, 8)
    inside = F.scaled_dot_product_attention(x, x, x), F.rms_norm(x, (8,)), F.softmax(x, -1, dtype=FP32)
    lstm = nn.LSTM(8, 4)
    outputs, _ = lstm(x[0])
    with CUDA_WAY.active(enabled=False):
        outside = F.scaled_dot_product_attention(x, x, x), F.rms_norm(x, (8,)), F.softmax(x, -1, dtype=FP32)
        torch.testing.assert_close(outputs, lstm(x[0])[0])
    torch.testing.assert_close(inside, outside)
    assert set(F.dropout(torch.ones(100), 0.5).tolist()) == {0.0, 2.0}


# -- recurrent layers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "measured_bytes"), [(2, 736_000_000), (3, 864_000_000)], ids=["lstm", "gru"]
)
def test_reserve_equals_what_cudnn_reported(mode, measured_bytes):
    # github.com/pytorch/pytorch/issues/2895: float32, 4 layers of 320 units, one number of steps x batch.
    assert 4 * reserve_numel(mode, 25_000, 320, num_layers=4, directions=1) == measured_bytes


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("layer", "kept_a_unit"), [(nn.LSTM, 5), (nn.GRU, 6), (nn.RNN, 1)])
def test_recurrent_layers_keep_output_and_reserve(on_cuda, layer, kept_a_unit, bidirectional, batch_first):
    module = layer(8, 16, 2, batch_first=batch_first, bidirectional=bidirectional, device="meta")
    x = meta(5, 3, 8)
    (out, _), kept = saved_bytes(module, x)
    directions = 2 if bidirectional else 1
    assert out.shape == (5, 3, 16 * directions)
    output = 5 * 3 * 16 * directions
    reserve = output * (2 * kept_a_unit + 1)
    # Initial states, and the weights, which live anyway.
    states = 2 * directions * (3 if not batch_first else 5) * 16 * (2 if layer is nn.LSTM else 1)
    weights = sum(p.numel() for p in module.parameters())
    assert kept == 4 * (output + reserve + states + weights)
    out.sum().backward()
    assert [p.grad.shape for p in module.parameters()] == [p.shape for p in module.parameters()]
    assert x.grad.shape == x.shape


def test_projected_lstm_and_packed_sequences(on_cuda):
    module = nn.LSTM(8, 16, proj_size=4, device="meta")
    out, (hidden, cell) = module(meta(5, 3, 8))
    assert (out.shape, hidden.shape, cell.shape) == ((5, 3, 4), (1, 3, 4), (1, 3, 16))
    packed = nn.utils.rnn.PackedSequence(meta(9, 8), torch.tensor([3, 3, 2, 1]))
    out, (hidden, _) = nn.LSTM(8, 16, device="meta")(packed)
    assert out.data.shape == (9, 16)
    assert hidden.shape == (1, 3, 16)
    out.data.sum().backward()


def test_recurrent_layers_run_step_by_step_without_cudnn(on_cuda):
    with torch.backends.cudnn.flags(enabled=False):
        out, _ = nn.GRU(8, 16, device="meta")(meta(5, 3, 8))
    assert "CudnnRnn" not in out.grad_fn.name()


# -- optimizers ---------------------------------------------------------------------------------------

PARAMETERS, NUMEL = 5, 8000


def optimizer_peak(make):
    """Run two steps; return the peak of the second above what lived before it, in units of the parameters."""
    with cuda_optimizer_defaults(), Recorder() as recorder:
        parameters = [nn.Parameter(torch.empty(NUMEL // 8, 8, device="meta")) for _ in range(PARAMETERS)]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = make(parameters)
        optimizer.step()
        start = len(recorder.events.order)
        optimizer.step()
    sizes = [s.size_bytes for s in recorder.events.storages]
    live = sum(sizes[k] if k >= 0 else -sizes[~k] for k in recorder.events.order[:start])
    peak = now = live
    for k in recorder.events.order[start:]:
        now += sizes[k] if k >= 0 else -sizes[~k]
        peak = max(peak, now)
    return (peak - live) / (PARAMETERS * NUMEL * 4)


@pytest.mark.parametrize(
    ("name", "options", "copies"),
    [
        # Foreach temporaries as torch documents them: "~ sizeof(params)" for most, more for a few.
        ("SGD", {}, 0), ("SGD", {"weight_decay": 0.1}, 1), ("Adam", {}, 1), ("AdamW", {}, 1),
        ("ASGD", {}, 1), ("NAdam", {"weight_decay": 0.1}, 2), ("Adagrad", {}, 2),
        ("Adadelta", {"weight_decay": 0.1}, 3), ("RAdam", {}, 1), ("RMSprop", {}, 1), ("Adamax", {}, 1),
    ],
)  # fmt: skip
def test_foreach_temporaries_are_those_of_cuda(name, options, copies):
    peak = optimizer_peak(lambda parameters: getattr(torch.optim, name)(parameters, lr=0.1, **options))
    assert peak == pytest.approx(copies, abs=1e-3)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_fused_optimizers_need_no_temporaries(name):
    assert optimizer_peak(lambda p: getattr(torch.optim, name)(p, lr=0.1, fused=True)) < 1e-3


@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"capturable": True}], ids=["for-loop", "capturable"]
)
def test_other_implementations_run(options):
    peak = optimizer_peak(lambda parameters: torch.optim.Adam(parameters, lr=0.1, **options))
    assert 0 < peak <= 1.001


@pytest.mark.parametrize("name", ["Rprop", "Muon"])
def test_optimizers_without_documented_temporaries_run(name):
    optimizer_peak(lambda parameters: getattr(torch.optim, name)(parameters, lr=0.1))


def test_gradient_clipping_takes_one_norm_a_tensor():
    with cuda_optimizer_defaults(), Recorder() as recorder:
        parameters = [nn.Parameter(torch.empty(100, device="meta")) for _ in range(3)]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        nn.utils.clip_grad_norm_(parameters, 1.0)
    temporary = [s.size_bytes for s in recorder.events.storages if s.death >= 0 and s.size_bytes < 400]
    assert temporary.count(4) >= 3
    assert max(temporary) == 3 * 4  # their stack


def test_optimizer_defaults_are_put_back():
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match="user"), cuda_optimizer_defaults():
        raise ValueError("user")
    from torch.optim.optimizer import _default_to_fused_or_foreach

    assert _default_to_fused_or_foreach([parameter], differentiable=False) == (False, False)
