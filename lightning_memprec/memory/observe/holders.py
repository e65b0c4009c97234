"""Find who holds tensors: containers that can be reached by name from a model and what belongs to its run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

__all__ = ["Holding", "grown", "holdings"]

# Bounds of the walk, which happens once in a run as a rule: enough for a list with one entry a step.
_MAX_ITEMS = 1_000_000
_MAX_DEPTH = 4
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# What a module registers is measured as such, and the rest of these is torch's own.
_REGISTERED = ("_parameters", "_buffers", "_modules")


@dataclass
class Holding:
    """What one named attribute holds.

    Args:
        entries: Items in its containers.
        tensors: Tensors among them.
        graphs: Tensors that keep the graph alive from which they came.
        size_bytes: Bytes of the tensors' storages, each once.
    """

    entries: int = 0
    tensors: int = 0
    graphs: int = 0
    size_bytes: int = 0

    def in_words(self) -> str:
        """Say what is held.

        Example:
            >>> Holding(entries=3, tensors=3, graphs=3).in_words()
            '3 tensors, all with their graphs'
            >>> Holding(entries=12).in_words()
            '12 entries'
        """
        if not self.tensors:
            return f"{self.entries} entries"
        text = f"{self.tensors} tensors"
        if self.graphs:
            text += f", {'all' if self.graphs == self.tensors else self.graphs} with their graphs"
        return text


def holdings(roots: Mapping[str, object], skip: Iterable[object] = ()) -> dict[str, Holding]:
    """List what the attributes of objects hold, in containers and in objects of their own.

    Args:
        roots: Objects by the names under which they are to be told, such as ``{"Net": model}``. A module's
            children are walked, too.
        skip: Objects that lead too far, such as a Trainer.

    Returns:
        Holdings by the attributes' names, such as ``"Net.losses"``. What is reached twice counts at the first name.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> net.losses = [net(net.weight).sum() for _ in range(3)]
        >>> holdings({"Net": net})["Net.losses"].in_words()
        '3 tensors, all with their graphs'
    """
    walk = _Walk(skip)
    named = [pair for name, root in roots.items() for pair in _with_children(name, root)]
    # Named objects are walked under their own names only, wherever else they are referred to.
    walk.seen.update(id(root) for _, root in named)
    return {
        label: holding
        for name, root in named
        for label, value in _attributes(name, root)
        if (holding := walk.holding_of(value)) is not None
    }


def grown(before: Mapping[str, Holding], after: Mapping[str, Holding]) -> tuple[str, Holding] | None:
    """Return the holder that has grown most: in bytes, in graphs, or else in entries.

    Args:
        before: An earlier list.
        after: A later list.

    Returns:
        Its name and what it holds now; ``None`` if nothing has grown.
    """

    def growth(name: str) -> tuple[int, int, int]:
        old, new = before.get(name, Holding()), after[name]
        return new.size_bytes - old.size_bytes, new.graphs - old.graphs, new.entries - old.entries

    name = max(after, key=growth, default=None)
    if name is None or growth(name) <= (0, 0, 0):
        return None
    return name, after[name]


def _with_children(name: str, root: object) -> Iterator[tuple[str, object]]:
    if not isinstance(root, nn.Module):
        yield name, root
        return
    for path, child in root.named_modules():
        yield f"{name}.{path}" if path else name, child


def _attributes(name: str, root: object) -> Iterator[tuple[str, object]]:
    if isinstance(root, dict):  # The names of a file of code.
        yield from ((f"{name}.{key}", value) for key, value in list(root.items()))
        return
    for key, value in list(getattr(root, "__dict__", {}).items()):
        if not (isinstance(root, nn.Module) and key in _REGISTERED):
            yield f"{name}.{key}", value


class _Walk:
    def __init__(self, skip: Iterable[object]) -> None:
        self.seen = {id(item) for item in skip}
        self._storages: set[int] = set()
        self._items = 0

    def holding_of(self, value: Any) -> Holding | None:
        """Return what a container, or an object with attributes, holds; ``None`` for anything else."""
        if not _is_a(value, _CONTAINERS) and not _is_own_object(value):
            return None
        holding = Holding()
        queue: deque[tuple[Any, int]] = deque([(value, 0)])
        while queue and self._items < _MAX_ITEMS:
            item, depth = queue.popleft()
            if id(item) in self.seen:
                continue
            self.seen.add(id(item))
            if _is_a(item, (Tensor,)):
                self._add(item, holding)
            elif depth < _MAX_DEPTH:
                children = _children(item)
                if _is_a(item, _CONTAINERS):
                    holding.entries += len(children)
                self._items += len(children)
                queue.extend((child, depth + 1) for child in children)
        return holding if holding.entries or holding.tensors else None

    def _add(self, tensor: Tensor, holding: Holding) -> None:
        if isinstance(tensor, nn.Parameter):
            return  # Weights are the optimizer's and the module's.
        holding.tensors += 1
        holding.graphs += tensor.grad_fn is not None
        try:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._storages:
                self._storages.add(storage.data_ptr())
                holding.size_bytes += storage.nbytes()
        except (RuntimeError, NotImplementedError):  # Sparse and wrapped tensors have none.
            holding.size_bytes += tensor.numel() * tensor.element_size()


def _children(item: Any) -> list[Any]:
    # By the methods of the base class: those of a user's subclass may do anything.
    if _is_a(item, (dict,)):
        return list(dict.values(item))
    for base in _CONTAINERS:
        if _is_a(item, (base,)):
            return list(base.__iter__(item))
    return list(item.__dict__.values()) if _is_own_object(item) else []


def _is_a(value: Any, kinds: tuple[type, ...]) -> bool:
    """Tell the type of a value without running the code of proxies, as ``isinstance`` would."""
    return issubclass(type(value), kinds)


def _is_own_object(value: Any) -> bool:
    """Tell whether an object has attributes that may hold something: not a class, a file of code or a module."""
    return type(value).__dictoffset__ != 0 and not _is_a(value, (type, ModuleType, nn.Module, Tensor))
