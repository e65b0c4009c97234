"""Look at data without leaving a trace: random generators and Python state are put back afterwards."""

from __future__ import annotations

import functools
import random
import sys
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["reachable", "refill", "unchanged"]

# Bounds of the search: enough for a dataset with its transforms, cheap for a list of a million paths.
_MAX_OBJECTS = 10_000
_MAX_ITEMS = 1_000
_LEAVES = (type, ModuleType, Tensor, nn.Module, str, bytes, int, float, complex)


@contextmanager
def unchanged(*roots: object, skip: Iterable[object] = ()) -> Iterator[None]:
    """Undo what the block does to random generators and to the attributes of ``roots``.

    The global generators of Python, NumPy and torch (CPU and, where in use, CUDA) are always restored. So are
    the generators, attributes, lists and dicts reachable from ``roots`` through attributes, containers,
    closures and bound methods; tensors, arrays and modules are left alone.

    Args:
        roots: Objects whose state to protect, such as a data loader.
        skip: Objects that lead too far, such as a Trainer.

    Example:
        >>> with unchanged():
        ...     first = random.random()
        >>> first == random.random()
        True
    """
    restore = [*_global_generators(), *(undo for item in reachable(roots, skip) for undo in _undo(item))]
    try:
        yield
    finally:
        for undo in restore:
            undo()


def _global_generators() -> Iterator[Callable[[], object]]:
    yield functools.partial(random.setstate, random.getstate())
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield functools.partial(numpy.random.set_state, numpy.random.get_state())


def reachable(roots: tuple[object, ...], skip: Iterable[object]) -> list[object]:
    """Collect objects breadth first, so that what lies near the roots is never cut off."""
    skipped = {id(item) for item in skip}
    seen: dict[int, object] = {}
    queue = list(roots)
    for item in queue:  # grows while it is read
        if len(seen) >= _MAX_OBJECTS:
            break
        if id(item) not in seen and id(item) not in skipped:
            seen[id(item)] = item
            # A module is looked into only when it was asked for: a transform may hold a whole network.
            if not isinstance(item, _LEAVES) or any(item is root for root in roots):
                queue.extend(_children(item))
    return list(seen.values())


def _children(item: Any) -> Iterable[object]:
    if isinstance(item, MethodType):
        return [item.__self__]
    if isinstance(item, FunctionType):
        return [cell.cell_contents for cell in item.__closure__ or () if _is_filled(cell)]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, dict):
        return list(item.values()) if len(item) <= _MAX_ITEMS else ()
    if isinstance(item, (list, tuple)):
        return item if len(item) <= _MAX_ITEMS else ()
    return list(vars(item).values()) if hasattr(item, "__dict__") else ()


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _undo(item: Any) -> Iterator[Callable[[], object]]:
    """Yield what puts one object back into its present state."""
    numpy = sys.modules.get("numpy")
    if isinstance(item, torch.Generator):
        yield functools.partial(item.set_state, item.get_state())
    elif isinstance(item, random.Random):
        yield functools.partial(item.setstate, item.getstate())
    elif numpy is not None and isinstance(item, numpy.random.RandomState):
        yield functools.partial(item.set_state, item.get_state())
    elif numpy is not None and isinstance(item, numpy.random.Generator):
        yield functools.partial(setattr, item.bit_generator, "state", item.bit_generator.state)
    elif isinstance(item, (dict, list)):
        if len(item) <= _MAX_ITEMS:
            yield functools.partial(refill, item, dict(item) if isinstance(item, dict) else list(item))
    elif not isinstance(item, (type, ModuleType)) and isinstance(getattr(item, "__dict__", None), dict):
        yield functools.partial(refill, vars(item), dict(vars(item)))


def refill(container: Any, saved: Any) -> None:
    """Give a dict or list its old entries back; one that did not change is not touched."""
    now, before = (
        list(c.items()) if isinstance(c, dict) else [(0, v) for v in c] for c in (container, saved)
    )
    same = len(now) == len(before) and all(
        a[0] is b[0] and a[1] is b[1] for a, b in zip(now, before, strict=True)
    )
    if same:
        return
    container.clear()
    container.update(saved) if isinstance(container, dict) else container.extend(saved)
