"""The emulation against genuine autocast, operator by operator.

AutocastCUDA runs without a GPU on `cuda` fake tensors, forward only, on a CUDA build of torch. On a CPU build
a `cuda` fake tensor that requires grad ends the process, so the CUDA half is skipped there. AutocastCPU runs
for real, on small CPU tensors.
"""

import warnings
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memprec.memory.autocast import AutocastEmulation
from lightning_memprec.memory.autocast_lists import operators
from lightning_memprec.memory.cuda_semantics import cuda_kernels
from lightning_memprec.memory.interpose import Interposer

from .autocast_cases import CASES, Inputs

aten = torch.ops.aten
needs_cuda_build = [
    pytest.mark.cuda_build,
    pytest.mark.skipif(
        not torch.backends.cuda.is_built(), reason="a `cuda` fake tensor that requires grad ends a CPU build"
    ),
]
LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
INPUTS = {"float32": (0,), "lower": (1,), "mixed": (0, 1)}

# The oracle has no device to ask for properties and takes the math path of attention; what follows from that
# choice is compared apart, in test_cuda_semantics.
KERNELS = {f: k for f, k in cuda_kernels().items() if f is not aten.scaled_dot_product_attention.default}
CUDA_WAY = Interposer("AutocastIPU")
# Fake `cuda` tensors take cuDNN's batch norm, which saves what the native one saves.
SAME = {"cudnn_batch_norm": "native_batch_norm"}
# Allocations and aliases without arithmetic, which fake and meta tensors spell differently.
UNCOUNTED = ("empty", "empty_like", "detach", "lift_fresh")
# Composite on meta but not on the real device, or not runnable without one: only the casts are compared.
CASTS_ONLY = {
    "cuda": {"gru_cell", "rms_norm"},
    "cpu": {
        "scaled_dot_product_attention",
        "_native_multi_head_attention",
        "mkldnn_rnn_layer",
        "ctc_loss.IntList",
        # Torch 2.11 checks the quantile only on real tensors, and its grid sampler fails on meta.
        "quantile",
        "quantile.scalar",
        "nanquantile",
        "nanquantile.scalar",
        "_grid_sampler_2d_cpu_fallback",
    },
}
# Operators that ask for a device at once.
NOT_RUNNABLE = {"_thnn_fused_gru_cell", "cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}


class Stream(TorchDispatchMode):
    """Names of the operators below autograd, with the dtypes that go in and come out."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.namespace == "aten" and name not in UNCOUNTED:
            self.calls.append((SAME.get(name, name), dtypes((args, kwargs)), dtypes(out)))
        return out


def dtypes(tree):
    # cuDNN's batch norm returns a reserve of bytes, empty unless its input is channels-last.
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return tuple(tensor.dtype for tensor in tensors if tensor.dtype is not torch.uint8)


@contextmanager
def genuine(device):
    if device == "cpu":
        yield
        return
    with (
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


@contextmanager
def emulated(device):
    CUDA_WAY.use(KERNELS)
    with AutocastEmulation(device), CUDA_WAY.active() if device == "cuda" else nullcontext():
        yield


def run(prepare, device, lower, *, emulate):
    """Return the stream of a step under autocast, the dtypes that it returns, and its kind of error."""
    out, error = (), None
    with (emulated if emulate else genuine)(device), Stream() as stream:
        step = prepare("meta" if emulate else device)
        stream.calls.clear()
        try:
            with torch.autocast(device, dtype=lower), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = dtypes(step())
        except (RuntimeError, NotImplementedError) as caught:
            error = type(caught)
    return stream.calls, out, error


def compare(prepare, device, lower):
    expected, expected_out, expected_error = run(prepare, device, lower, emulate=False)
    calls, out, error = run(prepare, device, lower, emulate=True)
    if error is NotImplementedError and expected_error is not NotImplementedError:
        assert calls == expected[: len(calls)]
        pytest.skip("no meta kernel: compared up to that operator")
    assert error == expected_error
    assert calls == expected
    assert out == expected_out


def name_of(func):
    name = func._schema.name.removeprefix("aten::")
    return f"{name}.{func._schema.overload_name}" if func._schema.overload_name else name


# -- operators --------------------------------------------------------------------------------------------


def leading_casts(calls):
    names = [name for name, *_ in calls]
    first = next((i for i, name in enumerate(names) if name not in ("full", "_to_copy")), len(names))
    return calls[:first]


def parameters():
    for device in ("cuda", "cpu"):
        for func, _ in operators(device):
            marks = needs_cuda_build if device == "cuda" else ()
            yield pytest.param(device, func, id=f"{device}-{name_of(func)}", marks=marks)


@pytest.mark.parametrize("lower", LOWER.values(), ids=LOWER)
@pytest.mark.parametrize(("device", "func"), list(parameters()))
def test_operator_casts_as_genuine_autocast(device, func, lower):
    name = name_of(func)
    if name in NOT_RUNNABLE:
        pytest.skip("asks for a device")
    for pattern in INPUTS.values():

        def prepare(place, pattern=pattern):
            inputs = Inputs(place, [(torch.float32, lower)[i] for i in pattern])
            return lambda: CASES[name](func, inputs)

        if name not in CASTS_ONLY[device]:
            compare(prepare, device, lower)
            continue
        expected = leading_casts(run(prepare, device, lower, emulate=False)[0])
        calls = leading_casts(run(prepare, device, lower, emulate=True)[0])
        assert calls[: len(expected)] == expected != []


# -- modules ----------------------------------------------------------------------------------------------


class Step(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def labels(x, count):
    return torch.zeros(count, dtype=torch.long, device=x.device)


def resnet_block(device):
    from torchvision.models.resnet import BasicBlock

    with torch.device(device):
        return BasicBlock(8, 8)


def language_model(kind):
    def build(device):
        import transformers

        size = {
            "vocab_size": 32,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": False,
            "attn_implementation": "eager",
        }
        configs = {
            "llama": lambda: transformers.LlamaConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, **size,
            ),
            "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, **size),
        }  # fmt: skip
        config = configs[kind]()
        config.loss_type = "ForCausalLM"
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config)

        def step(x):
            # A mask of four dimensions is taken as it is: no values are asked for.
            mask = torch.zeros(2, 1, 8, 8, device=x.device)
            ids = labels(x, (2, 8))
            return model(input_ids=ids, attention_mask=mask, labels=ids).loss

        return Step(step)

    return build


MODULES = {
    "linear": (lambda: nn.Linear(8, 4), (2, 8)),
    "linear_3d": (lambda: nn.Linear(8, 4), (2, 3, 8)),
    "linear_twice": (lambda: nn.Sequential(*[nn.Linear(8, 8)] * 2), (2, 8)),
    "conv1d": (lambda: nn.Conv1d(4, 8, 3), (2, 4, 10)),
    "conv2d": (lambda: nn.Conv2d(4, 8, 3, padding="same"), (2, 4, 10, 10)),
    "conv3d": (lambda: nn.Conv3d(4, 8, 3), (2, 4, 5, 5, 5)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 8, 3), (2, 4, 10, 10)),
    "layer_norm": (lambda: nn.LayerNorm(8), (2, 3, 8)),
    "group_norm": (lambda: nn.GroupNorm(2, 8), (2, 8, 4, 4)),
    "batch_norm": (lambda: nn.BatchNorm2d(8), (2, 8, 4, 4)),
    "instance_norm": (lambda: nn.InstanceNorm2d(8), (2, 8, 4, 4)),
    "local_response_norm": (lambda: nn.LocalResponseNorm(2), (2, 8, 4, 4)),
    "conv_norm_pool": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        ),
        (2, 4, 10, 10),
    ),
    "attention": (lambda: nn.MultiheadAttention(8, 2), (2, 3, 8), (2, 3, 8), (2, 3, 8)),
    "encoder_layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), (2, 3, 8)),
    "dropout": (lambda: nn.Dropout(0.1), (2, 8)),
    "lstm_cell": (lambda: nn.LSTMCell(8, 4), (2, 8)),
    "rnn_cell": (lambda: nn.RNNCell(8, 4), (2, 8)),
    "bilinear": (lambda: nn.Bilinear(8, 4, 3), (2, 8), (2, 4)),
    "gelu": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softmax(-1)), (2, 8)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), (2, 8)),
    "upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 4, 4)),
    "embedding": (lambda: Step(lambda x: F.embedding(labels(x, 3), x)), (5, 8)),
    "cross_entropy": (lambda: Step(lambda x: F.cross_entropy(x @ x.T, labels(x, 4))), (4, 8)),
    "mse": (lambda: Step(lambda x: F.mse_loss(x @ x.T, x @ x.T)), (4, 8)),
    "bce_with_logits": (lambda: Step(lambda x: F.binary_cross_entropy_with_logits(x @ x.T, x @ x.T)), (4, 8)),
    "cat_mixed": (lambda: Step(lambda x: torch.cat([x, x @ x.T])), (4, 4)),
    "stack_mixed": (lambda: Step(lambda x: torch.stack([x, x @ x.T])), (4, 4)),
    "pow_sum_norm": (lambda: Step(lambda x: (x @ x.T).pow(2).sum().sqrt() + (x @ x.T).norm(dim=1)), (4, 4)),
    "cumulative": (lambda: Step(lambda x: (x @ x.T).cumsum(0) + (x @ x.T).cumprod(0)), (4, 4)),
    "in_place": (lambda: Step(lambda x: (x @ x.T).add_(x).exp_()), (4, 4)),
    "double": (lambda: Step(lambda x: x.double() @ x.double().T), (4, 4)),
    "nested": (lambda: Step(nested_contexts), (4, 4)),
}


def nested_contexts(x):
    half = x @ x
    with torch.autocast(x.device.type, enabled=False):
        full = half.float() @ x
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            other = x @ x
    return half, full, other, x @ full


@pytest.mark.parametrize("lower", LOWER.values(), ids=LOWER)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda_build), "cpu"])
def test_module_runs_the_operators_of_genuine_autocast(device, name, lower):
    build, *shapes = MODULES[name]

    def prepare(place):
        with torch.device(place):
            module = build()
            inputs = [torch.ones(shape) for shape in shapes]
        return lambda: module(*inputs)

    compare(prepare, device, lower)


@pytest.mark.parametrize("lower", LOWER.values(), ids=LOWER)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda_build), "cpu"])
def test_language_model_runs_the_operators_of_genuine_autocast(device, kind, lower):
    pytest.importorskip("transformers")

    def prepare(place):
        model, x = language_model(kind)(place), torch.ones(1, device=place)
        return lambda: model(x)

    compare(prepare, device, lower)


@pytest.mark.parametrize("lower", LOWER.values(), ids=LOWER)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda_build), "cpu"])
def test_residual_block_runs_the_operators_of_genuine_autocast(device, lower):
    pytest.importorskip("torchvision")

    def prepare(place):
        block, x = resnet_block(place), torch.ones(2, 8, 8, 8, device=place)
        return lambda: block(x)

    compare(prepare, device, lower)
