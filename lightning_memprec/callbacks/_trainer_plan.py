"""A training plan out of a Trainer that is about to fit."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_memprec._errors import TraceError
from lightning_memprec._master_options import master_options
from lightning_memprec._prepare import prepare_copy
from lightning_memprec._validation import plan_validation
from lightning_memprec.callbacks._meta_trainer import MetaTrainer
from lightning_memprec.callbacks._trainer_strategy import strategy_of
from lightning_memprec.memory.plan import MasterOptions, TrainingPlan, ValidationPlan
from lightning_memprec.plugins.master_weights import MasterWeightPrecision

if TYPE_CHECKING:
    from torch import nn

    from lightning_memprec.memory.sharding.strategies import Strategy

__all__ = ["FitPlan", "is_sharded", "plan_from_trainer", "plan_validation_of"]

# Strategies that split parameters, gradients or states over devices, and change the module for it.
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


@dataclass(frozen=True)
class FitPlan:
    """The run of ``trainer.fit``, and how it was read.

    Args:
        plan: The run.
        batch: Where its batch comes from, in words.
        remarks: What a reader should know of the plan.
    """

    plan: TrainingPlan
    batch: str
    remarks: tuple[str, ...] = ()


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
    validation: ValidationPlan | None = None,
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
        validation: The validation between the steps, ``None`` for none.
        set_up: Whether ``setup`` and ``configure_model`` have run on the module already.
        on_device: Whether the batch has already been through the transfer hooks.
    """
    stand_in = MetaTrainer(trainer, loaders)
    prepare = functools.partial(
        prepare_copy, trainer=stand_in, datamodule=trainer.datamodule, set_up=set_up, on_device=on_device
    )
    algorithm = trainer.gradient_clip_algorithm
    precision, masters = _precision(trainer.precision_plugin)
    return TrainingPlan(
        module=module,
        batch=batch,
        precision=precision,
        masters=masters,
        device=device,
        strategy=_strategy(trainer, set_up),
        num_devices=trainer.num_devices,
        num_nodes=trainer.num_nodes,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm="norm" if algorithm is None else str(getattr(algorithm, "value", algorithm)),
        validation=validation,
        prepare=prepare,
        trainer=stand_in,
        shared=tuple(_shared(trainer)),
    )


def _precision(plugin: Any) -> tuple[str, MasterOptions]:
    if isinstance(plugin, MasterWeightPrecision):
        # Its `precision` is Lightning's own name of the dtype.
        return plugin.master_precision, master_options(**vars(plugin))
    return str(plugin.precision), MasterOptions()


def plan_validation_of(trainer: Any, sample_batches: int) -> tuple[ValidationPlan | None, str]:
    """Describe the validation of a run, if it has one.

    Args:
        trainer: Trainer inside ``fit``.
        sample_batches: How many batches of each loader to look at.

    Returns:
        The validation, or ``None``; and, if the Trainer validates but nothing is known of it, why.
    """
    if not trainer.enable_validation:
        return None, ""
    loop = trainer.fit_loop.epoch_loop.val_loop
    try:
        loaders = (
            loop._combined_loader if loop._combined_loader is not None else loop._data_source.dataloader()
        )
        validation = plan_validation(
            loaders,
            sample_batches=sample_batches,
            limit=trainer.limit_val_batches,
            sanity_check=trainer.num_sanity_val_steps > 0,
            inference_mode=loop.inference_mode,
        )
    except Exception as error:  # Whatever the user's data raises: the training is judged all the same.
        return None, f"Validation is not judged: {error}".rstrip(".") + "."
    return validation, ""


def _strategy(trainer: Any, set_up: bool) -> str | Strategy:
    if set_up and is_sharded(trainer):
        raise TraceError(
            f"`{type(trainer.strategy).__name__}` has sharded the model already. A preflight of it has to succeed in "
            "`setup`: give `batch_spec` if the batch is the obstacle."
        )
    return strategy_of(trainer) or "single_device"


def _shared(trainer: Any) -> list[object]:
    """List what a copy of the module must not drag along."""
    shared = [trainer, trainer.strategy, trainer.precision_plugin, trainer.datamodule]
    shared.append(getattr(trainer.lightning_module, "_device_mesh", None))
    shared += [*trainer.loggers, *trainer.callbacks]
    instance = trainer.fit_loop._data_source.instance
    if instance is not trainer.lightning_module:
        shared.append(instance)
    return [item for item in shared if item is not None]
