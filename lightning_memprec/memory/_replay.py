"""Run an operator's meta kernel once for each kind of input, and repeat its result from memory.

A meta kernel's output layout follows from its input layouts and its other arguments alone, and many meta kernels
are slow Python. The layers of a network repeat, so most calls have been seen before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["MetaKernelCache"]

_PLAIN = (Tensor, torch.nn.Parameter)
_MISSING = object()
# (size, stride, dtype) of each output; a single tensor or a tuple of them.
_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class _Uncacheable(Exception):
    pass


class MetaKernelCache:
    """Output layouts of operators that only allocate, or only write in place, by input layouts."""

    def __init__(self) -> None:
        self._layouts: dict[Any, Any] = {}

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_place: bool) -> Any:
        """Return what ``func(*args, **kwargs)`` returns on meta tensors.

        Args:
            func: Operator that either returns fresh storages and writes nothing, or writes its first argument
                and returns it.
            args: Positional arguments.
            kwargs: Keyword arguments.
            in_place: Which of the two it is.
        """
        try:
            key = (func, *[_key(a) for a in args], *[(k, _key(v)) for k, v in kwargs.items()])
            layouts = self._layouts.get(key, _MISSING)
        except (_Uncacheable, TypeError):
            return func(*args, **kwargs)
        if layouts is _MISSING:
            out = func(*args, **kwargs)
            self._layouts[key] = None if in_place else _layouts(out, args)
            return out
        if in_place:
            return args[0] if func._schema.returns else None
        if layouts is None:
            return func(*args, **kwargs)
        if isinstance(layouts, list):
            return tuple(None if layout is None else _empty(layout) for layout in layouts)
        return _empty(layouts)


def _empty(layout: _Layout) -> Tensor:
    return torch.empty_strided(layout[0], layout[1], dtype=layout[2], device="meta")


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        if type(value) not in _PLAIN or value.layout is not torch.strided or value.is_complex():
            raise _Uncacheable
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_key(item) for item in value])
    # 1, 1.0 and True are equal, but promote differently.
    return type(value), value


def _layouts(out: Any, args: tuple[Any, ...]) -> Any:
    """Describe an operator's output, or return ``None`` if it is not made of fresh plain tensors."""
    inputs = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}

    def fresh(tensor: Any) -> bool:
        return bool(
            type(tensor) is Tensor
            and tensor.is_meta
            and tensor.layout is torch.strided
            and not tensor.is_complex()
            and tensor.storage_offset() == 0
            and tensor.untyped_storage()._cdata not in inputs
            and _spans_storage(tensor)
        )

    if isinstance(out, tuple):
        if all(item is None or fresh(item) for item in out):
            storages = [t.untyped_storage()._cdata for t in out if t is not None]
            if len(set(storages)) == len(storages):
                return [None if t is None else (t.shape, t.stride(), t.dtype) for t in out]
        return None
    return (out.shape, out.stride(), out.dtype) if fresh(out) else None


def _spans_storage(tensor: Tensor) -> bool:
    """Tell whether an empty tensor of this size and stride would have a storage of the same length."""
    if tensor.numel() == 0:
        return tensor.untyped_storage().nbytes() == 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.untyped_storage().nbytes() == (last + 1) * tensor.element_size())
