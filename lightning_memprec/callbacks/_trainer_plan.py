"""A training plan out of a Trainer that is about to fit."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from lightning_memprec._prepare import prepare_copy
from lightning_memprec.callbacks._meta_trainer import MetaTrainer
from lightning_memprec.memory.plan import TrainingPlan

if TYPE_CHECKING:
    from torch import nn

__all__ = ["is_sharded", "plan_from_trainer"]

# Strategies that split parameters, gradients or states over devices: one device holds less than is estimated.
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


def is_sharded(trainer: Any) -> bool:
    """Tell whether the Trainer's strategy splits the model over devices."""
    return any(base.__name__ in _SHARDED for base in type(trainer.strategy).__mro__)


def plan_from_trainer(
    trainer: Any,
    module: nn.Module,
    batch: Any,
    *,
    device: str,
    loaders: Any = None,
    set_up: bool,
    on_device: bool,
) -> TrainingPlan:
    """Describe the run that ``trainer.fit`` is about to start.

    Args:
        trainer: Trainer inside ``fit``.
        module: Its LightningModule.
        batch: Tree of tensors, as the loader yields it.
        device: Device of the estimate.
        loaders: The train loaders, ``None`` if they may not be asked for.
        set_up: Whether ``setup`` and ``configure_model`` have run on the module already.
        on_device: Whether the batch has already been through the transfer hooks.
    """
    stand_in = MetaTrainer(trainer, loaders)
    prepare = functools.partial(
        prepare_copy, trainer=stand_in, datamodule=trainer.datamodule, set_up=set_up, on_device=on_device
    )
    algorithm = trainer.gradient_clip_algorithm
    return TrainingPlan(
        module=module,
        batch=batch,
        precision=str(trainer.precision_plugin.precision),
        device=device,
        strategy=_strategy_name(trainer),
        num_devices=trainer.num_devices,
        num_nodes=trainer.num_nodes,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm="norm" if algorithm is None else str(getattr(algorithm, "value", algorithm)),
        prepare=prepare,
        trainer=stand_in,
        shared=tuple(_shared(trainer)),
    )


def _strategy_name(trainer: Any) -> str:
    name = type(trainer.strategy).__name__
    if name.startswith("SingleDevice"):
        return "auto"
    return name.removesuffix("Strategy").lower()


def _shared(trainer: Any) -> list[object]:
    """List what a copy of the module must not drag along."""
    shared = [trainer, trainer.strategy, trainer.datamodule, *trainer.loggers, *trainer.callbacks]
    instance = trainer.fit_loop._data_source.instance
    if instance is not trainer.lightning_module:
        shared.append(instance)
    return [item for item in shared if item is not None]
