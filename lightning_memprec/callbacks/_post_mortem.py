"""What can still be learned of a run whose memory ran out, without taking any on its device."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_memprec._isolation import unchanged
from lightning_memprec._lightning import raw_optimizer
from lightning_memprec.callbacks._capacity import choose_target
from lightning_memprec.callbacks._child import isolated
from lightning_memprec.callbacks._trainer_plan import is_sharded, plan_from_trainer
from lightning_memprec.memory._location import error_location
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.evaluation import TimeLimit as TimeLimit
from lightning_memprec.memory.observe.fragmentation import environment_line
from lightning_memprec.memory.observe.parts import measure_parts
from lightning_memprec.memory.post_mortem_report import PostMortem, largest_sites
from lightning_memprec.memory.remedies import suggest_remedies
from lightning_memprec.memory.tree import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_memprec._lightning import LightningModule, Trainer
    from lightning_memprec.memory.post_mortem import MemoryShortage
    from lightning_memprec.memory.result import MemoryEstimate, Remedy

__all__ = ["Moment", "examine", "host_room"]

# In which the batch at hand is one of training.
_STEP_PHASES = ("forward pass", "backward pass", "optimizer step")


@dataclass(frozen=True)
class Moment:
    """Where the run was.

    Args:
        phase: What it was doing, in words.
        batch: The batch on which it was; ``None`` for none.
        batch_idx: Its index.
        compared: The batch beside those before it, in words.
        host_room_bytes: What the process could still take of the host when the run began; ``None`` if unknown.
    """

    phase: str
    batch: Any
    batch_idx: int | None
    compared: str
    host_room_bytes: int | None


def examine(
    trainer: Trainer,
    pl_module: LightningModule,
    exception: BaseException,
    shortage: MemoryShortage,
    moment: Moment,
    *,
    time_limit_s: float | None,
) -> PostMortem:
    """Gather what is known; nothing is allocated on the device, and no other rank is waited for.

    Args:
        trainer: The Trainer in its ``on_exception`` hook.
        pl_module: Its module.
        exception: How the run ends.
        shortage: What it says.
        moment: Where the run was.
        time_limit_s: Seconds for the search for what would have fitted; ``None`` for none.
    """
    optimizers = [raw_optimizer(optimizer) for optimizer in trainer.optimizers]
    held: Mapping[str, int] = _or_default(
        {}, lambda: measure_parts(pl_module, optimizers, torch.device(shortage.device_type))
    )
    capacity_bytes = _capacity(shortage, held, moment.host_room_bytes)
    predicted: MemoryEstimate | None = None
    remedies: tuple[Remedy, ...] = ()
    if moment.phase in _STEP_PHASES and time_limit_s is not None and not is_sharded(trainer):
        limit_s = time_limit_s
        predicted, remedies = _or_default(
            (None, ()), lambda: _estimate(trainer, pl_module, exception, moment, capacity_bytes, limit_s)
        )
    on_cuda = shortage.device_type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    stats = _or_default({}, torch.cuda.memory_stats) if on_cuda else {}
    return PostMortem(
        phase=_phase_of(exception, moment.phase),
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        batch_idx=moment.batch_idx,
        rank=trainer.global_rank,
        location=error_location(exception),
        shortage=shortage,
        batch=moment.compared,
        held=held,
        sites=tuple(largest_sites(_or_default([], torch.cuda.memory_snapshot))) if on_cuda else (),
        retries=stats.get("num_alloc_retries"),
        predicted=predicted,
        capacity_bytes=capacity_bytes,
        remedies=remedies,
        setting=environment_line() if shortage.device_type == "cuda" else None,
    )


def _or_default(default: Any, function: Callable[[], Any]) -> Any:
    """Call what may fail in the state in which the run is now."""
    try:
        return function()
    except Exception:
        return default


def _estimate(
    trainer: Trainer,
    pl_module: LightningModule,
    exception: BaseException,
    moment: Moment,
    capacity_bytes: int | None,
    time_limit_s: float,
) -> tuple[MemoryEstimate, tuple[Remedy, ...]]:
    """Trace the step that failed on tensors without storage, and the changes that could help."""
    device = choose_target(None, None, trainer.strategy.root_device).estimate_for
    batch = map_tensors(lambda t: torch.empty_like(t, device="meta"), moment.batch)
    here = os.getpid()

    def search() -> tuple[MemoryEstimate, tuple[Remedy, ...]]:
        if os.getpid() != here:
            # The step that failed still holds its tensors; a child needs the room, and nobody looks into it.
            traceback.clear_frames(exception.__traceback__)
        with unchanged(pl_module, skip=(trainer, *getattr(trainer, "callbacks", ()))):
            plan = plan_from_trainer(trainer, pl_module, batch, device=device, set_up=True, on_device=True)
            estimate = estimate_plan(plan)
            if capacity_bytes is None or estimate.minimum_device_bytes <= capacity_bytes:
                return estimate, ()
            # Where autograd cannot run after a fork, no child can be ended: what was found by then counts.
            with TimeLimit(time_limit_s):
                return estimate, suggest_remedies(plan, estimate, capacity_bytes)

    return isolated(search, time_limit_s=2 * time_limit_s)


def _phase_of(exception: BaseException, phase: str) -> str:
    """Tell the saving of a checkpoint from the loading of the next batch, which no hook does."""
    names = {frame.name for frame in traceback.extract_tb(exception.__traceback__)}
    return "saving a checkpoint" if "save_checkpoint" in names else phase


def _capacity(shortage: MemoryShortage, held: Mapping[str, int], host_room_bytes: int | None) -> int | None:
    """Return what this run could have had on the device."""
    if shortage.allowed_bytes is not None:
        return shortage.allowed_bytes
    if shortage.total_bytes is not None:
        return shortage.total_bytes - (shortage.others_bytes or 0)
    if shortage.device_type == "cpu" and host_room_bytes is not None:
        return host_room_bytes + held.get("parameters", 0) + held.get("buffers", 0)
    return None


def host_room() -> int | None:
    """Return what this process can still take of the machine's memory, or of its address space if that is limited."""
    if sys.platform != "linux":
        return None
    import resource

    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return available
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return min(available, limit - pages * resource.getpagesize())
    except (OSError, ValueError, StopIteration):  # No /proc in some sandboxes.
        return None
