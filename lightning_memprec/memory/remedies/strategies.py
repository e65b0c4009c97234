"""Several devices: gradients in DDP's buckets, or the whole state shared out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.precision import resolve_precision
from lightning_memprec.memory.remedies.change import Change
from lightning_memprec.memory.sharding.strategies import DDP, resolve_strategy

__all__ = ["strategies"]


def strategies(plan: TrainingPlan) -> Iterator[Change]:
    """Yield what DDP could do without, where the run uses it."""
    devices = plan.num_devices * plan.num_nodes
    given = resolve_strategy(plan.strategy, devices)
    if devices < 2 or not isinstance(given, DDP):
        return
    if not given.gradient_as_bucket_view:
        yield Change(
            "gradient_as_bucket_view",
            "gradients inside DDP's buckets",
            "Trainer(strategy=DDPStrategy(gradient_as_bucket_view=True))",
            "",
            lambda p: replace(p, strategy=replace(given, gradient_as_bucket_view=True)),
            exact=True,
            topics=frozenset({"strategy"}),
        )
    # The plugin with FP32 masters refuses to run under FSDP, which has its own.
    if not resolve_precision(plan.precision).master_weights:
        yield Change(
            "fully_sharded",
            f"FSDP over the {devices} devices",
            "Trainer(strategy=FSDPStrategy(auto_wrap_policy={TheClassOfYourBlocks}))",
            "weights are gathered block by block",
            lambda p: replace(p, strategy="fsdp"),
            exact=True,
            topics=frozenset({"strategy", "masters"}),
        )
