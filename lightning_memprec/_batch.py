"""A batch for the trace: from a data loader without opening it twice, or from a written description."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_memprec._isolation import unchanged

__all__ = ["BatchUnavailableError", "SampledBatch", "first_batch", "largest_batch", "parse_batch_spec"]

# A batch that takes seconds to read must not hold up the start of a run.
_TIME_LIMIT_S = 5.0

_LEAF = re.compile(r"\s*(?P<dtype>\w+)\s*\[(?P<shape>[\d\s,]*)\]\s*(?:=\s*(?P<value>-?\d+(?:\.\d+)?))?\s*")


class BatchUnavailableError(Exception):
    """No batch can be had without changing the data that the run will see; the message says why."""


@dataclass(frozen=True)
class SampledBatch:
    """The largest of the batches that were looked at.

    Args:
        batch: The batch as the loader would have collated it.
        index: Its number in the order of the data, counted from 0.
        looked_at: How many batches were looked at.
    """

    batch: Any
    index: int
    looked_at: int

    def describe(self, loader: str) -> str:
        """Say which batch of a loader it is, such as ``"the train loader"``."""
        if self.looked_at == 1:
            return f"the first batch of {loader}"
        if self.index == 0:
            return f"the first batch of {loader} (of {self.looked_at}, none is larger)"
        return f"the largest of the first {self.looked_at} batches (index {self.index}) of {loader}"


def first_batch(loaders: Any, *, streams: bool = False) -> Any:
    """Read the first batch of a loader; see :func:`largest_batch`.

    Example:
        >>> first_batch(DataLoader(list(range(6)), batch_size=2))
        tensor([0, 1])
    """
    return largest_batch(loaders, count=1, streams=streams).batch


def largest_batch(
    loaders: Any, *, count: int, streams: bool = False, time_limit_s: float = _TIME_LIMIT_S
) -> SampledBatch:
    """Read the first batches of a loader, without workers and without a trace, and keep the largest.

    The indices come from the loader's own sampler and the samples from its dataset, in this process. Every
    random generator and all state in reach are put back, so the loader later yields what it would have. The
    largest batch is the one whose tensors have the most elements in all; of several, the first.

    Args:
        loaders: A ``DataLoader``, a tree of them, or Lightning's ``CombinedLoader``. Of a tree, batches of the
            same number belong together.
        count: How many batches to look at.
        streams: Read iterable datasets too. They cannot be wound back: only where no run follows.
        time_limit_s: Seconds after which no further batch is read. The first is read in any case.

    Returns:
        The batch as the loader would have collated it, in the tree that ``training_step`` receives.

    Raises:
        BatchUnavailableError: If the loader can only be opened once, is of an unknown kind, or is empty.

    Example:
        >>> texts = [torch.zeros(length) for length in (3, 7, 5)]
        >>> largest_batch(DataLoader(texts, batch_size=1), count=8).describe("the loader")
        'the largest of the first 3 batches (index 1) of the loader'
    """
    # `CombinedLoader` exists in both Lightning namespaces; it is recognised by what it has.
    if hasattr(loaders, "flattened") and hasattr(loaders, "iterables"):
        sequential = getattr(loaders, "_mode", None) == "sequential"
        loaders = loaders.flattened[0] if sequential and loaders.flattened else loaders.iterables
    if loaders is None:
        raise BatchUnavailableError("there is no train loader")
    deadline = time.monotonic() + time_limit_s
    largest: SampledBatch | None = None
    size = looked_at = 0
    with unchanged(loaders):
        leaves, tree = tree_flatten(loaders)
        if not leaves:
            raise BatchUnavailableError("there is no train loader")
        readers = [_read(loader, streams=streams) for loader in leaves]
        for batches in islice(zip(*readers, strict=False), count):
            batch = tree_unflatten(batches, tree)
            elements = _elements(batch)
            if largest is None or elements > size:
                largest, size = SampledBatch(batch, looked_at, 0), elements
            looked_at += 1
            if time.monotonic() > deadline:
                break
        del readers  # closed before the state is put back
    if largest is None:
        names = ", ".join(f"`{type(loader).__qualname__}`" for loader in leaves)
        raise BatchUnavailableError(f"the loader ({names}) is empty")
    return replace(largest, looked_at=looked_at)


def _elements(tree: Any, depth: int = 3) -> int:
    """Count the elements of all tensors in a batch, in plain objects too."""
    count = 0
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            count += leaf.numel()
        elif depth and hasattr(leaf, "__dict__"):
            count += _elements(list(vars(leaf).values()), depth - 1)
    return count


def _read(loader: Any, *, streams: bool) -> Iterator[Any]:
    """Return the batches of a loader, read as they are asked for."""
    name = type(loader).__qualname__
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        if streams and hasattr(loader, "__iter__"):
            return iter(loader)
        raise BatchUnavailableError(f"a loader of type `{name}` may not be opened twice")
    dataset = loader.dataset
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if isinstance(dataset, IterableDataset):
        if not streams:
            raise BatchUnavailableError(
                f"`{type(dataset).__qualname__}` is an `IterableDataset`, which may not be opened twice"
            )
        return _read_stream(loader, iter(dataset))
    if hasattr(sampler, "__next__") or hasattr(getattr(sampler, "sampler", None), "__next__"):
        raise BatchUnavailableError("the sampler of the loader is an iterator, which can be read only once")
    return (_collate(loader, index) for index in sampler)


def _read_stream(loader: DataLoader[Any], stream: Iterator[Any]) -> Iterator[Any]:
    if loader.batch_size is None:
        yield from map(loader.collate_fn, stream)
        return
    while samples := list(islice(stream, loader.batch_size)):
        yield loader.collate_fn(samples)


def _collate(loader: DataLoader[Any], index: Any) -> Any:
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[index])
    if hasattr(dataset, "__getitems__"):
        return loader.collate_fn(dataset.__getitems__(index))
    return loader.collate_fn([dataset[i] for i in index])


def parse_batch_spec(spec: Any) -> Any:
    """Turn a written description of a batch into tensors.

    Args:
        spec: Dicts and lists whose leaves read ``"dtype[shape]"``, such as ``"float32[8, 3, 224, 224]"``, or
            ``"dtype[shape] = value"`` where the step looks at the values (lengths, masks).

    Returns:
        The same tree with a tensor on ``meta`` for each leaf, and a real tensor where a value is given.

    Raises:
        ValueError: If a leaf cannot be read; the message shows it.

    Example:
        >>> parse_batch_spec({"ids": "int64[8, 128]"})["ids"].shape
        torch.Size([8, 128])
    """
    if isinstance(spec, dict):
        return {key: parse_batch_spec(value) for key, value in spec.items()}
    if isinstance(spec, (list, tuple)):
        return type(spec)(parse_batch_spec(value) for value in spec)
    return _parse_leaf(spec)


def _parse_leaf(text: Any) -> Tensor:
    match = _LEAF.fullmatch(text) if isinstance(text, str) else None
    dtype = getattr(torch, match["dtype"], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"Cannot read {text!r} in `batch_spec`. Write a dtype and a shape, such as "
            "'float32[8, 3, 224, 224]' or 'int64[8] = 128'."
        )
    shape = [int(size) for size in match["shape"].replace(",", " ").split()]
    size_bytes = math.prod(shape) * dtype.itemsize
    real = match["value"] is not None
    # A value makes a real tensor of host memory; shapes alone take none.
    limit = 2**30 if real else 2**63
    if size_bytes >= limit:
        raise ValueError(
            f"{text!r} in `batch_spec` would take {size_bytes} bytes; the limit is {limit}"
            f"{' where a value is given. Give the shape alone' if real else '. Check the shape'}."
        )
    if not real:
        return torch.empty(shape, dtype=dtype, device="meta")
    try:
        return torch.full(shape, float(match["value"]), dtype=dtype)
    except RuntimeError as error:
        raise ValueError(
            f"Cannot read {text!r} in `batch_spec`: {error}. Choose a value of that dtype."
        ) from error
