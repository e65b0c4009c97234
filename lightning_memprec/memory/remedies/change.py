"""One change to a run, and what the run needs with it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from lightning_memprec._errors import MemPrecError
from lightning_memprec._units import format_bytes
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.remedies.snippet import Code
from lightning_memprec.memory.result import Remedy

__all__ = ["Change", "Need", "need_of", "prepared", "remedy_from", "skeleton", "together"]


@dataclass(frozen=True)
class Change:
    """A remedy before it was tried.

    Args:
        name: Short, stable identifier.
        description: What to change, in words that complete "Try …".
        how: The line of code or YAML that does it.
        cost: What is paid for it, in words.
        apply: Returns the changed plan.
        exact: Whether training computes the same, rounding aside.
        topics: What it decides. Two changes with a topic in common exclude each other.
        same_work: Whether the changed plan does the same steps on the same samples, so that operations can be compared.
        code: The same as ``how``, to paste.
    """

    name: str
    description: str
    how: str
    cost: str
    apply: Callable[[TrainingPlan], TrainingPlan]
    exact: bool = False
    topics: frozenset[str] = frozenset()
    same_work: bool = True
    code: Code = field(default_factory=Code)


@dataclass(frozen=True)
class Need:
    """What a run was traced to need.

    Args:
        device_bytes: ``minimum_device_bytes`` of its estimate.
        flops: Floating-point operations of the trace's matrix products, convolutions and attention.
        offloaded_bytes: What the devices of a node keep in its memory for the whole run.
    """

    device_bytes: int
    flops: int
    offloaded_bytes: int = 0


def skeleton(plan: TrainingPlan) -> nn.Module | None:
    """Return the plan's module to look at; one that is yet to be built is built without storage."""
    if isinstance(plan.module, nn.Module):
        return plan.module
    try:
        with torch.device("meta"):
            return plan.module()
    except Exception:  # It was traced: here, outside of the trace, it may miss what it needs.
        return None


def need_of(plan: TrainingPlan) -> Need | None:
    """Trace a plan; ``None`` if it cannot be traced."""
    try:
        estimate = estimate_plan(plan)
    except MemPrecError:
        return None
    host = estimate.host
    return Need(
        estimate.minimum_device_bytes,
        estimate.events.flops if estimate.events else 0,
        host.offloaded_bytes * host.ranks_per_node if host is not None else 0,
    )


def remedy_from(change: Change, before: Need, after: Need, budget_bytes: int) -> Remedy:
    """Put a change and its outcome together."""
    extra = after.flops / before.flops - 1.0 if change.same_work and before.flops else 0.0
    # Below one percent it is in the noise of what is not counted.
    counted = f"{extra:.0%} more compute" if extra >= 0.01 else ""
    on_host = f"{format_bytes(after.offloaded_bytes)} of each node's memory" if after.offloaded_bytes else ""
    return Remedy(
        change.name,
        change.description,
        change.how,
        after.device_bytes,
        before.device_bytes - after.device_bytes,
        after.device_bytes <= budget_bytes,
        cost="; ".join(filter(None, (change.cost, on_host, counted))),
        exact=change.exact,
        snippet=change.code.python(),
        config=change.code.yaml(),
    )


def together(parts: list[Change], name: str = "combined") -> Change:
    """Make one change of several; the first is applied first."""

    def apply(plan: TrainingPlan) -> TrainingPlan:
        for part in parts:
            plan = part.apply(plan)
        return plan

    return Change(
        name,
        " and ".join(part.description for part in parts),
        "; ".join(part.how for part in parts),
        "; ".join(part.cost for part in parts if part.cost),
        apply,
        exact=all(part.exact for part in parts),
        topics=frozenset().union(*(part.topics for part in parts)),
        same_work=all(part.same_work for part in parts),
        code=functools.reduce(operator.or_, (part.code for part in parts)),
    )


def prepared(plan: TrainingPlan, prepare: Callable[[nn.Module], None]) -> TrainingPlan:
    """Return a plan that does one thing more to the copy before its precision is converted."""

    def both(module: nn.Module) -> None:
        if plan.prepare is not None:
            plan.prepare(module)
        prepare(module)

    return replace(plan, prepare=both)
