"""What an optimizer or a run cannot do with masters, and why, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_memprec._lightning import misconfiguration
from lightning_memprec._partial_step import is_separable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lightning_memprec.master_weights.store import MasterStore

__all__ = [
    "WHY_NOT_BOTH",
    "refuse_wrappers",
    "unmatched_in_words",
    "why_not_in_backward",
    "why_not_in_chunks",
]

# Bytes as measured in docs/master-weights.md.
WHY_NOT_BOTH = (
    "`low_memory` and `step_in_backward` are two ways to save memory: pass one of them. `low_memory=True` keeps "
    "gradients in half until the step (16 bytes a parameter with AdamW) and goes with clipping, scalers and DDP. "
    "`step_in_backward=True` steps within backward (14 bytes) and goes with none of them."
)


def refuse_wrappers(module: Any, store: MasterStore, optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that step half parameters through another optimizer, with parameter groups of its own.

    Args:
        module: The LightningModule.
        store: Its masters, already connected.
        optimizers: Its optimizers.

    Raises:
        MisconfigurationException: If there is such a one, for example a ``ZeroRedundancyOptimizer``.
    """
    for optimizer in optimizers:
        inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
        if any(p in store.pairs for o in inner for group in o.param_groups for p in group["params"]):
            raise misconfiguration(
                module.trainer,
                f"`{type(optimizer).__name__}` steps the half parameters through an optimizer inside it, which "
                "cannot be given masters. Use the inner optimizer itself or, to shard its state, "
                '`Trainer(strategy="fsdp", precision="bf16-mixed")`.',
            )


def why_not_in_chunks(trainer: Any, module: Any, optimizers: Sequence[Optimizer]) -> str:
    """Say why gradients cannot stay half until the step.

    Args:
        trainer: The Trainer.
        module: The LightningModule.
        optimizers: Its optimizers.
    """
    for optimizer in optimizers:
        if not is_separable(optimizer):
            return (
                f"`{type(optimizer).__name__}` is not known to treat every parameter on its own. "
                "Use an optimizer of `torch.optim` such as AdamW, or drop the option."
            )
    if not module.automatic_optimization:
        return "in manual optimization the steps are the module's own. Drop the option."
    scheduled = any(
        kind.__name__ == "GradientAccumulationScheduler"
        for c in trainer.callbacks
        for kind in type(c).__mro__
    )
    if trainer.accumulate_grad_batches != 1 or scheduled:
        return (
            "gradients of several micro-batches do not add up exactly in half. Use a larger batch, or drop the "
            "option: FP32 gradients take 18 bytes a parameter."
        )
    return ""


def why_not_in_backward(trainer: Any, *, has_scaler: bool, is_ddp: bool) -> str:
    """Say why parameters cannot be stepped within backward.

    Args:
        trainer: The Trainer.
        has_scaler: Whether the loss is scaled.
        is_ddp: Whether gradients are averaged over ranks after they are computed.
    """
    if trainer.gradient_clip_val:
        return "clipping needs all gradients before the first step. Use `low_memory=True` instead."
    if has_scaler:
        return "a scaler must see all gradients before the first step. Use `low_memory=True` instead."
    if is_ddp:
        return "DDP averages gradients after they are computed. Use `low_memory=True` instead."
    return ""


def unmatched_in_words(missing: Mapping[str, str | None], module: str) -> str:
    """Say which names of `keep_fp32` match nothing.

    Args:
        missing: Those names, with the one that was perhaps meant.
        module: Class of the LightningModule.
    """
    meant = ", ".join(f"'{name}'" for name in missing.values() if name is not None)
    return (
        f"`keep_fp32` has {list(missing)}, which match nothing in `{module}`. "
        + (f"Did you mean {meant}? " if meant else "")
        + "Names are those of `named_modules()`, `named_parameters()` and `named_buffers()`, or of classes."
    )
