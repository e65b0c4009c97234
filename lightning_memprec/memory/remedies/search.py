"""Try changes, alone and together, and put first what leaves the mathematics as it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from lightning_memprec.memory.allocator import minimum_capacity
from lightning_memprec.memory.allocator_config import AllocatorConfig
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.remedies.adapters import adapters
from lightning_memprec.memory.remedies.batches import micro_batches, shorter_sequences, validation_batches
from lightning_memprec.memory.remedies.change import (
    Change,
    Need,
    need_of,
    remedy_from,
    skeleton,
    together,
)
from lightning_memprec.memory.remedies.checkpointing import checkpointing, fewer_blocks
from lightning_memprec.memory.remedies.optimizers import optimizers
from lightning_memprec.memory.remedies.precisions import precisions
from lightning_memprec.memory.remedies.snippet import Code
from lightning_memprec.memory.remedies.strategies import ZERO_NAMES, more_devices, strategies
from lightning_memprec.memory.result import MemoryEstimate, Remedy

__all__ = ["suggest_remedies"]

# A change that saves less is no help: it is left out.
_WORTHWHILE = 0.01
# Each costs more than the one before it, and is not needed where one of these fits.
_LADDERS = (
    ("master_weights", "master_weights_low_memory", "master_weights_step_in_backward"),
    ("fully_sharded", "fully_sharded_offload"),
    ZERO_NAMES,
)


def suggest_remedies(
    plan: TrainingPlan,
    estimate: MemoryEstimate,
    capacity_bytes: int,
    *,
    safety_margin: float = 0.0,
    thorough: bool = False,
) -> tuple[Remedy, ...]:
    """Try the changes that are known to help, and say what the run would need with each.

    Args:
        plan: The run that was estimated.
        estimate: What it needs.
        capacity_bytes: What the device offers, in bytes.
        safety_margin: Fraction of the capacity to keep free, in [0, 1).
        thorough: Whether to also try pairs of changes of which neither is enough alone, and changes to what is trained
            (shorter sequences, low-rank adapters), more devices, and DeepSpeed where it is not installed. Takes some
            times as long.

    Returns:
        Remedies in the order in which to try them: those that fit before those that do not, and among each those that
        compute the same before others. Those that do not save anything, or cannot be traced, are left out. If no
        single one makes the run fit, one combines them.
    """
    budget_bytes = int(capacity_bytes * (1.0 - safety_margin))
    plan = replace(plan, batch=plan.make_batch())
    before = Need(estimate.minimum_device_bytes, estimate.events.flops if estimate.events else 0)
    model = skeleton(plan)
    search = _Search(plan, before, budget_bytes)
    for change in _changes(plan, model, estimate, budget_bytes, thorough=thorough):
        if any(change.name in ladder and search.fits(*ladder) for ladder in _LADDERS):
            continue
        search.try_out(change)
        if change.name == "activation_checkpointing" and search.fits(change.name):
            fewer = fewer_blocks(plan, model, before, budget_bytes)
            if fewer is not None:
                search.try_out(fewer)
    if plan.device != "cpu":
        search.add(_expandable_segments(estimate, budget_bytes))
    if thorough:
        search.try_pairs()
    if not any(remedy.fits for remedy in search.found):
        search.combine()
    return tuple(sorted(search.found, key=lambda remedy: (not remedy.fits, not remedy.exact)))


class _Search:
    """Remedies found so far, and the changes behind them."""

    def __init__(self, plan: TrainingPlan, before: Need, budget_bytes: int) -> None:
        self._plan = plan
        self._before = before
        self._budget_bytes = budget_bytes
        self._helpful: list[Change] = []
        self.found: list[Remedy] = []

    def add(self, remedy: Remedy | None) -> bool:
        """Keep a remedy that saves enough to be worth it."""
        if remedy is None or remedy.saving_bytes < _WORTHWHILE * self._before.device_bytes:
            return False
        self.found.append(remedy)
        return True

    def fits(self, *names: str) -> bool:
        """Tell whether one of some changes is known to be enough."""
        return any(remedy.fits for remedy in self.found if remedy.name in names)

    def try_out(self, change: Change) -> None:
        """Trace the run with a change."""
        if self.add(self._outcome(change)):
            self._helpful.append(change)

    def _outcome(self, change: Change) -> Remedy | None:
        after = need_of(change.apply(self._plan))
        return None if after is None else remedy_from(change, self._before, after, self._budget_bytes)

    def try_pairs(self) -> None:
        """Trace pairs of changes neither of which is enough; keep those that are."""
        not_enough = self._strongest([change for change in self._helpful if not self.fits(change.name)])
        for pair in itertools.combinations(not_enough, 2):
            if pair[0].topics & pair[1].topics:
                continue
            outcome = self._outcome(together(list(pair), "_and_".join(change.name for change in pair)))
            if outcome is not None and outcome.fits:
                self.add(outcome)

    def combine(self) -> None:
        """Make one change after the other until the run fits, cheap ones first, else strong ones first."""
        changes = self._strongest(self._helpful)
        cheap, strong = _compatible(changes), _compatible(sorted(changes, key=self._need_bytes))
        tried = [self._combined(cheap)]
        if tried[0] is not None and not tried[0].fits and {c.name for c in strong} != {c.name for c in cheap}:
            tried.append(self._combined(strong))
        self.add(min(filter(None, tried), key=lambda remedy: remedy.need_bytes, default=None))

    def _combined(self, changes: list[Change]) -> Remedy | None:
        """Add one change after the other until the run fits; return the last try."""
        remedy = None
        for count in range(2, len(changes) + 1):
            remedy = self._outcome(together(changes[:count])) or remedy
            if remedy is not None and remedy.fits:
                break
        return remedy

    def _strongest(self, changes: list[Change]) -> list[Change]:
        """Leave out what decides the same as another change, is no more exact, and saves less."""
        return [
            change
            for change in changes
            if not any(
                other.topics == change.topics
                and other.exact >= change.exact
                and (self._need_bytes(other), changes.index(other))
                < (self._need_bytes(change), changes.index(change))
                for other in changes
            )
        ]

    def _need_bytes(self, change: Change) -> int:
        return next(remedy.need_bytes for remedy in self.found if remedy.name == change.name)


def _compatible(changes: list[Change]) -> list[Change]:
    """Return the first change, and each later one that decides nothing which those before it do."""
    chosen: list[Change] = []
    for change in changes:
        if not any(change.topics & other.topics for other in chosen):
            chosen.append(change)
    return chosen


def _changes(
    plan: TrainingPlan,
    model: nn.Module | None,
    estimate: MemoryEstimate,
    budget_bytes: int,
    *,
    thorough: bool,
) -> Iterator[Change]:
    """Yield the changes that make sense for a plan, in the order of value."""
    if estimate.peak_phase.name == "validation":
        yield from validation_batches(plan, budget_bytes)
    yield from micro_batches(plan, model, budget_bytes)
    yield from checkpointing(model)
    yield from strategies(plan, model, thorough=thorough)
    yield from precisions(plan)
    yield from optimizers(plan)
    if thorough:
        yield from shorter_sequences(plan, budget_bytes)
        yield from adapters(model)
        yield from more_devices(plan, model, budget_bytes)


def _expandable_segments(estimate: MemoryEstimate, budget_bytes: int) -> Remedy | None:
    """Replay the same trace through an allocator whose segments grow."""
    if estimate.events is None:
        return None
    config = AllocatorConfig(expandable_segments=True)
    code = Code(
        statements=('os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"',), imports=("import os",)
    )
    after = minimum_capacity(estimate.events, config) + estimate.outside_allocator_bytes
    return Remedy(
        "expandable_segments",
        "segments that grow",
        "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment",
        after,
        estimate.minimum_device_bytes - after,
        after <= budget_bytes,
        basis="modelled",
        exact=True,
        snippet=code.python(),
        config=code.yaml(),
    )
