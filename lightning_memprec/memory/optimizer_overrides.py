"""What bitsandbytes keeps in 32 bits, such as a ``StableEmbedding``'s states, in the copy that is traced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["follow_overrides", "unchanged_overrides"]


def _manager() -> Any:
    optim = sys.modules.get("bitsandbytes.optim")
    return optim.GlobalOptimManager.get_instance() if optim is not None else None


def follow_overrides(module: nn.Module, copied: nn.Module) -> None:
    """Register for a copy what bitsandbytes' ``GlobalOptimManager`` has registered for a module's submodules.

    Args:
        module: The module that was copied.
        copied: Its copy, of the same structure.
    """
    manager = _manager()
    if manager is None or not manager.module_weight_config_triple:
        return
    names = {id(child): name for name, child in module.named_modules()}
    for child, attribute, config in list(manager.module_weight_config_triple):
        name = names.get(id(child))
        if name is not None:
            manager.register_module_override(copied.get_submodule(name), attribute, config)


@contextmanager
def unchanged_overrides() -> Iterator[None]:
    """Put the manager's registrations back: an optimizer's step files them for every later optimizer."""
    manager = _manager()
    if manager is None:
        yield
        return
    saved = [
        (store, store.copy())
        for store in (manager.pid2config, manager.index2config, manager.module_weight_config_triple)
    ]
    try:
        yield
    finally:
        for store, contents in saved:
            store.clear()
            (store.extend if isinstance(store, list) else store.update)(contents)
