"""What would make a run fit: each change is traced in the user's own configuration, none is a fixed percentage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_memprec._devices import find_device
from lightning_memprec._errors import MemPrecError
from lightning_memprec.memory.allocator import minimum_capacity
from lightning_memprec.memory.allocator_config import AllocatorConfig
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.largest_batch import batch_size_of, resized
from lightning_memprec.memory.plan import TrainingPlan, ValidationPlan
from lightning_memprec.memory.precision import resolve_precision
from lightning_memprec.memory.result import MemoryEstimate, Remedy

__all__ = ["suggest_remedies"]


# A change that saves less is no help: it is left out.
_WORTHWHILE = 0.01
_LOW_MEMORY = "master_weights_low_memory"


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
    changes = list(_changes(plan, budget_bytes))
    if estimate.peak_phase.name == "validation" and plan.validation is not None:
        changes = [*_validation_batch(plan, plan.validation, budget_bytes), *changes]
    for change in changes:
        if change.name == _LOW_MEMORY and any(r.name == "master_weights" and r.fits for r in found):
            continue  # It costs speed, and is not needed.
        remedy = _try(change, plan, need_bytes, budget_bytes)
        if remedy is not None:
            found.append(remedy)
    if plan.device != "cpu" and (remedy := _expandable_segments(estimate, budget_bytes)) is not None:
        found.append(remedy)
    if not any(remedy.fits for remedy in found):
        helpful = {remedy.name for remedy in found}
        together = _combined([c for c in changes if c.name in helpful], plan, need_bytes, budget_bytes)
        found += [together] if together is not None else []
    return tuple(found)


def _combined(
    changes: list[_Change], plan: TrainingPlan, need_bytes: int, budget_bytes: int
) -> Remedy | None:
    """Make one change after the other until the run fits; return the last try."""
    combined, remedy = plan, None
    parts: list[_Change] = []
    for change in changes:
        if _excluded(change.name, parts):
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
            break
    return remedy


def _excluded(name: str, parts: list[_Change]) -> bool:
    """Two precisions, or two ways to run an optimizer, do not go together; nor do chunks and accumulation."""
    rivals = (
        {"mixed_precision", "master_weights", _LOW_MEMORY},
        {"fused_optimizer", "eight_bit_optimizer"},
        {"eight_bit_optimizer", _LOW_MEMORY},
        {"micro_batch", _LOW_MEMORY},
    )
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
    size = batch_size_of(batch)
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
            f'Trainer(plugins=[MasterWeightPrecision("{half}-master")]), without `precision`',
            "forward and backward in half precision",
            lambda p: replace(p, precision=f"{half}-master"),
        )
    name = precision.name if precision.master_weights else f"{half}-master"
    may = precision.master_weights or precision.parameter_dtype is None
    # Gradients of several micro-batches do not add up in half: the plugin refuses.
    if may and not plan.masters.low_memory and plan.accumulate_grad_batches == 1:
        yield _Change(
            _LOW_MEMORY,
            "half-precision weights with FP32 masters, stepped in chunks",
            f'Trainer(plugins=[MasterWeightPrecision("{name}", low_memory=True)]), without `precision`',
            "forward and backward in half precision, more and smaller optimizer kernels",
            lambda p: replace(p, precision=name, masters=replace(p.masters, low_memory=True)),
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


def _with_batch(plan: TrainingPlan, size: int, micro: int) -> TrainingPlan:
    batch = resized(plan.batch, size, micro)
    return replace(plan, batch=batch, accumulate_grad_batches=plan.accumulate_grad_batches * (size // micro))


def _with_validation_batch(validation: ValidationPlan, most: int) -> ValidationPlan:
    """Cut the batches of all loaders to a size; each validation then takes more of them."""
    loaders = []
    for loader in validation.loaders:
        size = batch_size_of(loader.batch)
        if size is not None and size > most:
            count = loader.num_batches
            loader = replace(
                loader,
                batch=resized(loader.batch, size, most),
                num_batches=None if count is None else -(-count * size // most),
            )
        loaders.append(loader)
    return replace(validation, loaders=tuple(loaders))


def _validation_batch(plan: TrainingPlan, validation: ValidationPlan, budget_bytes: int) -> Iterator[_Change]:
    """Halve the validation batch until the run fits, or one sample is left: some traces, by bisection."""
    largest = max((batch_size_of(loader.batch) or 0 for loader in validation.loaders), default=0)
    halved = [largest >> k for k in range(largest.bit_length() - 1, 0, -1)]  # 1, 2, 4, ...

    def changed(p: TrainingPlan, size: int) -> TrainingPlan:
        return replace(p, validation=_with_validation_batch(validation, size))

    fitting, untried = 0, len(halved)
    while untried - fitting > 1:
        middle = (fitting + untried) // 2
        try:
            fits = estimate_plan(changed(plan, halved[middle])).minimum_device_bytes <= budget_bytes
        except MemPrecError:
            fits = False
        fitting, untried = (middle, untried) if fits else (fitting, middle)
    if halved:
        size = halved[fitting]
        yield _Change(
            "validation_batch",
            f"a validation batch of {size}",
            f"batch_size={size} in `val_dataloader`",
            "more, smaller steps of validation",
            lambda p: changed(p, size),
        )


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
