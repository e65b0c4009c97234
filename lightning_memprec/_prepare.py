"""What a Trainer does to a module before its first step, done to the copy that is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_memprec._lightning import TRANSFER_HOOKS, overridden_data_hooks

if TYPE_CHECKING:
    from torch import nn

__all__ = ["is_compiled", "prepare_copy"]

# What Lightning compiles (``lightning.pytorch.utilities.compile.from_compiled``).
_COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def is_compiled(module: nn.Module) -> bool:
    """Tell whether a LightningModule came to its Trainer through ``torch.compile``."""
    return getattr(module, "_compiler_ctx", None) is not None


def prepare_copy(
    copy: nn.Module, *, trainer: Any, datamodule: Any = None, set_up: bool = False, on_device: bool = False
) -> None:
    """Bring the copy of a LightningModule to the state in which training starts.

    Args:
        copy: Copy without storage.
        trainer: What modules inside the copy see as their Trainer.
        datamodule: Data module of the run, whose transfer hooks come before the module's.
        set_up: Whether ``setup`` and ``configure_model`` have run on the original already.
        on_device: Whether the batch has already been through the transfer hooks.
    """
    for module in copy.modules():
        # A LightningModule inside the copy logs through the real Trainer unless it is told otherwise.
        if hasattr(module, "_trainer") and module is not copy:
            vars(module).update(_trainer=trainer, log=_drop, log_dict=_drop)
    if is_compiled(copy):
        # `torch.compile` hangs methods on the instance that still belong to the original.
        for name in _COMPILED:
            vars(copy).pop(name, None)
    if not set_up:
        copy.setup("fit")  # type: ignore[operator]
        copy.configure_model()  # type: ignore[operator]
    for name in TRANSFER_HOOKS if on_device else overridden_data_hooks(datamodule):
        vars(copy)[name] = _pass_on if on_device else getattr(datamodule, name)


def _drop(*args: Any, **kwargs: Any) -> None:
    pass


def _pass_on(batch: Any, *args: Any, **kwargs: Any) -> Any:
    return batch
