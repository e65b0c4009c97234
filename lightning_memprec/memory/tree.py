"""Trees of tensors: batches and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor in a tree of dictionaries, sequences and dataclasses."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        items = {key: map_tensors(function, value) for key, value in tree.items()}
        if type(tree) is dict:
            return items
        try:
            return type(tree)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(function, item) for item in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(
            tree, **{f.name: map_tensors(function, getattr(tree, f.name)) for f in fields(tree) if f.init}
        )
    return tree


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors of a tree, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    # A mapping of another class may refuse to be built anew; only its items are wanted.
    map_tensors(keep, dict(tree) if isinstance(tree, Mapping) else tree)
    return found
