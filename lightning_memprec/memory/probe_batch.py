"""Batches for a probe: real tensors, cut to their first samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_memprec.memory.largest_batch import batch_size_of, resized
from lightning_memprec.memory.tree import map_tensors, tensors_in

__all__ = ["cut", "samples_in", "with_contents"]


def samples_in(batch: Any) -> int | None:
    """Return the number of samples of a batch; ``None`` if nothing tells.

    A batch of lists, as detection models take it, has one sample an entry; any other the most common first dimension
    of its tensors.

    Example:
        >>> images = [torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)]
        >>> samples_in((images, [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}]))
        2
        >>> samples_in(torch.zeros(16, 3, 8, 8))
        16
    """
    lists = _sample_lists(batch)
    return len(lists[0]) if lists else batch_size_of(batch)


def cut(batch: Any, wanted: int) -> Any:
    """Return a copy of the first samples of a batch."""
    size = samples_in(batch)
    if size is None or wanted >= size:
        return map_tensors(_copy, batch)
    if not _sample_lists(batch):
        return map_tensors(_copy, _without_entries(resized(batch, size, wanted), size, wanted))
    if isinstance(batch, Mapping):
        return map_tensors(_copy, {key: value[:wanted] for key, value in batch.items()})
    return map_tensors(_copy, type(batch)([value[:wanted] for value in batch]))


def with_contents(batch: Any) -> Any:
    """Give tensors that have none (those of a batch in words) the contents 0, which are valid indices and classes."""
    return map_tensors(lambda t: torch.zeros_like(t, device="cpu") if t.is_meta else t, batch)


def _without_entries(batch: Any, size: int, wanted: int) -> Any:
    """Cut the lists of a batch that hold one plain entry a sample, such as texts or names of files."""
    fields = (
        list(batch.items()) if isinstance(batch, dict) else list(enumerate(batch)) if _is_plain(batch) else []
    )
    kept = [
        (k, v[:wanted] if _is_plain(v) and len(v) == size and not tensors_in(v) else v) for k, v in fields
    ]
    if isinstance(batch, dict):
        return dict(kept)
    return type(batch)(value for _, value in kept) if fields else batch


def _is_plain(value: Any) -> bool:
    return type(value) in (list, tuple)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _sample_lists(batch: Any) -> list[list[Any]]:
    """Return the fields of a batch if each is a list with one entry a sample.

    A list may also hold whole tensors, such as two views of the same images: these have one shape and no names.
    """
    fields = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(fields, (list, tuple)) or not fields:
        return []
    if not all(isinstance(field, list) and field for field in fields) or len({len(f) for f in fields}) > 1:
        return []
    entries = [entry for field in fields for entry in field]
    shapes = [{tensor.shape for entry in field for tensor in tensors_in(entry)} for field in fields]
    per_sample = any(isinstance(entry, Mapping) for entry in entries) or any(len(s) > 1 for s in shapes)
    return list(fields) if per_sample and any(shapes) else []
