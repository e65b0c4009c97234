"""The Trainer that a traced copy sees: it tells what the real one would, and changes nothing of it."""

from __future__ import annotations

import math
from typing import Any

from lightning_memprec._lightning import silent_logger

__all__ = ["MetaTrainer"]


class _ReadThrough:
    """Reads of what is not set here go to the target; writes stay here."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name == "_target":  # asked for while a copy is being made
            raise AttributeError(name)
        return getattr(self._target, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class _MetaStrategy(_ReadThrough):
    """A strategy whose collectives give the right shapes without talking to other processes."""

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        pass

    def broadcast(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        return obj

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def reduce_boolean_decision(self, decision: bool, *args: Any, **kwargs: Any) -> bool:
        return decision

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        world_size = getattr(self._target, "world_size", 1)
        return tensor if world_size == 1 else tensor.expand(world_size, *tensor.shape).clone()


class MetaTrainer(_ReadThrough):
    """Stand-in for a Trainer inside ``fit``.

    Attributes are read from the real Trainer, so ``self.trainer.max_epochs`` or ``self.trainer.datamodule``
    are what they would be. What is written stays here. Whatever acts on the world (loggers, checkpoints,
    collectives) does nothing, and what the real Trainer would only know after opening the data
    (``num_training_batches``, ``estimated_stepping_batches``) is computed from the loader.

    Args:
        trainer: The real Trainer.
        loaders: The loader, or tree of loaders, that it will use; ``None`` if unknown.
    """

    def __init__(self, trainer: Any, loaders: Any = None) -> None:
        super().__init__(trainer)
        self.train_dataloader = getattr(loaders, "iterables", loaders)
        self.num_training_batches = _number_of_batches(trainer, loaders)
        self.estimated_stepping_batches = _stepping_batches(trainer, self.num_training_batches)
        self.strategy = _MetaStrategy(trainer.strategy)
        self.loggers = [silent_logger(trainer) for _ in trainer.loggers]
        self.logger = self.loggers[0] if self.loggers else None
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        # The copy's hooks run when the real Trainer is still in setup; they must find it training.
        self.training = True
        self.sanity_checking = False

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save nothing: the copy has no weights."""


def _number_of_batches(trainer: Any, loaders: Any) -> int | float:
    """Batches of one epoch; infinite where the loader does not say."""
    try:
        length: int | float = len(loaders)
    except (TypeError, NotImplementedError, RuntimeError):  # A CombinedLoader has none before it is opened.
        length = math.inf
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return min(length, limit)
    return length if math.isinf(length) else int(length * limit)


def _stepping_batches(trainer: Any, batches: int | float) -> int | float:
    """Follow ``Trainer.estimated_stepping_batches``, which would open the data."""
    if trainer.max_epochs == -1:
        return math.inf if trainer.max_steps == -1 else int(trainer.max_steps)
    if math.isinf(batches):
        return int(trainer.max_steps)
    steps: int = math.ceil(batches / trainer.accumulate_grad_batches) * max(trainer.max_epochs or 1, 1)
    return steps if trainer.max_steps == -1 else min(steps, int(trainer.max_steps))
