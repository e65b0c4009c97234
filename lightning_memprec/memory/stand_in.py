"""What a module sees as its Trainer while it is traced without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lightning_memprec.memory.plan import TrainingPlan

__all__ = ["trainer_stand_in"]


class _Silent:
    """A logger, or the experiment behind it: takes every call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


def trainer_stand_in(plan: TrainingPlan) -> Any:
    """Return an object with the attributes of a Trainer that modules commonly read.

    Args:
        plan: The run; gives accumulation, clipping and device counts.

    Note:
        An attribute that is missing raises ``AttributeError``, which the trace reports: better than an
        invented value that changes the module's course.
    """
    world_size = plan.num_devices * plan.num_nodes
    strategy = SimpleNamespace(
        world_size=world_size,
        global_rank=0,
        local_rank=0,
        node_rank=0,
        is_global_zero=True,
        root_device=torch.device("cpu") if plan.device == "cpu" else torch.device("cuda", 0),
        barrier=lambda *args, **kwargs: None,
        broadcast=lambda obj, *args, **kwargs: obj,
        reduce=lambda tensor, *args, **kwargs: tensor,
        all_gather=lambda tensor, *args, **kwargs: (
            tensor if world_size == 1 else torch.stack([tensor] * world_size)
        ),
    )
    logger = _Silent()
    return SimpleNamespace(
        accumulate_grad_batches=plan.accumulate_grad_batches,
        gradient_clip_val=plan.gradient_clip_val,
        gradient_clip_algorithm=plan.gradient_clip_algorithm,
        precision=plan.precision,
        world_size=world_size,
        num_devices=plan.num_devices,
        num_nodes=plan.num_nodes,
        global_rank=0,
        local_rank=0,
        node_rank=0,
        is_global_zero=True,
        current_epoch=0,
        global_step=0,
        max_epochs=1,
        max_steps=-1,
        num_training_batches=1000,
        estimated_stepping_batches=1000,
        training=True,
        validating=False,
        testing=False,
        predicting=False,
        evaluating=False,
        sanity_checking=False,
        fast_dev_run=False,
        is_last_batch=False,
        logger=logger,
        loggers=[logger],
        callbacks=[],
        callback_metrics={},
        logged_metrics={},
        progress_bar_metrics={},
        optimizers=[],
        lr_scheduler_configs=[],
        datamodule=None,
        log_dir=None,
        default_root_dir=".",
        strategy=strategy,
        log_every_n_steps=50,
    )
