"""Who may hold the memory of a run that grows, and what is said about it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_leaves

from lightning_memprec._units import format_bytes
from lightning_memprec.memory.observe.holders import Holding, grown, holdings

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["holder_in_words", "holders_of"]

_NOT_FOUND = (
    "No attribute of the module, its file, the callbacks, the loggers or the data was found to grow. "
    "`torch.cuda.memory._record_memory_history()` and `torch.cuda.memory._dump_snapshot()` show which lines allocate."
)


def holders_of(trainer: Any, module: Any, monitor: object) -> dict[str, Holding]:
    """List what everything that belongs to a run holds.

    Args:
        trainer: The Trainer.
        module: Its LightningModule.
        monitor: Who asks; what it keeps itself is left out.
    """
    code = sys.modules.get(type(module).__module__)
    others = [*trainer.callbacks, *trainer.loggers, trainer.datamodule, *_datasets(trainer)]
    roots: dict[str, object] = {type(module).__name__: module}
    for other in others:
        if other is not None and other is not monitor:
            roots.setdefault(type(other).__name__, other)
    roots["Trainer.callback_metrics"] = trainer.callback_metrics
    if code is not None:
        roots[code.__name__] = vars(code)
    skip = (
        trainer,
        monitor,
        trainer.strategy,
        trainer.precision_plugin,
        trainer.fit_loop,
        *trainer.optimizers,
    )
    return holdings(roots, skip)


def _datasets(trainer: Any) -> list[Any]:
    loaders = tree_leaves(trainer.train_dataloader)
    return [dataset for loader in loaders if (dataset := getattr(loader, "dataset", None)) is not None]


def holder_in_words(before: Mapping[str, Holding], after: Mapping[str, Holding]) -> str:
    """Say who has grown, and how to end it.

    Args:
        before: What was held a sample earlier.
        after: What is held now.
    """
    found = grown(before, after)
    if found is None:
        return _NOT_FOUND
    name, holding = found
    more = holding.size_bytes - before.get(name, Holding()).size_bytes
    size = f", {format_bytes(more)} more than at the last look" if more else ""
    text = f"`{name}` holds {holding.in_words()}{size}. "
    if holding.graphs:
        return text + "Keep `x.detach()` or `x.item()` instead of `x`, or empty it at the end of the epoch."
    return (
        text
        + "Empty it at the end of the epoch, or keep less of it; if it is a cache, it ends when it is full."
    )
