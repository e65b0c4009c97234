"""A few training steps of a copy of a module in one precision, in plain PyTorch.

The loops are those of Lightning's plugins: autocast with FP32 weights (``MixedPrecision``), and half weights
whose optimizer works on FP32 masters.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_memprec.scaling.recipe import Recipe

__all__ = ["MODES", "Mode", "RunRecord", "initial_loss", "short_run"]

# A half loss passes the scale on as its gradient, and 65536 is infinite in float16.
_MASTER_INIT_SCALE = 2.0**15


@dataclass(frozen=True)
class Mode:
    """How a precision computes.

    Args:
        dtype: Half dtype, or ``None`` for FP32.
        masters: Whether weights are half, and the optimizer works on FP32 masters.
    """

    dtype: torch.dtype | None = None
    masters: bool = False


MODES = {
    "32-true": Mode(),
    "bf16-mixed": Mode(torch.bfloat16),
    "16-mixed": Mode(torch.float16),
    "bf16-master": Mode(torch.bfloat16, masters=True),
    "16-master": Mode(torch.float16, masters=True),
}


@dataclass(frozen=True)
class RunRecord:
    """What one short run gave.

    Args:
        losses: Training loss of each step, as the precision itself computes it.
        final_loss: Mean loss over the run's batches after the last step, computed in FP32 from the weights that
            the optimizer keeps.
        skipped_steps: Attempts that the loss scale rejected.
        stalled_share: Share of the weight updates that would have been lost in weights of the half dtype;
            ``None`` in FP32, or if nothing moved.
        seconds_per_step: Median time of one attempt.
    """

    losses: tuple[float, ...]
    final_loss: float
    skipped_steps: int
    stalled_share: float | None
    seconds_per_step: float


def short_run(
    recipe: Recipe, batches: Sequence[Any], precision: str, *, seed: int, order: int = 0
) -> RunRecord:
    """Train a copy of the module, one step a batch.

    A step that the loss scale rejects is repeated at the lower scale, so that every precision learns from the
    same data: in a long run the few steps of calibration do not matter.

    Args:
        recipe: What to train.
        batches: Batches on the device of the module.
        precision: A key of :data:`MODES`.
        seed: Seed of the random generators; step ``i`` starts from ``seed + i`` in every precision.
        order: 0 trains in the given order; another number shuffles the batches and shifts the training's seed
            by it. The final loss is always computed in the given order and with the given seed.

    Raises:
        ValueError: If the module cannot be copied, or its loss or optimizer are of a kind that needs more than
            this loop.
    """
    run = _Run(recipe, MODES[precision])
    feed = random.Random(order).sample(batches, len(batches)) if order else batches
    first = seed + order * len(batches)
    losses = [run.step(batch, first + number) for number, batch in enumerate(feed)]
    return RunRecord(
        losses=tuple(losses),
        final_loss=run.evaluate(batches, seed),
        skipped_steps=run.skipped,
        stalled_share=run.stalled / run.moved if run.moved else None,
        seconds_per_step=statistics.median(run.seconds),
    )


def initial_loss(recipe: Recipe, batches: Sequence[Any], *, seed: int) -> float:
    """Compute what :attr:`RunRecord.final_loss` would be without any step."""
    return _Run(recipe, MODES["32-true"]).evaluate(batches, seed)


class _Run:
    """State of one short run."""

    def __init__(self, recipe: Recipe, mode: Mode) -> None:
        self.recipe = recipe
        self.mode = mode
        self.module = recipe.copy_module().train()
        self.optimizer = recipe.build_optimizer(self.module)
        self.pairs = _install_masters(self.module, self.optimizer, mode.dtype) if mode.masters else []
        self.device = next(self.module.parameters()).device
        init_scale = _MASTER_INIT_SCALE if mode.masters else 2.0**16
        self.scaler = torch.amp.GradScaler(
            self.device.type, init_scale=init_scale, enabled=mode.dtype is torch.float16
        )
        self.weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.seconds: list[float] = []
        self.skipped = self.stalled = self.moved = 0

    def step(self, batch: Any, seed: int) -> float:
        """Train on one batch and return its loss."""
        while True:
            before = [w.detach().clone() for w in self.weights]
            scale = self.scaler.get_scale()
            start = time.perf_counter()
            loss = self._attempt(batch, seed)
            self.seconds.append(time.perf_counter() - start)
            if self.scaler.get_scale() >= scale:
                self._count_stalled(before)
                return loss
            self.skipped += 1
            # A loss that is not finite cannot be cured by the scale, nor can gradients that overflow unscaled.
            if not torch.isfinite(torch.tensor(loss)) or self.scaler.get_scale() < 1.0:
                return loss

    def _attempt(self, batch: Any, seed: int) -> float:
        torch.manual_seed(seed)
        self.module.zero_grad()
        self.optimizer.zero_grad()
        with self._precision():
            loss = self.recipe.loss_of(self.module, self._cast(batch))
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        self.scaler.unscale_(self.optimizer)
        if self.recipe.gradient_clip_val is not None:
            by_norm = self.recipe.gradient_clip_algorithm == "norm"
            clip = nn.utils.clip_grad_norm_ if by_norm else nn.utils.clip_grad_value_
            clip(self.weights, self.recipe.gradient_clip_val)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)
        return loss.item()  # waits for the device, so that times are those of whole steps

    @contextmanager
    def _precision(self) -> Iterator[None]:
        dtype = self.mode.dtype
        if dtype is None or not self.mode.masters:
            with torch.autocast(self.device.type, dtype, enabled=dtype is not None, cache_enabled=False):
                yield
            return
        # As Lightning's `HalfPrecision`: tensors that the module makes come in half too.
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default)

    def _cast(self, batch: Any) -> Any:
        if not self.mode.masters:
            return batch
        return tree_map(
            lambda x: x.to(self.mode.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, batch
        )

    def _count_stalled(self, before: list[Tensor]) -> None:
        dtype = self.mode.dtype
        if dtype is None:
            return
        for old, new in zip(before, self.weights, strict=True):
            update = new.detach() - old
            moved = update != 0
            half = old.to(dtype)
            self.moved += int(moved.sum())
            self.stalled += int((moved & ((half.to(old.dtype) + update).to(dtype) == half)).sum())

    def evaluate(self, batches: Sequence[Any], seed: int) -> float:
        """Return the mean loss in FP32: one ruler for all precisions, which rounds none of them."""
        for parameter, master in self.pairs:
            parameter.data = master.detach()
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.dtype is self.mode.dtype:
                tensor.data = tensor.data.float()
        total = 0.0
        with torch.no_grad():
            for number, batch in enumerate(batches):
                torch.manual_seed(seed + number)
                total += float(self.recipe.loss_of(self.module, batch))
        return total / len(batches)


def _install_masters(
    module: nn.Module, optimizer: Optimizer, dtype: torch.dtype | None
) -> list[tuple[Tensor, Tensor]]:
    """Make the module half, and let the optimizer work on FP32 copies of its weights."""
    pairs = []
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            master = parameter.detach().clone().requires_grad_(parameter.requires_grad)
            group["params"][index] = master
            if parameter in optimizer.state:  # Adagrad makes its state at once.
                optimizer.state[master] = optimizer.state.pop(parameter)
            pairs.append((parameter, master))
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return pairs
