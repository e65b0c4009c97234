"""Lightning's callbacks that average weights, or look for a model's parameters in its optimizers, see the masters."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lightning_memprec.master_weights.store import MasterStore

__all__ = ["show_to_callbacks", "widen_averages"]

# The hooks in which they do so, by class.
_HOOKS = {
    "WeightAveraging": (
        "on_train_batch_end",
        "on_train_epoch_end",
        "on_train_end",
        "on_validation_epoch_start",
        "on_validation_epoch_end",
    ),
    "StochasticWeightAveraging": ("on_train_epoch_start", "on_train_end"),
    "BaseFinetuning": ("on_fit_start", "on_train_epoch_start"),
}


def _hooks_of(callback: Any) -> tuple[str, ...]:
    return next((_HOOKS[kind.__name__] for kind in type(callback).__mro__ if kind.__name__ in _HOOKS), ())


def show_to_callbacks(trainer: Any, show: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Run such hooks of a Trainer's callbacks with masters in the place of the parameters.

    Args:
        trainer: The Trainer.
        show: Makes the context in which masters are in place.

    Returns:
        A function that undoes this.
    """
    shown = [(callback, hook) for callback in trainer.callbacks for hook in _hooks_of(callback)]
    for callback, hook in shown:
        vars(callback)[hook] = partial(_call, show, getattr(callback, hook))

    def undo() -> None:
        for callback, hook in shown:
            vars(callback).pop(hook, None)

    return undo


def _call(
    show: Callable[[], AbstractContextManager[None]], hook: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with show():
        return hook(*args, **kwargs)


@torch.no_grad()
def widen_averages(trainer: Any, module: Any, store: MasterStore) -> None:
    """Make averages FP32 that a callback has just copied from a module which was in half already.

    Args:
        trainer: The Trainer.
        module: Its LightningModule.
        store: The masters of the module.
    """
    averages = [
        getattr(callback, "_average_model", None) for callback in trainer.callbacks if _hooks_of(callback)
    ]
    for average in averages:
        if average is None:
            continue
        for copy, parameter in zip(average.parameters(), module.parameters(), strict=True):
            if copy.dtype in (torch.float16, torch.bfloat16):
                value = store.value(parameter)
                copy.data = copy.float() if value is None else value.to(copy.device, copy=True)
