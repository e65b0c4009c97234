"""Run a user's own module for real and leave it bit for bit as it was."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_memprec._isolation import refill, unchanged
from lightning_memprec.memory.originals import Originals
from lightning_memprec.memory.tree import tensors_in

__all__ = ["all_tensors", "untouched", "untouched_optimizers"]

# Hooks that user code hangs on parameters, for example to step inside the backward pass.
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def all_tensors(module: nn.Module) -> list[Tensor]:
    """List the parameters, the buffers, and the tensors in other attributes of a module and its children, each once."""
    found: dict[int, Tensor] = {}
    for child in module.modules():
        others = [value for name, value in vars(child).items() if name not in ("_parameters", "_buffers")]
        kept = [tensor for value in others if _may_hold_tensors(value) for tensor in _tensors_or_none(value)]
        named = [*child._parameters.values(), *child._buffers.values()]
        for tensor in (*named, *kept):
            if tensor is not None and not is_lazy(tensor):
                found.setdefault(id(tensor), tensor)
    return list(found.values())


def _may_hold_tensors(value: Any) -> bool:
    return isinstance(value, (Tensor, list, tuple, dict))


def _tensors_or_none(value: Any) -> list[Tensor]:
    try:
        return tensors_in(value)
    except Exception:  # Some class of the user's that cannot be rebuilt; it holds what it held.
        return []


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Undo whatever the block does to a module: it may train it, move it, convert it, hook it.

    Put back are contents, devices and dtypes of its tensors, gradients, ``requires_grad``, modes, hooks and attributes,
    and all random generators. Contents are kept on the host meanwhile. What user code writes to files stays written.

    Args:
        module: Module that the block runs.
    """
    with ExitStack() as stack:
        contents = Originals()
        tensors = all_tensors(module)
        gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        contents.save([*tensors, *gradients])
        # The order matters: tensors first get their own storages back, then these their contents.
        stack.callback(contents.put_back)
        for tensor in tensors:
            stack.callback(_undo_tensor(tensor))
        for child in module.modules():
            stack.callback(_undo_module(child))
        stack.enter_context(unchanged(module))
        yield


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
    return (
        (tensor.dtype, tensor.device, tensor.shape) == (data.dtype, data.device, data.shape)
        and tensor.stride() == data.stride()
        and tensor.data_ptr() == data.data_ptr()
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
            states = {key: copy.copy(state) for key, state in optimizer.state.items()}
            groups = [dict(group) for group in optimizer.param_groups]
            for state in states.values():
                contents.save(_tensors_or_none(state))
            stack.callback(functools.partial(_put_back, optimizer, states, groups))
        yield


def _put_back(optimizer: Optimizer, states: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
    with suppress(AttributeError):  # A wrapper may show states that it does not own.
        optimizer.state.clear()
        optimizer.state.update(states)
    for group, before in zip(optimizer.param_groups, groups, strict=False):
        refill(group, before)
