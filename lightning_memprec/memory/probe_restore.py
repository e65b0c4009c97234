"""Run a user's own module for real and leave it bit for bit as it was."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_memprec._isolation import reachable, refill, unchanged
from lightning_memprec.memory.originals import Originals
from lightning_memprec.memory.tree import tensors_in

__all__ = ["parts_of", "untouched", "untouched_optimizers"]

# Hooks that user code hangs on parameters, for example to step inside the backward pass.
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return a tensor, or the strided tensors of which a sparse one is made."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # Layouts of other libraries, such as that of oneDNN, show no storage.


@dataclass
class _Belongings:
    """What user code can reach from a module while it trains it.

    Args:
        modules: The module, its children, and those kept in lists and objects, as teachers and averages are.
        tensors: Parameters, buffers, and tensors in attributes, containers and objects, each once.
        optimizers: Optimizers that are there already.
        others: Containers, and arrays in memory.
    """

    modules: list[nn.Module]
    tensors: list[Tensor]
    optimizers: list[Optimizer]
    others: list[Any]


def _belongings_of(roots: Iterable[object], skip: Iterable[object]) -> _Belongings:
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    optimizers: dict[int, Optimizer] = {}
    others: dict[int, Any] = {}
    waiting = list(roots)
    for root in waiting:  # Grows while it is read.
        if id(root) in modules:
            continue
        if isinstance(root, nn.Module):
            modules[id(root)] = root
        # Each module for itself: the bounds of the search are those of a single object.
        for item in (*reachable((root,), skip), *(_tensors_in_attributes(root))):
            if isinstance(item, nn.Module):
                waiting.append(item)
            elif isinstance(item, Tensor) and not (is_lazy(item) or item.is_meta):
                tensors[id(item)] = item
            elif isinstance(item, Optimizer):
                optimizers[id(item)] = item
            elif _is_container(item):
                others[id(item)] = item
    found = (modules, tensors, optimizers, others)
    return _Belongings(*(list(items.values()) for items in found))  # type: ignore[arg-type]


def _tensors_in_attributes(root: object) -> list[Tensor]:
    """Look into long lists too, at which the search for Python state stops."""
    if not isinstance(root, nn.Module):
        return []
    named = [*root._parameters.values(), *root._buffers.values()]
    values = [value for value in vars(root).values() if isinstance(value, (list, tuple, dict))]
    kept = [tensor for value in values for tensor in _tensors_or_none(value)]
    return [tensor for tensor in (*named, *kept) if tensor is not None]


def _tensors_or_none(value: Any) -> list[Tensor]:
    try:
        return tensors_in(value)
    except Exception:  # Some class of the user's that cannot be rebuilt; it holds what it held.
        return []


def _is_container(item: object) -> bool:
    if type(item) in (list, dict) or isinstance(item, (set, deque, bytearray)):
        return True
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and isinstance(item, numpy.ndarray)
        and not isinstance(item, numpy.memmap)  # That is a file.
        and item.flags.writeable
    )


@contextmanager
def untouched(module: nn.Module, *more: object) -> Iterator[None]:
    """Undo whatever the block does to a module: it may train it, move it, convert it, hook it.

    Put back are contents, devices and dtypes of its tensors, gradients, ``requires_grad``, modes, hooks and attributes,
    and all random generators; the same for modules, tensors, arrays and containers that its attributes lead to.
    Contents are kept on the host meanwhile. What user code writes to files stays written, and an iterator that was
    read stays where it is.

    Args:
        module: Module that the block runs.
        more: Other objects whose state to protect, such as a function that returns an optimizer.
    """
    skip = [vars(module).get(name) for name in ("_trainer", "_fabric")]
    own = _belongings_of((module, *more), skip)
    skip += [optimizer.state for optimizer in own.optimizers]  # These are put back here.
    with ExitStack() as stack:
        contents = Originals()
        gradients = [tensor.grad for tensor in own.tensors if tensor.is_leaf and tensor.grad is not None]
        contents.save(part for tensor in (*own.tensors, *gradients) for part in parts_of(tensor))
        # The order matters: tensors first get their own storages back, then these their contents.
        stack.callback(contents.put_back)
        for tensor in own.tensors:
            stack.callback(_undo_tensor(tensor))
        for child in own.modules:
            stack.callback(_undo_module(child))
        for other in own.others:
            stack.callback(_undo_other(other))
        stack.enter_context(untouched_optimizers(own.optimizers))
        stack.enter_context(unchanged(module, *more, skip=skip))
        yield


def _undo_other(item: Any) -> Callable[[], None]:
    """Remember the entries of a container or an array."""
    before = item.copy()

    def undo() -> None:
        if isinstance(item, (dict, set)):
            item.clear()
            item.update(before)
        elif isinstance(item, (list, deque, bytearray)):
            item.clear()
            item.extend(before)
        else:
            item[...] = before

    return undo


def _undo_tensor(tensor: Tensor) -> Callable[[], None]:
    data, leaf, needs_gradient = tensor.detach(), tensor.is_leaf, tensor.requires_grad
    gradient = tensor.grad if leaf else None
    hooks = {name: getattr(tensor, name) for name in _TENSOR_HOOKS} if leaf else {}
    entries = {name: dict(value) for name, value in hooks.items() if value is not None}

    def undo() -> None:
        if not _is_same(tensor, data):
            tensor.data = data
        if not leaf:
            return
        if tensor.requires_grad != needs_gradient:
            tensor.requires_grad_(needs_gradient)
        if tensor.grad is not gradient:
            tensor.grad = gradient
        for name, value in hooks.items():
            if getattr(tensor, name) is not value:
                setattr(tensor, name, value)
            if value is not None:
                refill(value, entries[name])

    return undo


def _is_same(tensor: Tensor, data: Tensor) -> bool:
    if (tensor.dtype, tensor.device, tensor.layout) != (data.dtype, data.device, data.layout):
        return False
    pairs = list(zip(parts_of(tensor), parts_of(data), strict=True))
    return tensor.shape == data.shape and all(
        a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr() for a, b in pairs
    )


def _undo_module(child: nn.Module) -> Callable[[], None]:
    attributes = dict(vars(child))
    containers = [(value, value.copy()) for value in attributes.values() if isinstance(value, (dict, list))]
    # A script module keeps these out of its attributes.
    buffers, training = dict(child._buffers.items()), child.training

    def undo() -> None:
        for container, entries in containers:
            refill(container, entries)
        refill(vars(child), attributes)
        for name, buffer in buffers.items():
            if child._buffers[name] is not buffer:
                child._buffers[name] = buffer
        if child.training != training:
            child.training = training

    return undo


@contextmanager
def untouched_optimizers(optimizers: list[Optimizer]) -> Iterator[None]:
    """Undo what the block does to states and groups of optimizers; one made for the block has nothing to lose.

    Args:
        optimizers: Optimizers that the block steps.
    """
    with ExitStack() as stack:
        contents = Originals()
        stack.callback(contents.put_back)
        for optimizer in optimizers:
            states = {key: _copied(state) for key, state in optimizer.state.items()}
            groups = [dict(group) for group in optimizer.param_groups]
            for state in states.values():
                contents.save(part for tensor in _tensors_or_none(state) for part in parts_of(tensor))
            stack.callback(functools.partial(_put_back, optimizer, states, groups))
        yield


def _copied(state: Any) -> Any:
    """Copy the dictionaries and lists of a state, such as the history of LBFGS, but not its tensors."""
    if type(state) is dict:
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if type(state) is list else state


def _put_back(optimizer: Optimizer, states: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
    with suppress(AttributeError):  # A wrapper may show states that it does not own.
        optimizer.state.clear()
        optimizer.state.update(states)
    for group, before in zip(optimizer.param_groups, groups, strict=False):
        refill(group, before)
