"""Put back what user code keeps outside of its objects: globals, class attributes, caches of functions."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_memprec._isolation import refill

__all__ = ["unchanged_globals"]

_PACKAGES = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# Where distributions put what they package.
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
# Not the user's even where they are installed from a checkout.
_FRAMEWORKS = {__name__.partition(".")[0], "torch", "lightning", "lightning_fabric", "pytorch_lightning"}
# Containers larger than this are data.
_MAX_ITEMS = 1_000


@contextmanager
def unchanged_globals(*classes: type) -> Iterator[None]:
    """Undo what the block does to the globals and classes of the user's own modules, installed packages excepted.

    Put back are the names in a module, the attributes of its classes, and the entries of dicts and lists found there;
    caches of ``functools`` that took up something are emptied. What lies deeper is left alone.

    Args:
        classes: Classes to look after too, because no module may hold them.

    Example:
        >>> cache = {}
        >>> class Net:
        ...     steps = 0
        >>> with unchanged_globals(Net):
        ...     Net.steps += 1
        >>> Net.steps
        0
    """
    restore = [undo for namespace in _namespaces(classes) for undo in _undo(namespace)]
    try:
        yield
    finally:
        for undo in restore:
            undo()


def _namespaces(classes: tuple[type, ...]) -> Iterator[Any]:
    """Yield the user's modules, and the classes defined there."""
    seen: set[int] = set()
    modules = [module for module in list(sys.modules.values()) if _is_users(module)]
    of_modules = (
        value
        for module in modules
        for value in list(vars(module).values())
        if isinstance(value, type) and value.__module__ == module.__name__
    )
    of_classes = (
        base for cls in classes for base in cls.__mro__ if _is_users(sys.modules.get(base.__module__))
    )
    for namespace in (*modules, *of_modules, *of_classes):
        if id(namespace) not in seen:
            seen.add(id(namespace))
            yield namespace


def _is_users(module: Any) -> bool:
    # Not `torch.ops`, whose class derives from that of modules and whose file is a relative path: C++ keeps hold of the
    # operators found there, so that taking one away ends the process.
    if type(module) is not ModuleType or module.__name__.partition(".")[0] in _FRAMEWORKS:
        return False
    if module.__name__ == "__main__":
        return True
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not os.path.isabs(file) or file.startswith(_PACKAGES):
        return False
    return not any(folder in Path(file).parts for folder in _PACKAGE_FOLDERS)


def _undo(namespace: Any) -> Iterator[Callable[[], object]]:
    before = dict(vars(namespace))
    yield functools.partial(_put_back, namespace, before)
    for value in before.values():
        if type(value) in (dict, list) and len(value) <= _MAX_ITEMS:
            yield functools.partial(refill, value, value.copy())
        elif isinstance(value, functools._lru_cache_wrapper):
            yield functools.partial(_empty, value, value.cache_info().misses)


def _put_back(namespace: Any, before: dict[str, Any]) -> None:
    now = vars(namespace)
    changed = {
        name for name in {*now, *before} if now.get(name, namespace) is not before.get(name, namespace)
    }
    for name in changed:
        # What Python notes down for itself, such as `__warningregistry__`, is not state of the user's.
        if name.startswith("__"):
            continue
        with suppress(AttributeError, TypeError):  # A metaclass may refuse.
            setattr(namespace, name, before[name]) if name in before else delattr(namespace, name)


def _empty(cache: Any, misses: int) -> None:
    if cache.cache_info().misses != misses:
        cache.cache_clear()
