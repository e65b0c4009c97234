"""Validate a copy of a module with the loaders of a run, by a Trainer of its own.

``trainer.validate`` inside ``fit`` would change the state of the run: its stage, its logged metrics, and its
``on_fit_end`` hooks, which are skipped once ``trainer.state.fn`` is another. A second Trainer on a copy of the
module leaves the first alone, and does all that Lightning's validation does: hooks, torchmetrics, limits.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_memprec._lightning import CallbackBase, namespace_of, silent_logger

if TYPE_CHECKING:
    from torch import nn

__all__ = ["fresh_loader", "loaders_of", "validate_copy"]

# Autocast belongs to how a module computes. Other precisions convert weights, which are FP32 here on purpose.
_KEPT_PRECISIONS = ("16-mixed", "bf16-mixed", "64-true")


class _Surroundings(CallbackBase):
    """Shows the copy what the run's Trainer has: data module, progress, loaders, optimizers, schedulers.

    Its own Trainer must neither set them up again nor tear them down; optimizers are views that update nothing.
    """

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    @override
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.datamodule = self.run.datamodule
        trainer.fit_loop = self.run.fit_loop
        views = {id(optimizer): _view(optimizer) for optimizer in self.run.optimizers}
        trainer.strategy.optimizers = list(views.values())
        trainer.strategy.lr_scheduler_configs = copy.deepcopy(self.run.lr_scheduler_configs, dict(views))

    @override
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.datamodule = None


def _view(optimizer: Any) -> Any:
    """Return an optimizer with the settings of another, without its parameters and their states."""
    view = object.__new__(type(optimizer))
    vars(view).update(vars(optimizer))
    view.state = {}
    view.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    return view


def validate_copy(trainer: Any, copied: nn.Module) -> dict[str, float]:
    """Run the validation of a run on a copy of its module.

    Every rank validates its own share of the data. Metrics of torchmetrics, and what is logged with ``sync_dist``,
    are those of all shares, as ever; what is logged otherwise is that of the own share.

    Args:
        trainer: The run's Trainer, inside ``fit``.
        copied: What ``copy_with`` made of its module; it is moved to the run's device and back to the CPU.

    Returns:
        Metrics by the names under which the module logs them; empty if the run has no validation.
    """
    loader = fresh_loader(trainer.fit_loop.epoch_loop.val_loop)
    if loader is None:
        return {}
    namespace = namespace_of(trainer)
    with _quiet(namespace), tempfile.TemporaryDirectory() as folder:
        evaluator = namespace.Trainer(
            accelerator=trainer.accelerator,
            strategy=_one_of_many(trainer.strategy, namespace),
            precision=trainer.precision if trainer.precision in _KEPT_PRECISIONS else "32-true",
            logger=[_silent_logger(trainer, folder) for _ in trainer.loggers],
            callbacks=[_Surroundings(trainer)],
            limit_val_batches=trainer.limit_val_batches,
            inference_mode=trainer.fit_loop.epoch_loop.val_loop.inference_mode,
            use_distributed_sampler=False,  # The run's loaders have theirs.
            default_root_dir=folder,  # What `validation_step` writes there would overwrite the run's.
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        evaluator.validate(copied, loader, verbose=False)
    evaluator.datamodule = trainer.datamodule  # Calibration asks the copy's Trainer for it.
    return {str(name): float(value) for name, value in evaluator.callback_metrics.items()}


def _one_of_many(run: Any, namespace: Any) -> Any:
    """Return a strategy for the run's device that does not wrap the copy, but reduces and gathers as the run's."""
    base = namespace.strategies.SingleDeviceStrategy
    kind = type(base.__name__, (base,), {"is_global_zero": run.is_global_zero})
    strategy = kind(run.root_device)
    strategy.is_distributed = run.world_size > 1  # Without it Lightning ignores `sync_dist`.
    for name in ("global_rank", "local_rank", "world_size", "reduce", "all_gather", "broadcast"):
        setattr(strategy, name, getattr(run, name))
    return strategy


def _silent_logger(trainer: Any, folder: str) -> Any:
    base = type(silent_logger(trainer))
    return type(base.__name__, (base,), {"save_dir": folder, "log_dir": folder})()


def loaders_of(trainer: Any) -> list[Any]:
    """List the data loaders of a run, those of training first."""
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    return [loader for loop in loops for loader in getattr(loop._combined_loader, "flattened", ())]


def fresh_loader(loop: Any) -> Any:
    """Return the loaders of a loop of the Trainer, to be iterated from the start; ``None`` if it has none.

    Args:
        loop: The fit loop or a validation loop.
    """
    if loop._combined_loader is None:
        loop = copy.copy(loop)
        loop.setup_data()  # `check_val_every_n_epoch` may be more than the run has had.
    combined = loop._combined_loader
    if combined is None:
        return None
    return type(combined)(
        combined.iterables, combined._mode
    )  # Limits and iterators of the run's own stay its own.


@contextmanager
def _quiet(namespace: Any) -> Iterator[None]:
    """Hide what a Trainer says when it is made; the run's own has said it."""
    logger = logging.getLogger(namespace.__name__)
    fabric = logging.getLogger(namespace.__name__.replace("pytorch", "fabric"))
    levels = [(each, each.level) for each in (logger, fabric)]
    try:
        for each, _ in levels:
            each.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in levels:
            each.setLevel(level)
