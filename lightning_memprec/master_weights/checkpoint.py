"""Every ``state_dict`` holds the masters under the parameters' ordinary keys, and loading fills them.

The hooks sit on each module that owns a half parameter, so that ``submodule.state_dict()`` and
``torch.distributed.checkpoint`` see FP32 values too. They are objects that survive pickling and copying of the
module, but do nothing in the copy, whose parameters have no masters.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_memprec.master_weights.store import MasterStore

__all__ = ["LoadHook", "SaveHook", "attach_hooks", "detach_hooks", "restore"]

_HALF = (torch.float16, torch.bfloat16)


class _Hook:
    """A hook of a module that knows a store; a copy of it knows none."""

    def __init__(self, store: MasterStore | None = None) -> None:
        self.store = store

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class SaveHook(_Hook):
    """A ``state_dict`` post-hook: replaces half values by FP32 ones."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Replace the entries of the module's own parameters."""
        if self.store is None:
            return
        for name, parameter in module._parameters.items():
            value = None if parameter is None else self.store.value(parameter)
            if value is not None and prefix + name in state:
                state[prefix + name] = value


class LoadHook(_Hook):
    """A ``load_state_dict`` pre-hook: gives FP32 values to the masters before they are rounded."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Load the entries of the module's own parameters."""
        if self.store is None:
            return
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            if parameter is not None and isinstance(value, Tensor) and _fits(parameter, value):
                warn_about_half(self.store, prefix + name, value)
                value = value.to(torch.float32)
                self.store.load(parameter, value)
                state[prefix + name] = value  # FP64 values are rounded once, as the master is.


def _fits(parameter: nn.Parameter, value: Tensor) -> bool:
    return value.is_floating_point() and parameter.dtype in _HALF and value.shape == parameter.shape


def warn_about_half(store: MasterStore, key: str, value: Tensor) -> None:
    """Warn, once, that values come from a file in half."""
    if value.dtype in _HALF and not store.has_warned:
        store.has_warned = True
        warnings.warn(
            f"The checkpoint holds `{key}` in {value.dtype}: the mantissas beyond it were lost when it was "
            "saved, and the FP32 masters start from rounded values. Load a checkpoint saved in FP32 if there is one.",
            stacklevel=2,
        )


def attach_hooks(module: nn.Module, store: MasterStore) -> list[MasterStore]:
    """Put hooks of ``store`` on every submodule with half parameters of its own.

    Returns:
        Other stores whose hooks are there already, each once.
    """
    others: list[MasterStore] = []
    for owner in module.modules():
        hooks = [hook for hook in owner._state_dict_hooks.values() if isinstance(hook, SaveHook)]
        others += [h.store for h in hooks if h.store is not None and h.store not in [store, *others]]
        if any(hook.store is store for hook in hooks):
            continue
        if any(p is not None and p.dtype in _HALF for p in owner._parameters.values()):
            save, load = SaveHook(store), LoadHook(store)
            store.hooks += [save, load]
            owner.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
            owner.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]
    return others


def detach_hooks(store: MasterStore) -> None:
    """Make the hooks of a store do nothing."""
    for hook in store.hooks:
        hook.store = None
    store.hooks.clear()


def restore(module: nn.Module, store: MasterStore, state: dict[str, Any]) -> None:
    """Give masters the FP32 values of a checkpoint that was loaded through half parameters.

    A module that was built in half rounds a checkpoint while it is loaded. A value is only taken where it
    rounds to what the parameter holds, so that changes made on the way are kept.

    Args:
        module: The module with parameters in half.
        store: Its masters.
        state: A ``state_dict`` of it, FP32.
    """
    for name, parameter in module.named_parameters():
        value = state.get(name)
        if isinstance(value, Tensor) and _fits(parameter, value):
            warn_about_half(store, name, value)
            value = value.to(parameter.device, torch.float32)
            if torch.equal(value.to(parameter.dtype), parameter.detach()):
                store.load(parameter, value)
