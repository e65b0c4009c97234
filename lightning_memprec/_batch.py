"""One batch for the trace: from a data loader without opening it twice, or from a written description."""

from __future__ import annotations

import math
import re
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from lightning_memprec._isolation import unchanged

__all__ = ["BatchUnavailableError", "first_batch", "parse_batch_spec"]

_LEAF = re.compile(r"\s*(?P<dtype>\w+)\s*\[(?P<shape>[\d\s,]*)\]\s*(?:=\s*(?P<value>-?\d+(?:\.\d+)?))?\s*")


class BatchUnavailableError(Exception):
    """No batch can be had without changing the data that the run will see; the message says why."""


def first_batch(loaders: Any, *, streams: bool = False) -> Any:
    """Read the first batch of a loader, without workers and without a trace.

    The indices come from the loader's own sampler and the samples from its dataset, in this process. Every
    random generator and all state in reach are put back, so the loader later yields what it would have.

    Args:
        loaders: A ``DataLoader``, a tree of them, or Lightning's ``CombinedLoader``.
        streams: Read iterable datasets too. They cannot be wound back: only where no run follows.

    Returns:
        The batch as the loader would have collated it, in the tree that ``training_step`` receives.

    Raises:
        BatchUnavailableError: If the loader can only be opened once, is of an unknown kind, or is empty.

    Example:
        >>> first_batch(DataLoader(list(range(6)), batch_size=2))
        tensor([0, 1])
    """
    # `CombinedLoader` exists in both Lightning namespaces; it is recognised by what it has.
    if hasattr(loaders, "flattened") and hasattr(loaders, "iterables"):
        sequential = getattr(loaders, "_mode", None) == "sequential"
        loaders = loaders.flattened[0] if sequential and loaders.flattened else loaders.iterables
    if loaders is None:
        raise BatchUnavailableError("there is no train loader")
    with unchanged(loaders):
        return tree_map(lambda loader: _read(loader, streams=streams), loaders)


def _read(loader: Any, *, streams: bool) -> Any:
    name = type(loader).__qualname__
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        if streams and hasattr(loader, "__iter__"):
            return _next(loader, name)
        raise BatchUnavailableError(f"a train loader of type `{name}` may not be opened twice")
    dataset = loader.dataset
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if isinstance(dataset, IterableDataset):
        if not streams:
            raise BatchUnavailableError(
                f"`{type(dataset).__qualname__}` is an `IterableDataset`, which may not be opened twice"
            )
        stream = iter(dataset)
        if loader.batch_size is None:
            return loader.collate_fn(_next(stream, name))
        samples = list(islice(stream, loader.batch_size))
        if not samples:
            raise BatchUnavailableError(f"the train loader (`{name}`) is empty")
        return loader.collate_fn(samples)
    if hasattr(sampler, "__next__") or hasattr(getattr(sampler, "sampler", None), "__next__"):
        raise BatchUnavailableError(
            "the sampler of the train loader is an iterator, which can be read only once"
        )
    index = _next(sampler, name)
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[index])
    if hasattr(dataset, "__getitems__"):
        return loader.collate_fn(dataset.__getitems__(index))
    return loader.collate_fn([dataset[i] for i in index])


def _next(iterable: Any, name: str) -> Any:
    for item in iterable:
        return item
    raise BatchUnavailableError(f"the train loader (`{name}`) is empty")


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
