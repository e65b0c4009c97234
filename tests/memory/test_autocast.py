import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_memprec.memory.autocast import AutocastEmulation
from lightning_memprec.memory.autocast_lists import operators

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def meta(*shape, dtype=FP32, requires_grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def product(x):
    return (x @ x.T).dtype


class Casts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_lists_are_those_of_the_installed_torch(device):
    key = f"Autocast{device.upper()}"
    registered = {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }
    # Older versions register overloads for dimensions with names, which models do not use.
    registered = {name for name in registered if "dimname" not in name.lower() and ".names_" not in name}
    listed = {str(func).replace(".", "::", 1).removesuffix(".default") for func, _ in operators(device)}
    # The CUDA library registers the RNN; a CPU build lacks it.
    assert listed - {"aten::_cudnn_rnn"} == registered - {"aten::_cudnn_rnn"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_context_casts_to_its_dtype(device, dtype):
    with AutocastEmulation(device) as emulation:
        with emulation.context(dtype):
            assert product(meta(2, 3)) is dtype
        assert product(meta(2, 3)) is FP32


@pytest.mark.parametrize(
    ("emulated", "context", "expected"),
    [("cuda", "cuda", FP16), ("cuda", "meta", FP16), ("cuda", "cpu", FP32),
     ("cpu", "cpu", BF16), ("cpu", "meta", BF16)],
)  # fmt: skip
def test_a_context_counts_for_its_own_device_with_its_default_dtype(emulated, context, expected):
    with AutocastEmulation(emulated), torch.autocast(context):
        assert product(meta(2, 3)) is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA torch disables the context")
def test_a_cuda_context_in_a_cpu_trace_warns_as_in_a_cpu_run():
    with AutocastEmulation("cpu"), pytest.warns(UserWarning, match="CUDA is not available"):
        context = torch.autocast("cuda")
    with AutocastEmulation("cpu"), context:
        assert product(meta(2, 3)) is FP32


def test_nested_and_disabled_contexts():
    x = meta(2, 3)
    with AutocastEmulation("cuda"), torch.autocast("cuda", dtype=BF16):
        with torch.autocast(x.device.type, enabled=False):
            assert product(x) is FP32
            assert not torch.is_autocast_enabled()
            with torch.autocast("cuda", dtype=FP16):
                assert product(x) is FP16
            assert product(x) is FP32
        assert product(x) is BF16


def test_the_user_is_answered_rightly():
    with AutocastEmulation("cuda"):
        assert torch.amp.is_autocast_available("meta")
        assert not torch.is_autocast_enabled("meta")
        with torch.autocast("cuda", dtype=BF16, cache_enabled=False):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled("meta")
            assert not torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cuda") is torch.get_autocast_dtype("meta") is BF16
            assert not torch.is_autocast_cache_enabled()


def test_autocast_switched_by_hand():
    with AutocastEmulation("cuda"):
        torch.set_autocast_enabled("meta", True)
        torch.set_autocast_dtype("meta", BF16)
        assert product(meta(2, 3)) is BF16
        torch.set_autocast_enabled(False)
        assert product(meta(2, 3)) is FP32
        torch.set_autocast_enabled("cuda", True)
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cuda") is FP16


def test_decorated_functions():
    with AutocastEmulation("cuda"):
        assert torch.autocast("cuda", dtype=BF16)(product)(meta(2, 3)) is BF16


PATCHED = [
    (torch.autocast, "__init__"), (torch, "is_autocast_enabled"), (torch, "get_autocast_dtype"),
    (torch, "set_autocast_dtype"), (torch, "set_autocast_enabled"), (torch, "clear_autocast_cache"),
    (torch.amp, "is_autocast_available"), (torch.amp.autocast_mode, "_cast"),
]  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails):
    before = [getattr(owner, name) for owner, name in PATCHED]
    try:
        with AutocastEmulation("cuda"), torch.autocast("cuda", dtype=BF16):
            assert all(getattr(o, n) is not b for (o, n), b in zip(PATCHED, before, strict=True))
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert [getattr(owner, name) for owner, name in PATCHED] == before
    assert product(meta(2, 3)) is FP32
    assert not torch.is_autocast_enabled("cuda")


def test_an_emulation_can_be_entered_twice():
    emulation = AutocastEmulation("cuda")
    for _ in range(2):
        with emulation, emulation.context(BF16):
            assert product(meta(2, 3)) is BF16


def test_host_tensors_are_left_to_torch():
    host = torch.ones(2, 3)
    with AutocastEmulation("cuda"), torch.autocast("cuda", dtype=BF16):
        assert product(host) is FP32
        assert torch.equal(host @ host.T, torch.full((2, 2), 3.0))
        assert F.binary_cross_entropy(host, host) == 0.0
        with torch.autocast("cpu", dtype=BF16):
            assert product(host) is BF16


# -- the cache of casts -------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache_enabled", "casts"), [(True, 1), (False, 3)])
def test_parameters_are_cast_once_or_at_each_use(cache_enabled, casts):
    layer, x = nn.Linear(3, 3, bias=False, device="meta"), meta(2, 3, dtype=BF16)
    emulation = AutocastEmulation("cuda")
    with emulation, Casts() as counted, emulation.context(BF16, cache_enabled=cache_enabled):
        layer(layer(layer(x)))
    assert counted.count == casts


def test_only_leaf_parameters_that_learn_are_cached():
    frozen = nn.Linear(3, 3, bias=False, device="meta").requires_grad_(False)
    with AutocastEmulation("cuda"), torch.autocast("cuda", dtype=BF16), Casts() as counted:
        frozen(frozen(meta(2, 3, dtype=BF16)))
    assert counted.count == 2


def test_cached_casts_die_with_the_outermost_context():
    layer, x = nn.Linear(3, 3, bias=False, device="meta"), meta(2, 3, dtype=BF16)
    with AutocastEmulation("cuda"), Casts() as counted:
        with torch.autocast("cuda", dtype=BF16):
            with torch.autocast("cuda", dtype=BF16):
                layer(x)
            layer(x)
            assert counted.count == 1
        with torch.autocast("cuda", dtype=BF16):
            layer(x)
    assert counted.count == 2


# -- training -----------------------------------------------------------------------------------------


def test_gradients_have_the_dtype_of_their_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to("meta")
    with AutocastEmulation("cuda") as emulation:
        with emulation.context(BF16, cache_enabled=False):
            out = model(meta(5, 3))
            loss = F.cross_entropy(out, torch.empty(5, dtype=torch.long, device="meta"))
        loss.backward()
    assert out.dtype is BF16
    assert loss.dtype is FP32
    assert {p.grad.dtype for p in model.parameters()} == {FP32}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_blocks_are_recomputed_under_autocast(use_reentrant):
    seen = []

    def block(x):
        seen.append(product(x))
        return x @ x.T

    x = meta(2, 2, requires_grad=True)
    with AutocastEmulation("cuda"):
        with torch.autocast("cuda", dtype=BF16):
            out = checkpoint(block, x, use_reentrant=use_reentrant, preserve_rng_state=False)
        out.sum().backward()
    assert seen == [BF16, BF16]
    assert x.grad.dtype is FP32


def test_custom_functions_cast_their_inputs():
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=FP32)
        def forward(ctx, x):
            seen.append((x.dtype, product(x)))
            return x.clone()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            return grad

    x = meta(2, 2, dtype=BF16, requires_grad=True)
    with AutocastEmulation("cuda"), torch.autocast("cuda", dtype=BF16):
        Function.apply(x).sum().backward()
    assert seen == [(FP32, FP32)]


def test_banned_operators_raise_on_cuda_and_run_on_cpu():
    x = meta(3)
    with (
        AutocastEmulation("cuda"),
        torch.autocast("cuda"),
        pytest.raises(RuntimeError, match="BCEWithLogits"),
    ):
        F.binary_cross_entropy(x, x)
    with AutocastEmulation("cpu"), torch.autocast("cpu"):
        assert F.binary_cross_entropy(meta(3, dtype=BF16), meta(3, dtype=BF16)).dtype is FP32


def test_other_half_precision_cannot_be_promoted():
    autocast, x, y = AutocastEmulation("cuda"), meta(3, dtype=FP16), meta(3, dtype=BF16)
    with (
        autocast,
        autocast.context(BF16),
        pytest.raises(RuntimeError, match="Unexpected floating ScalarType"),
    ):
        torch.dot(x, y)


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_the_precision_plugin_of_lightning_enters_it(name):
    precision = pytest.importorskip(f"{name}.plugins.precision")
    plugin = precision.MixedPrecision("bf16-mixed", "cuda")
    layer = nn.Linear(3, 3, bias=False, device="meta")
    with AutocastEmulation("cuda"), plugin.forward_context(), Casts() as counted:
        assert layer(layer(meta(2, 3, dtype=BF16))).dtype is BF16
    assert counted.count == 2  # Lightning switches the cache off.


def test_the_helper_of_transformers_leaves_autocast_on_meta_too():
    generic = pytest.importorskip("transformers.utils.generic")
    maybe_autocast, code = generic.maybe_autocast, generic.maybe_autocast.__code__
    autocast = AutocastEmulation("cuda")
    with autocast, autocast.context(BF16), maybe_autocast(device_type="meta", enabled=False):
        assert product(meta(2, 3)) is FP32
    assert maybe_autocast.__code__ is code
