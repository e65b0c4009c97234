"""What autocast does to one call, by policy; the policies are those of ``ATen/autocast_mode.h``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_memprec.memory.autocast_lists import Policy, operators
from lightning_memprec.memory.interpose import Kernel

__all__ = ["CastKernels"]


class CastKernels:
    """Kernels that cast meta tensors as autocast would, and the cache of casts.

    They read dtype and cache switch from torch's own autocast state.

    Args:
        device_type: Device that meta tensors stand for.

    Attributes:
        table: Map from operator overload to kernel, for :meth:`Interposer.use`.
    """

    def __init__(self, device_type: Literal["cuda", "cpu"]) -> None:
        self._device_type = device_type
        # Casts of parameters, by the parameter's id; the weak reference tells a reused id.
        self._cache: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self.table = {func: self._make_kernel(func, policy) for func, policy in operators(device_type)}

    def clear_cache(self) -> None:
        """Drop the casts of parameters, as the end of the outermost context does."""
        self._cache.clear()

    def _make_kernel(self, func: OpOverload, policy: Policy) -> Kernel:
        if policy == "float32_output":
            return _make_float32_output(func)
        if policy == "promote":
            return self._make_promote(func)
        kernels: dict[Policy, Kernel] = {
            "lower_precision": self._lower_precision,
            "float32": self._float32,
            "float32_norm": _float32_norm,
            "banned": _banned,
            "cudnn_rnn": self._cudnn_rnn,
        }
        return kernels[policy]

    def _lower_precision(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        return func(*self._cast_all(args, torch.get_autocast_dtype(self._device_type)), **kwargs)

    def _float32(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kwargs = dict(zip(kwargs, self._cast_all(list(kwargs.values()), torch.float32), strict=True))
        return func(*self._cast_all(args, torch.float32), **kwargs)

    def _make_promote(self, func: OpOverload) -> Kernel:
        # An optional tensor (the bias of `bilinear`) follows the others.
        types = [str(argument.type) for argument in func._schema.arguments]
        positions = [i for i, name in enumerate(types) if name in ("Tensor", "List[Tensor]")]

        def kernel(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
            lower = torch.get_autocast_dtype(self._device_type)
            widest = lower
            for value in (args[i] for i in positions):
                for tensor in (value,) if isinstance(value, Tensor) else value:
                    if _is_eligible(tensor):
                        widest = _wider(widest, tensor.dtype, lower)
            return func(*self._cast_all(args, widest), **kwargs)

        return kernel

    def _cudnn_rnn(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Cast to float16, whatever the autocast dtype, without the cache (``ATen/cudnn/AutocastRNN.cpp``).

        There the cast weights are views of one new buffer; here each is its own storage, of the same bytes.
        """
        data, weights, stride, buffer, hidden, cell, *rest = args
        if _is_eligible(weights[0]):
            weights, buffer = [w.to(torch.float16) for w in weights], None
        data, hidden, cell = self._cast_all((data, hidden, cell), torch.float16)
        return func(data, weights, stride, buffer, hidden, cell, *rest, **kwargs)

    def _cast_all(self, args: Sequence[Any], dtype: torch.dtype) -> list[Any]:
        return [self._cast(a, dtype) if isinstance(a, (Tensor, list, tuple)) else a for a in args]

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor):
            return [self._cast(v, dtype) if isinstance(v, Tensor) else v for v in value]
        if value.dtype is dtype or not _is_eligible(value):
            return value
        if (
            torch.is_autocast_cache_enabled()
            and value.requires_grad
            and value.is_leaf
            and value.dtype is torch.float32
            and dtype is torch.get_autocast_dtype(self._device_type)
            and not value._is_view()
        ):
            return self._cached_cast(value, dtype)
        return value.to(dtype)

    def _cached_cast(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        entry = self._cache.get(id(parameter))
        if entry is not None and entry[0]() is parameter:
            return entry[1]
        cast = parameter.to(dtype)
        self._cache[id(parameter)] = (weakref.ref(parameter), cast)
        return cast


def _make_float32_output(func: OpOverload) -> Kernel:
    names = [argument.name for argument in func._schema.arguments]
    position = names.index("dtype")
    keyword_only = func._schema.arguments[position].kwarg_only

    def kernel(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype") if keyword_only or len(args) <= position else args[position]
        if given is None and _is_eligible(args[0]):
            kwargs["dtype"] = torch.float32
            args = args[:position]
        return func(*args, **kwargs)

    return kernel


def _float32_norm(func: OpOverload, data: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
    dtype = torch.float32 if _is_eligible(data) else data.dtype
    if dim is None:
        return torch.ops.aten.norm.ScalarOpt_dtype(data, p, dtype=dtype)
    return torch.ops.aten.norm.ScalarOpt_dim_dtype(data, p, dim, keepdim, dtype=dtype)


def _banned(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    if not any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
        return func(*args, **kwargs)
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast, and CUDA "
        "refuses them there. Use torch.nn.BCEWithLogitsLoss on the logits instead."
    )


def _is_eligible(tensor: Tensor) -> bool:
    """Tell whether autocast may cast: a floating tensor of the device, double precision excepted."""
    dtype = tensor.dtype
    return tensor.is_meta and dtype.is_floating_point and dtype is not torch.float64


def _wider(current: torch.dtype, other: torch.dtype, lower: torch.dtype) -> torch.dtype:
    if torch.float32 in (current, other):
        return torch.float32
    if other is not lower:
        # The sentence of torch's own check; the run would stop there too.
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return lower
