"""The optimizer: fused kernels without temporaries, and states in 8 bits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.optim import Optimizer

from lightning_memprec._errors import MemPrecError
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.remedies.change import Change
from lightning_memprec.memory.remedies.snippet import Code

__all__ = ["optimizers"]

_TOPIC = frozenset({"optimizer"})


def optimizers(plan: TrainingPlan) -> Iterator[Change]:
    """Yield the ways to run the optimizer with less memory."""
    if plan.device != "cpu":
        yield Change(
            "fused_optimizer",
            "a fused optimizer",
            "fused=True in the optimizer's arguments (or foreach=False)",
            "",
            lambda p: replace(p, adapt_optimizer=_without_foreach),
            exact=True,
            topics=_TOPIC,
            code=Code(remarks=("In configure_optimizers: fused=True among the optimizer's arguments.",)),
        )
    yield Change(
        "eight_bit_optimizer",
        "an 8-bit optimizer",
        "bitsandbytes.optim.AdamW8bit in place of the optimizer",
        "optimizer states rounded to 8 bits in blocks",
        lambda p: replace(p, adapt_optimizer=_eight_bit),
        topics=_TOPIC,
        code=Code(
            remarks=("In configure_optimizers: bitsandbytes.optim.AdamW8bit in place of the optimizer.",)
        ),
    )


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
