"""The largest batch that fits a device.

Some sizes are traced; the next is where a straight line through two of them meets the budget.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_memprec._errors import MemPrecError
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.known import MAX_KNOWN_NUMEL
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.result import LargestBatch, MemoryEstimate
from lightning_memprec.memory.tree import map_tensors, tensors_in

__all__ = ["batch_size_of", "find_largest_batch", "has_room", "resized"]

# The Trainer waits for the search; small models need a fraction of it. A run that is refused waits for its remedies
# anyway, which are about ten traces.
_TIME_LIMIT_S, _TIME_LIMIT_WITH_ROOM_S = 20.0, 5.0
# With less free there is no batch to win that would be worth the search.
_ROOM = 0.25

# Need grows almost in a straight line with the batch, so that few sizes are enough to close in on one.
_MOST_TRACES = 8
# A run that fits must not wait for a size that it may not want: then the border is only approached.
_MOST_TRACES_WITH_ROOM = 3
# A line through two sizes tells little about one many times as large.
_GROWTH = 64


def batch_size_of(batch: Any) -> int | None:
    """Return the most common first dimension of the tensors in a batch; ``None`` if there are none."""
    sizes = Counter(tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim > 0)
    return sizes.most_common(1)[0][0] if sizes else None


def resized(batch: Any, size: int, wanted: int) -> Any:
    """Cut a batch to its first samples, or repeat its samples.

    Args:
        batch: Tree of tensors, which stay as they are.
        size: Its batch size; tensors with another first dimension are passed on.
        wanted: The new size. Where it is larger, floating tensors lose their values, which a trace does not need.
    """

    def resize(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or tensor.shape[0] != size:
            return tensor
        if wanted <= size:
            return tensor[:wanted]
        # Small tensors of integers, such as lengths, may steer the step: they keep their values.
        if not tensor.is_floating_point() and tensor.numel() // size * wanted <= MAX_KNOWN_NUMEL:
            return tensor.repeat(-(-wanted // size), *[1] * (tensor.ndim - 1))[:wanted]
        return torch.empty((wanted, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    return map_tensors(resize, batch)


def find_largest_batch(
    plan: TrainingPlan, estimate: MemoryEstimate, budget_bytes: int, *, time_limit_s: float | None = None
) -> LargestBatch | None:
    """Find the largest training batch with which a run fits, by tracing the run with other sizes.

    Args:
        plan: The run that was estimated.
        estimate: What it needs.
        budget_bytes: What it may need, in bytes.
        time_limit_s: No further size is traced if the last one took so long that this could be exceeded. Default: 20,
            or 5 where the run fits as it is.

    Returns:
        The largest size that was traced and fits; ``None`` if the batch has no size, or no size that was traced fits.
    """
    batch = plan.make_batch()
    size = batch_size_of(batch)
    over_in_validation = (
        estimate.peak_phase.name == "validation" and estimate.minimum_device_bytes > budget_bytes
    )
    if not size or over_in_validation:
        return None
    if time_limit_s is None:
        fits = estimate.minimum_device_bytes <= budget_bytes
        time_limit_s = _TIME_LIMIT_WITH_ROOM_S if fits else _TIME_LIMIT_S
    search = _Search(replace(plan, batch=batch), size, budget_bytes, time.monotonic() + time_limit_s)
    search.note(size, estimate.minimum_device_bytes)
    search.fixed_bytes = estimate.breakdown.fixed_bytes + estimate.outside_allocator_bytes
    search.run()
    return search.result()


def has_room(need_bytes: int, budget_bytes: int) -> bool:
    """Tell whether a run leaves so much free that a larger batch is worth a search."""
    return need_bytes <= budget_bytes * (1.0 - _ROOM)


class _Search:
    """Closes in on the border between sizes that fit and sizes that do not."""

    def __init__(self, plan: TrainingPlan, size: int, budget_bytes: int, deadline: float) -> None:
        # More micro-batches than two need no more memory. Validation does not depend on the training batch.
        accumulate = min(plan.accumulate_grad_batches, 2)
        self._plan = replace(plan, validation=None, accumulate_grad_batches=accumulate)
        self._size = size
        self._budget_bytes = budget_bytes
        self._deadline = deadline
        self.fixed_bytes = 0  # About what a run without samples would need.
        self._needs: dict[int, int] = {}
        self._refused = 0  # Sizes up to this one cannot be traced: batch norm takes no single sample.

    def note(self, size: int, need_bytes: int) -> None:
        self._needs[size] = need_bytes

    def run(self) -> None:
        fits = self._needs[self._size] <= self._budget_bytes
        for _ in range(_MOST_TRACES_WITH_ROOM if fits else _MOST_TRACES):
            wanted = self._next()
            started = time.monotonic()
            if wanted is None or started >= self._deadline:
                return
            try:
                changed = replace(self._plan, batch=resized(self._plan.batch, self._size, wanted))
                self._needs[wanted] = estimate_plan(changed).minimum_device_bytes
            except MemPrecError:
                if wanted > self._size:
                    return
                self._refused = wanted
            now = time.monotonic()
            if now + (now - started) > self._deadline:
                return

    def _fitting(self) -> int:
        return max(
            (s for s, need in self._needs.items() if need <= self._budget_bytes), default=self._refused
        )

    def _too_large(self) -> int | None:
        return min((s for s, need in self._needs.items() if need > self._budget_bytes), default=None)

    def _next(self) -> int | None:
        """Return the size to trace next; ``None`` if the border is known."""
        low, high = self._fitting(), self._too_large()
        if high is not None and high - low <= 1:
            return None
        (a, need_a), (b, need_b) = self._nearest()
        slope = (need_b - need_a) / (b - a)
        if slope <= 0:
            return _GROWTH * low if high is None else (low + high) // 2
        guess = int(a + (self._budget_bytes - need_a) / slope)
        return max(low + 1, min(guess, _GROWTH * low if high is None else high - 1))

    def _nearest(self) -> list[tuple[int, int]]:
        """Return the two traced sizes whose needs come closest to the budget."""
        closest = sorted(self._needs.items(), key=lambda item: abs(item[1] - self._budget_bytes))
        return [*closest, (0, self.fixed_bytes)][:2]

    def result(self) -> LargestBatch | None:
        fitting = self._fitting()
        if fitting not in self._needs:
            return None
        return LargestBatch(fitting, self._needs[fitting], self._size, self._too_large(), len(self._needs))
