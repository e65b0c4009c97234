"""What the plugin must know of DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from lightning_memprec._lightning import LightningModule

__all__ = ["ddp_of", "reduces_later"]


def ddp_of(module: LightningModule) -> DistributedDataParallel | None:
    """Return the wrapper of a LightningModule in a run, or ``None`` where there is none."""
    model = module.trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def reduces_later(ddp: DistributedDataParallel, module: LightningModule) -> bool:
    """Tell whether gradients are still to be reduced: a static graph's first ones, in manual optimization."""
    strategy: Any = module.trainer.strategy
    return bool(
        ddp.static_graph
        and not module.automatic_optimization
        and not getattr(strategy, "_pl_static_graph_delay_done", True)
    )
