"""The validation of a run, read from its loaders: for the callback and the command alike."""

from __future__ import annotations

import math
from typing import Any

from torch.utils._pytree import tree_leaves

from lightning_memprec._batch import BatchUnavailableError, largest_batch
from lightning_memprec.memory.plan import ValidationLoader, ValidationPlan

__all__ = ["plan_validation"]


def plan_validation(
    loaders: Any,
    *,
    sample_batches: int,
    limit: float | None = None,
    sanity_check: bool = True,
    inference_mode: bool = True,
    streams: bool = False,
) -> ValidationPlan:
    """Describe the validation of a run, by the largest of the first batches of each of its loaders.

    Args:
        loaders: What ``val_dataloader`` returned, or Lightning's ``CombinedLoader``.
        sample_batches: How many batches of each loader to look at.
        limit: The Trainer's ``limit_val_batches``: a number of batches, or a fraction of them.
        sanity_check: Whether the Trainer validates before the first step too.
        inference_mode: Whether it validates under ``torch.inference_mode``.
        streams: Read iterable datasets too, where no run follows.

    Raises:
        BatchUnavailableError: If no batch can be had.
    """
    parts = _in_sequence(loaders)
    if not parts:
        raise BatchUnavailableError("there is no validation loader")
    planned = tuple(
        ValidationLoader(
            largest_batch(part, count=sample_batches, streams=streams).batch, _number_of_batches(part, limit)
        )
        for part in parts
    )
    return ValidationPlan(loaders=planned, inference_mode=inference_mode, sanity_check=sanity_check)


def _in_sequence(loaders: Any) -> list[Any]:
    """List what is validated one after the other; loaders that run side by side give one batch."""
    if hasattr(loaders, "flattened") and hasattr(loaders, "iterables"):
        return list(loaders.flattened) if getattr(loaders, "_mode", None) == "sequential" else [loaders]
    # Lightning puts loaders into a `CombinedLoader` of this mode.
    return [loader for loader in tree_leaves(loaders) if loader is not None]


def _number_of_batches(loader: Any, limit: float | None) -> int | None:
    try:
        length: float = len(loader)
    except (
        TypeError,
        NotImplementedError,
        RuntimeError,
    ):  # A stream, or a CombinedLoader before it is opened.
        length = math.inf
    if isinstance(limit, int):
        length = min(length, limit)
    elif limit is not None and not math.isinf(length):
        length = int(length * limit)
    return None if math.isinf(length) else int(length)
