"""``toggle_optimizer`` for a model whose optimizers hold masters."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from lightning_memprec.master_weights.store import MasterStore

__all__ = ["toggling"]

_NAMES = ("toggle_optimizer", "untoggle_optimizer")


@contextmanager
def toggling(module: Any, store: MasterStore) -> Generator[None, None, None]:
    """Let ``toggle_optimizer``, which finds the masters in the optimizer, reach the parameters.

    The module gets its own two methods for the time of a training step, when they are used.

    Args:
        module: The LightningModule, or ``None`` outside a run.
        store: Its masters.
    """
    if module is None or module.automatic_optimization:
        yield
        return
    for name in _NAMES:
        module.__dict__[name] = partial(_toggle, store, getattr(module, name))
    try:
        yield
    finally:
        for name in _NAMES:
            del module.__dict__[name]


def _toggle(store: MasterStore, method: Callable[[Any], None], optimizer: Any) -> None:
    store.mirror_requires_grad(to_masters=True)
    method(optimizer)
    store.mirror_requires_grad(to_masters=False)
