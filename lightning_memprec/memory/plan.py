"""The run to be estimated, as plain data."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lightning_memprec.memory.sharding.strategies import Strategy

__all__ = ["MasterOptions", "TrainingPlan", "ValidationLoader", "ValidationPlan"]


@dataclass(frozen=True)
class ValidationLoader:
    """One of the loaders of a validation.

    Args:
        batch: Tree of real or meta tensors.
        num_batches: How many batches one validation takes of it; ``None`` if nothing tells.
    """

    batch: Any
    num_batches: int | None = None


@dataclass(frozen=True, kw_only=True)
class ValidationPlan:
    """The validation that a training run does between its steps.

    Args:
        loaders: What is validated, one after the other.
        inference_mode: Whether the Trainer validates under ``torch.inference_mode``, else ``torch.no_grad``.
        sanity_check: Whether the Trainer validates before the first step too.
    """

    loaders: tuple[ValidationLoader, ...]
    inference_mode: bool = True
    sanity_check: bool = True


@dataclass(frozen=True, kw_only=True)
class MasterOptions:
    """How a run with FP32 masters handles them; the options of ``MasterWeightPrecision``.

    Args:
        low_memory: Whether gradients stay in half until the step, which then takes some parameters at a time.
        step_in_backward: Whether each parameter is stepped as soon as its gradient is there.
        cast: Converts the module to half in place; ``None`` converts all but modules with running statistics.
    """

    low_memory: bool = False
    step_in_backward: bool = False
    cast: Callable[[nn.Module, torch.dtype], None] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Everything that decides what a training run needs.

    Args:
        module: Module, or a zero-argument callable that builds one (then built on ``meta``). It is never
            modified: a copy without storage is traced.
        batch: Tree of real or meta tensors, or a zero-argument function that returns one.
        optimizer: Callable from parameters to an optimizer; ``None`` uses the module's
            ``configure_optimizers``.
        loss: Callable ``(module, batch) -> scalar``; ``None`` uses ``training_step``, else the output's
            ``.loss``, else the sum of its floating tensors.
        precision: Lightning's name of the precision, or ``"bf16-master"``/``"16-master"``.
        masters: Options of the two with FP32 masters.
        device: ``"cuda"``, ``"cpu"`` or a name from the catalogue.
        strategy: Lightning's name of the strategy, or its options.
        num_devices: Devices per node.
        num_nodes: Nodes.
        accumulate_grad_batches: Micro-batches per optimizer step.
        gradient_clip_val: Threshold of gradient clipping; ``None`` clips nothing.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        steps: Optimizer steps to trace; two show optimizer states beside activations.
        validation: The validation between the steps; ``None`` if the run has none.
        prepare: Run on the copy before its precision is converted, as a Trainer would run ``setup`` and
            ``configure_model``.
        trainer: What the copy sees as ``self.trainer``; ``None`` gives a stand-in.
        adapt_optimizer: Maps each optimizer to the one to trace in its place; used to try remedies.
        shared: Objects that the copy shares with the module instead of copying them.
        calibration: Measured by traced memory of an earlier run, by which the estimate is scaled.
    """

    module: nn.Module | Callable[[], nn.Module]
    batch: Any
    optimizer: Callable[[Iterable[Any]], Optimizer] | None = None
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    precision: str = "32-true"
    masters: MasterOptions = MasterOptions()
    device: str = "cuda"
    strategy: str | Strategy = "auto"
    num_devices: int = 1
    num_nodes: int = 1
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    steps: int = 2
    validation: ValidationPlan | None = None
    prepare: Callable[[nn.Module], None] | None = None
    trainer: Any = None
    adapt_optimizer: Callable[[Optimizer], Optimizer] | None = None
    shared: tuple[object, ...] = ()
    calibration: float = 1.0

    def make_batch(self) -> Any:
        """Return the batch; a function is called to make it."""
        # Batches may be objects that can be called, such as graphs of PyTorch Geometric.
        builds = inspect.isroutine(self.batch) or isinstance(self.batch, (functools.partial, type))
        return self.batch() if builds else self.batch
