"""The phases of a run around its steps, and what the allocator holds in each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from lightning_memprec.memory.events import MemoryEvents
from lightning_memprec.memory.reserve import Reserve
from lightning_memprec.memory.result import PhasePeak

__all__ = ["with_outer_phases", "with_reserved"]


def with_outer_phases(
    phases: Iterable[PhasePeak],
    events: MemoryEvents,
    *,
    granularity_bytes: int = 1,
    sanity_check: bool = False,
) -> tuple[PhasePeak, ...]:
    """Add the phases that need no trace of their own.

    - ``"sanity_validation"``: a validation before there are optimizer states. In both, gradients are released.
    - ``"resume"``: Lightning loads the file to the host and copies the optimizer states to the device before the
      first forward pass, beside what set-up made (``Strategy.load_optimizer_state_dict``).

    Args:
        phases: The phases that were traced, in order.
        events: What was recorded.
        granularity_bytes: Every storage is rounded up to a multiple of it.
        sanity_check: Whether the run validates before its first step.
    """
    traced = list(phases)
    states_bytes = workspaces_bytes = gradients_bytes = 0
    for record in events.storages:
        if record.death == -1 and record.phase > 0:
            size_bytes = -(-record.size_bytes // granularity_bytes) * granularity_bytes
            if record.category == "optimizer states":
                states_bytes += size_bytes
            elif record.category == "gradients":  # Those of FP32 masters, which outlive the module's.
                gradients_bytes += size_bytes
            elif record.category == "workspaces" and events.phases[record.phase][0] == "backward":
                workspaces_bytes += size_bytes  # of the thread that runs backward passes
    peaks = {phase.name: phase.peak_allocated_bytes for phase in traced}
    if sanity_check and "validation" in peaks:
        before_states = peaks["validation"] - states_bytes - gradients_bytes - workspaces_bytes
        traced.insert(1, PhasePeak("sanity_validation", -1, before_states))
    if states_bytes:
        traced.append(PhasePeak("resume", -1, peaks["setup"] + states_bytes))
    return tuple(traced)


def with_reserved(phases: Iterable[PhasePeak], reserve: Reserve) -> tuple[PhasePeak, ...]:
    """Say what the caching allocator holds at most in each traced phase.

    Args:
        phases: Peaks of the phases.
        reserve: What a replay found. Phases that it does not have stay as they are, as do all if there was none.
    """
    reserved: dict[tuple[str, int], int] = {}
    ends = [first for _, _, first in reserve.phases[1:]] + [math.inf]
    position = held = 0
    for (name, step, _), end in zip(reserve.phases, ends, strict=False):
        most = held  # A phase begins with what was held before it.
        while position < len(reserve.changes) and reserve.changes[position][0] < end:
            held = reserve.changes[position][1]
            most, position = max(most, held), position + 1
        reserved[name, step] = max(most, reserved.get((name, step), 0))
    return tuple(replace(p, peak_reserved_bytes=reserved.get((p.name, p.step))) for p in phases)
