"""What would make a run fit: each change is traced in the user's own configuration, none is a fixed percentage."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_memprec._errors import MemPrecError
from lightning_memprec.memory.allocator import minimum_capacity
from lightning_memprec.memory.allocator_config import AllocatorConfig
from lightning_memprec.memory.devices import find_device
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.precision import resolve_precision
from lightning_memprec.memory.result import MemoryEstimate, Remedy
from lightning_memprec.memory.tree import map_tensors, tensors_in

__all__ = ["suggest_remedies"]


# A change that saves less is no help: it is left out.
_WORTHWHILE = 0.01


@dataclass(frozen=True)
class _Change:
    """A remedy before it was tried."""

    name: str
    description: str
    how: str
    cost: str
    apply: Callable[[TrainingPlan], TrainingPlan]


def suggest_remedies(
    plan: TrainingPlan, estimate: MemoryEstimate, capacity_bytes: int, *, safety_margin: float = 0.0
) -> tuple[Remedy, ...]:
    """Try the changes that are known to help, and say what the run would need with each.

    Args:
        plan: The run that was estimated.
        estimate: What it needs.
        capacity_bytes: What the device offers, in bytes.
        safety_margin: Fraction of the capacity to keep free, in [0, 1).

    Returns:
        Remedies in the order in which to try them; those that do not save anything, or cannot be traced, are
        left out. If no single one makes the run fit, the last one combines them.
    """
    budget_bytes = int(capacity_bytes * (1.0 - safety_margin))
    need_bytes = estimate.minimum_device_bytes
    found: list[Remedy] = []
    combined = plan
    parts: list[_Change] = []
    changes = list(_changes(plan, budget_bytes))
    for change in changes:
        remedy = _try(change, plan, need_bytes, budget_bytes)
        if remedy is not None:
            found.append(remedy)
    if plan.device != "cpu" and (remedy := _expandable_segments(estimate, budget_bytes)) is not None:
        found.append(remedy)
    if not any(remedy.fits for remedy in found):
        for change in changes:
            if change.name not in {remedy.name for remedy in found} or _excluded(change.name, parts):
                continue
            combined = change.apply(combined)
            parts.append(change)
            if len(parts) < 2:
                continue
            together = _Change(
                "combined",
                " and ".join(part.description for part in parts),
                "; ".join(part.how for part in parts),
                "; ".join(part.cost for part in parts if part.cost),
                lambda _, changed=combined: changed,  # type: ignore[misc]
            )
            remedy = _try(together, plan, need_bytes, budget_bytes)
            if remedy is not None and remedy.fits:
                return (*found, remedy)
        if len(parts) > 1 and remedy is not None:
            found.append(remedy)
    return tuple(found)


def _excluded(name: str, parts: list[_Change]) -> bool:
    """Two precisions, or two ways to run an optimizer, do not go together."""
    rivals = ({"mixed_precision", "master_weights"}, {"fused_optimizer", "eight_bit_optimizer"})
    taken = {part.name for part in parts}
    return any(name in group and taken & group for group in rivals)


def _try(change: _Change, plan: TrainingPlan, need_bytes: int, budget_bytes: int) -> Remedy | None:
    try:
        after = estimate_plan(change.apply(plan)).minimum_device_bytes
    except MemPrecError:
        return None
    if need_bytes - after < _WORTHWHILE * need_bytes:
        return None
    return Remedy(
        change.name,
        change.description,
        change.how,
        after,
        need_bytes - after,
        after <= budget_bytes,
        cost=change.cost,
    )


def _expandable_segments(estimate: MemoryEstimate, budget_bytes: int) -> Remedy | None:
    """Replay the same trace through an allocator whose segments grow."""
    if estimate.events is None:
        return None
    config = AllocatorConfig(expandable_segments=True)
    after = minimum_capacity(estimate.events, config) + estimate.outside_allocator_bytes
    saving = estimate.minimum_device_bytes - after
    if saving < _WORTHWHILE * estimate.minimum_device_bytes:
        return None
    return Remedy(
        "expandable_segments",
        "segments that grow",
        "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment",
        after,
        saving,
        after <= budget_bytes,
        basis="modelled",
    )


def _changes(plan: TrainingPlan, budget_bytes: int) -> Iterator[_Change]:
    """Yield the changes that make sense for a plan, in the order of value."""
    batch = plan.batch() if callable(plan.batch) else plan.batch
    size = _batch_size(batch)
    if size is not None and size > 1:
        yield _micro_batch(replace(plan, batch=batch), size, budget_bytes)
    yield _Change(
        "activation_checkpointing",
        "activation checkpointing",
        _checkpointing_line(plan.module),
        "20 to 30 % more time a step",
        _with_checkpointing,
    )
    precision = resolve_precision(plan.precision)
    # Cards before Ampere have no native bfloat16.
    spec = None if plan.device in ("cpu", "cuda") else find_device(plan.device)
    half = "bf16" if spec is None or spec.native_bf16 else "16"
    if precision.name == "32-true":
        yield _Change(
            "mixed_precision",
            "mixed precision",
            f'Trainer(precision="{half}-mixed")',
            "matrix products in half precision",
            lambda p: replace(p, precision=f"{half}-mixed"),
        )
    if precision.parameter_dtype is None:
        yield _Change(
            "master_weights",
            "half-precision weights with FP32 masters",
            f'Trainer(precision="{half}-true") and an optimizer that keeps FP32 masters',
            "forward and backward in half precision",
            lambda p: replace(p, precision=f"{half}-master"),
        )
    yield _Change(
        "eight_bit_optimizer",
        "an 8-bit optimizer",
        "bitsandbytes.optim.AdamW8bit in place of the optimizer",
        "optimizer states rounded to 8 bits in blocks",
        lambda p: replace(p, adapt_optimizer=_eight_bit),
    )
    if plan.device != "cpu":
        yield _Change(
            "fused_optimizer",
            "a fused optimizer",
            "fused=True in the optimizer's arguments (or foreach=False)",
            "",
            lambda p: replace(p, adapt_optimizer=_without_foreach),
        )


def _batch_size(batch: Any) -> int | None:
    """Return the most common first dimension of the tensors in a batch."""
    sizes = Counter(tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim > 0)
    return sizes.most_common(1)[0][0] if sizes else None


def _with_batch(plan: TrainingPlan, size: int, micro: int) -> TrainingPlan:
    batch = map_tensors(lambda t: t[:micro] if t.ndim > 0 and t.shape[0] == size else t, plan.batch)
    return replace(plan, batch=batch, accumulate_grad_batches=plan.accumulate_grad_batches * (size // micro))


def _micro_batch(plan: TrainingPlan, size: int, budget_bytes: int) -> _Change:
    """Find the largest micro-batch that fits: a straight line through two traces, then divisors below it."""
    divisors = [d for d in range(size // 2, 0, -1) if size % d == 0]

    def need_bytes(micro: int) -> int | None:
        # More than two micro-batches need no more memory than two: traced with two to save time.
        changed = replace(_with_batch(plan, size, micro), accumulate_grad_batches=2)
        try:
            return estimate_plan(changed).minimum_device_bytes
        except MemPrecError:
            return None

    # Batch norm refuses a single sample: then the next size is the smallest.
    tried = ((micro, need_bytes(micro)) for micro in divisors[:-3:-1])
    micro, smallest = next(((m, need) for m, need in tried if need is not None), (divisors[-1], None))
    largest = need_bytes(divisors[0])
    if smallest is not None and largest is not None and divisors[0] > micro:
        slope = (largest - smallest) / (divisors[0] - micro)
        fitting = [d for d in divisors if d >= micro and smallest + slope * (d - micro) <= budget_bytes]
        micro = fitting[0] if fitting else micro
    accumulate = plan.accumulate_grad_batches * (size // micro)
    return _Change(
        "micro_batch",
        f"a micro-batch of {micro} with {accumulate} accumulation steps",
        f"batch_size={micro}, Trainer(accumulate_grad_batches={accumulate})",
        f"same effective batch in more, smaller steps{_statistics_note(plan.module)}",
        lambda p: replace(_with_batch(replace(p, batch=plan.batch), size, micro), accumulate_grad_batches=2),
    )


def _statistics_note(module: Any) -> str:
    normalised = isinstance(module, nn.Module) and any(isinstance(m, _BatchNorm) for m in module.modules())
    return "; batch norm sees fewer samples at a time" if normalised else ""


def _with_checkpointing(plan: TrainingPlan) -> TrainingPlan:
    def prepare(module: nn.Module) -> None:
        if plan.prepare is not None:
            plan.prepare(module)
        if not _enable_checkpointing(module):
            raise MemPrecError("The module offers no activation checkpointing.")

    return replace(plan, prepare=prepare)


def _checkpointing_switches(module: nn.Module) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the call, as text and as a callable, that switches on each submodule's own checkpointing."""
    for name, child in module.named_modules():
        # transformers' models, then timm's.
        for switch in ("gradient_checkpointing_enable", "set_grad_checkpointing"):
            enable = getattr(child, switch, None)
            if callable(enable) and getattr(child, "supports_gradient_checkpointing", True):
                yield f"self.{name}.{switch}()" if name else f"model.{switch}()", enable
                break


def _checkpointing_line(module: Any) -> str:
    first = next(_checkpointing_switches(module), None) if isinstance(module, nn.Module) else None
    return "the model's `gradient_checkpointing_enable()`" if first is None else first[0]


def _enable_checkpointing(module: nn.Module) -> bool:
    switches = list(_checkpointing_switches(module))
    for _, enable in switches:
        enable()
    return bool(switches)


def _eight_bit(optimizer: Optimizer) -> Optimizer:
    """Return bitsandbytes' 8-bit twin of an Adam-like or momentum optimizer, with the same groups."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise MemPrecError(f"No 8-bit twin is known for `{type(optimizer).__name__}`.")
    # Importing it warns about kernels for other devices; the run itself will say so if it matters.
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import bitsandbytes
    finally:
        logger.setLevel(level)
    twin: Optimizer = bitsandbytes.optim.AdamW8bit([{"params": g["params"]} for g in optimizer.param_groups])
    return twin


def _without_foreach(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        if "foreach" not in group or group.get("fused"):
            raise MemPrecError(f"`{type(optimizer).__name__}` has no foreach temporaries to save.")
        group["foreach"] = False
        if "fused" in group:
            group["fused"] = True
    return optimizer
