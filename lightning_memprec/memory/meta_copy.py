"""Copy a module onto ``meta``: same structure, no storage, the original untouched."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memprec._errors import TraceError

__all__ = ["meta_copy", "move_to_meta"]

# Arrays larger than this are shared with the original rather than copied: they are data, not state.
_MAX_COPIED_ARRAY_BYTES = 1024**2


def meta_copy(
    module: nn.Module, twin: Callable[[Tensor], Tensor], shared: tuple[object, ...] = ()
) -> nn.Module:
    """Deep-copy a module so that every tensor of the copy lies on ``meta``.

    Tied parameters stay tied. Datasets, loaders, large arrays (read-only then) and attributes that refuse to be
    copied (locks, open files) are shared, random generators are cloned. Functions that close over modules or
    tensors (a hook, a lambda that uses ``self``) are rebuilt around the copies.

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
    with _copied_by(twin):
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
                    store[name] = _copy_tensor(tensor, memo, twin)  # type: ignore[assignment]


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
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):  # type: ignore[attr-defined]
        copied = type(tensor)(tensor.requires_grad, device="meta", dtype=tensor.data.dtype)  # type: ignore[call-arg]
    elif isinstance(tensor, nn.Parameter):
        data = torch.empty_like(tensor.detach().as_subclass(Tensor), device="meta")  # type: ignore[arg-type]
        if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
            # Modules ask for the classes of quantized weights.
            copied = Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
        else:
            copied = nn.Parameter(data, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = copied
        key = _storage_key(tensor)
        if key is not None and copied.untyped_storage().nbytes() == tensor.untyped_storage().nbytes():
            memo[key] = copied.untyped_storage()
        vars(copied).update(copy.deepcopy(vars(tensor), memo))
        _copy_hooks(tensor, copied, memo)
    elif (storage := memo.get(_storage_key(tensor))) is not None:
        # It lies in a parameter, such as the integers that bitsandbytes names twice.
        copied = torch.empty(0, dtype=tensor.dtype, device="meta")
        copied.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    else:
        copied = twin(tensor.detach().as_subclass(Tensor)).requires_grad_(tensor.requires_grad)  # type: ignore[arg-type]
    memo[id(tensor)] = copied
    return copied


def _storage_key(tensor: Tensor) -> Any:
    """Return the key of a tensor's storage in a memo, whose other keys are numbers; ``None`` without one."""
    is_plain = tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return ("storage", tensor.untyped_storage()._cdata) if is_plain else None


def _copy_hooks(parameter: nn.Parameter, copied: nn.Parameter, memo: dict[int, Any]) -> None:
    """Keep hooks on gradients: one may step an optimizer and free the gradient during backward."""
    for hooks, register in (
        (parameter._backward_hooks, copied.register_hook),
        (parameter._post_accumulate_grad_hooks, copied.register_post_accumulate_grad_hook),
    ):
        for hook in (hooks or {}).values():
            register(copy.deepcopy(hook, memo))  # type: ignore[no-untyped-call]


@contextmanager
def _copied_by(twin: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make ``copy.deepcopy`` turn every tensor it meets into its meta twin, and share data.

    A memo alone would do for parameters and buffers, but tensors and data also hide in containers and plain
    objects, and tensors inside a graph refuse to be deep-copied at all.
    """

    def copy_tensor(self: Tensor, memo: dict[int, Any]) -> Tensor:
        return _copy_tensor(self, memo, twin)

    data = torch.utils.data
    methods: dict[Any, Callable[..., Any]] = {
        **dict.fromkeys((Tensor, *_with_their_own_copy(nn.Parameter)), copy_tensor),
        **dict.fromkeys((data.Dataset, data.DataLoader, data.Sampler), lambda self, memo: self),
    }
    functions: dict[Any, Callable[..., Any]] = {
        FunctionType: _copy_function,
        torch.Generator: lambda generator, memo: generator.clone_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        functions[numpy.ndarray] = _copy_array
    dispatch: dict[Any, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    # Only what a class defines itself is put back: the others inherit again.
    saved_methods = {cls: vars(cls).get("__deepcopy__") for cls in methods}
    saved_functions = {cls: dispatch.get(cls) for cls in functions}
    try:
        for cls, method in methods.items():
            cls.__deepcopy__ = method
        dispatch.update(functions)
        yield
    finally:
        for cls, saved in saved_methods.items():
            if saved is None:
                del cls.__deepcopy__
            else:
                cls.__deepcopy__ = saved
        for cls, saved in saved_functions.items():
            if saved is None:
                del dispatch[cls]
            else:
                dispatch[cls] = saved


def _with_their_own_copy(cls: type) -> set[type]:
    """Return a class and its descendants, as far as they define how they are copied."""
    own = {cls} if "__deepcopy__" in vars(cls) else set()
    children: list[type] = cls.__subclasses__()
    return own.union(*(_with_their_own_copy(child) for child in children))


def _copy_array(array: Any, memo: dict[int, Any]) -> Any:
    if array.nbytes <= _MAX_COPIED_ARRAY_BYTES:
        return array.__deepcopy__(memo)
    view = array.view()
    view.flags.writeable = False
    return view
