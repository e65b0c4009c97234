"""Copy a module onto ``meta``: same structure, no storage, the original untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memprec._errors import TraceError

__all__ = ["meta_copy", "move_to_meta"]

# Attributes larger than this are shared with the original rather than copied: they are data, not state.
_MAX_COPIED_ARRAY_BYTES = 1024**2


def meta_copy(module: nn.Module, twin: Callable[[Tensor], Tensor], shared: tuple[object, ...] = ()) -> nn.Module:
    """Deep-copy a module so that every tensor of the copy lies on ``meta``.

    Tied parameters stay tied. Datasets, loaders and large arrays are shared, random generators are cloned.

    Args:
        module: Module to copy.
        twin: Callable that returns the meta twin of a plain tensor or buffer.
        shared: Further objects to share instead of copying.

    Returns:
        The copy.

    Raises:
        TraceError: If some attribute refuses to be copied.
    """
    memo: dict[int, Any] = {id(item): item for item in shared}
    memo.update(_shared_attributes(module))
    with _tensors_copied_by(twin):
        try:
            return copy.deepcopy(module, memo)
        except Exception as error:
            raise TraceError(
                f"The module `{type(module).__name__}` cannot be copied ({type(error).__name__}: {error}). "
                "Pass a zero-argument callable that builds it, or keep the attribute that refuses outside the module."
            ) from error


def move_to_meta(module: nn.Module, twin: Callable[[Tensor], Tensor]) -> None:
    """Replace real parameters and buffers of a module in place, keeping ties, hooks and classes."""
    memo: dict[int, Any] = {}
    for child in module.modules():
        for store in (child._parameters, child._buffers):
            for name, tensor in store.items():
                if tensor is not None and not tensor.is_meta:
                    store[name] = _copy_tensor(tensor, memo, twin)


def _shared_attributes(module: nn.Module) -> dict[int, Any]:
    shared: dict[int, Any] = {}
    data = (torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler)
    for child in module.modules():
        for value in vars(child).values():
            if isinstance(value, torch.Generator):
                shared[id(value)] = value.clone_state()
            elif isinstance(value, data) or getattr(value, "nbytes", 0) > _MAX_COPIED_ARRAY_BYTES:
                if not isinstance(value, (Tensor, nn.Module)):
                    shared[id(value)] = value
    return shared


def _copy_tensor(tensor: Tensor, memo: dict[int, Any], twin: Callable[[Tensor], Tensor]) -> Tensor:
    known = memo.get(id(tensor))
    if known is not None:
        return known  # type: ignore[no-any-return]
    copied: Tensor
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        copied = type(tensor)(requires_grad=tensor.requires_grad, device="meta")  # type: ignore[call-arg]
    elif isinstance(tensor, nn.Parameter):
        data = torch.empty_like(tensor.detach().as_subclass(Tensor), device="meta")  # type: ignore[arg-type]
        copied = nn.Parameter(data, requires_grad=tensor.requires_grad)
        vars(copied).update(vars(tensor))
    else:
        copied = twin(tensor.detach().as_subclass(Tensor)).requires_grad_(tensor.requires_grad)  # type: ignore[arg-type]
    memo[id(tensor)] = copied
    return copied


@contextmanager
def _tensors_copied_by(twin: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make ``copy.deepcopy`` turn every tensor it meets into its meta twin.

    A memo alone would do for parameters and buffers, but tensors also hide in containers and plain objects, and
    tensors inside a graph refuse to be deep-copied at all.
    """

    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
        return _copy_tensor(self, memo, twin)

    saved = Tensor.__deepcopy__, nn.Parameter.__deepcopy__
    Tensor.__deepcopy__ = nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.__deepcopy__, nn.Parameter.__deepcopy__ = saved  # type: ignore[method-assign]
