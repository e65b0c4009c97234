"""Copy a module onto ``meta``: same structure, no storage, the original untouched."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memprec._errors import TraceError

__all__ = ["meta_copy", "move_to_meta"]

# Attributes larger than this are shared with the original rather than copied: they are data, not state.
_MAX_COPIED_ARRAY_BYTES = 1024**2


def meta_copy(
    module: nn.Module, twin: Callable[[Tensor], Tensor], shared: tuple[object, ...] = ()
) -> nn.Module:
    """Deep-copy a module so that every tensor of the copy lies on ``meta``.

    Tied parameters stay tied. Datasets, loaders, large arrays and attributes that refuse to be copied (locks,
    open files) are shared, random generators are cloned. Functions that close over modules or tensors (a hook, a
    lambda that uses ``self``) are rebuilt around the copies.

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
            try:
                return copy.deepcopy(module, dict(memo))
            except Exception:
                memo.update(_uncopyable_attributes(module, memo))
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


def _uncopyable_attributes(module: nn.Module, memo: dict[int, Any]) -> dict[int, Any]:
    """Find locks, open files and the like; what holds modules or tensors must not be shared."""
    refused: dict[int, Any] = {}
    for value in (value for child in module.modules() for value in vars(child).values()):
        # An iterator is left to fail: the trace would use up what the run wants to read.
        is_iterator = isinstance(value, Iterator) and not isinstance(value, io.IOBase)
        parts = (value, *getattr(value, "__dict__", {}).values())
        if is_iterator or any(isinstance(part, (Tensor, nn.Module, dict, list, tuple)) for part in parts):
            continue
        try:
            copy.deepcopy(value, dict(memo))
        except Exception:
            refused[id(value)] = value
    return refused


def _copy_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Rebuild a function that closes over something that has a meta twin; share every other."""
    closure = function.__closure__ or ()
    if not any(_has_twin(cell) for cell in closure):
        return function
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(
        CellType(copy.deepcopy(cell.cell_contents, memo)) if _has_twin(cell) else cell for cell in closure
    ))  # fmt: skip
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    return copied


def _has_twin(cell: CellType) -> bool:
    try:
        value = cell.cell_contents
    except ValueError:  # Not filled yet.
        return False
    items = (
        value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    )
    return any(isinstance(item, (nn.Module, Tensor)) for item in items)


def _copy_tensor(tensor: Tensor, memo: dict[int, Any], twin: Callable[[Tensor], Tensor]) -> Tensor:
    known = memo.get(id(tensor))
    if known is not None:
        return known  # type: ignore[no-any-return]
    copied: Tensor
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        copied = type(tensor)(tensor.requires_grad, device="meta", dtype=tensor.data.dtype)  # type: ignore[call-arg]
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

    copiers = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    copy_function = copiers[FunctionType]
    classes = (Tensor, nn.Parameter, nn.parameter.UninitializedParameter)
    saved = [(cls, cls.__deepcopy__) for cls in classes]
    for cls in classes:
        cls.__deepcopy__ = deepcopy  # type: ignore[method-assign, assignment]
    copiers[FunctionType] = _copy_function
    try:
        yield
    finally:
        copiers[FunctionType] = copy_function
        for cls, original in saved:
            cls.__deepcopy__ = original  # type: ignore[method-assign]
