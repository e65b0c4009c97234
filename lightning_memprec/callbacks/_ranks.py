"""One decision for all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

__all__ = ["Finding", "gather", "merge"]

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """What one rank found out.

    Args:
        need_bytes: Estimated need, ``None`` if there is no estimate.
        capacity_bytes: What its device offers, ``None`` if unknown.
        problem: Why there is no estimate; empty if there is one.
        next_hook: Hook in which another attempt makes sense, ``None`` if none does.
    """

    need_bytes: int | None = None
    capacity_bytes: int | None = None
    problem: str = ""
    next_hook: str | None = None


def gather(value: T) -> list[T]:
    """Return every rank's value, in the order of ranks; a list of one outside a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def merge(findings: list[Finding], order: tuple[str, ...]) -> Finding:
    """Reduce the findings of all ranks to the one by which every rank acts.

    A problem on one rank is a problem for all, and all wait for the latest hook that any of them needs.
    Otherwise the rank with the least headroom decides.

    Args:
        findings: One finding a rank.
        order: Hooks in the order in which they come.
    """
    problems = [finding for finding in findings if finding.problem]
    if problems:
        hooks = [finding.next_hook for finding in problems]
        latest = None if None in hooks else max(hooks, key=lambda hook: order.index(hook or ""))
        return Finding(problem=problems[0].problem, next_hook=latest)
    return min(findings, key=_headroom)


def _headroom(finding: Finding) -> float:
    if finding.need_bytes is None or finding.capacity_bytes is None:
        return float("inf")
    return finding.capacity_bytes - finding.need_bytes
