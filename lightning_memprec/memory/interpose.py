"""Put Python kernels above autograd, for the meta tensors of a trace alone.

A CUDA run casts under autocast and picks fused kernels in the dispatcher, above autograd, inside composite
operators too. Meta tensors carry no autocast key, but the dispatcher adds the keys that a thread *includes*:
kernels registered at a key that no installed backend uses, and included for the length of a trace, see every
call that AutocastCUDA would see. Operators without a kernel fall through at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["Interposer", "Kernel"]

Kernel = Callable[..., Any]


class _Registration:
    """What the dispatcher holds of one key: it is global and stays for the life of the process."""

    def __init__(self, key_name: str) -> None:
        self._key = getattr(torch._C.DispatchKey, key_name)
        self._key_name = key_name
        self._keyset = torch._C.DispatchKeySet(self._key)
        self._registered: set[OpOverload] = set()
        self._fallback = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        self._fallback.fallback(torch.library.fallthrough_kernel, key_name)  # type: ignore[no-untyped-call]
        self._aten = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self.kernels: dict[OpOverload, Kernel] = {}
        self.nested = True

    def add(self, func: OpOverload) -> None:
        if func in self._registered:
            return
        self._registered.add(func)

        def entry(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            kernel = self.kernels.get(func)
            if kernel is None:
                return func.redispatch(keyset.remove(self._key), *args, **kwargs)
            if self.nested:
                return kernel(partial(func.redispatch, keyset.remove(self._key)), *args, **kwargs)
            with torch._C._ExcludeDispatchKeyGuard(self._keyset):
                return kernel(func, *args, **kwargs)

        self._aten.impl(func, entry, self._key_name, with_keyset=True)  # type: ignore[no-untyped-call]


@cache
def _registration(key_name: str) -> _Registration:
    return _Registration(key_name)


class Interposer:
    """Python kernels at one dispatch key, switched on for a block of code.

    Args:
        key: Name of a dispatch key above autograd without kernels of its own: ``"AutocastHPU"`` or
            ``"AutocastIPU"`` (the former runs first).
        nested: Whether the operators that a composite operator is made of reach kernels too, once that
            operator has reached its own. Autocast wants ``False``: what it has cast is left alone.

    Note:
        Only a thread inside :meth:`active` or after :meth:`switch` reaches kernels. A key holds one set of
        kernels at a time, whatever the number of interposers: the latest :meth:`use` counts.
    """

    def __init__(self, key: str, *, nested: bool = True) -> None:
        self._key = getattr(torch._C.DispatchKey, key)
        self._key_name = key
        self._nested = nested

    def use(self, kernels: dict[OpOverload, Kernel]) -> None:
        """Make ``kernels`` the ones that :meth:`active` reaches; others fall back to the operator itself.

        Args:
            kernels: Map from operator overload to a function ``(func, *args, **kwargs)`` that returns the
                operator's result; ``func`` calls the operator itself and does not reach its kernel again.
        """
        registration = _registration(self._key_name)
        registration.kernels, registration.nested = kernels, self._nested
        for func in kernels:
            registration.add(func)

    @contextmanager
    def active(self, enabled: bool = True) -> Iterator[None]:
        """Reach the kernels inside the block, or hide them there."""
        state = self.switch(enabled)
        try:
            yield
        finally:
            self.restore(state)

    def switch(self, enabled: bool) -> tuple[bool, bool]:
        """Reach the kernels from now on, or hide them.

        Args:
            enabled: Whether this thread reaches the kernels.

        Returns:
            The state before, for :meth:`restore`.
        """
        state = (
            torch._C._dispatch_tls_is_dispatch_key_included(self._key),
            torch._C._dispatch_tls_is_dispatch_key_excluded(self._key),
        )
        # Autocast keys are excluded by default in every thread, so including them is not enough.
        self.restore((enabled, not enabled))
        return state

    def restore(self, state: tuple[bool, bool]) -> None:
        """Bring back what :meth:`switch` returned."""
        included, excluded = state
        torch._C._dispatch_tls_set_dispatch_key_included(self._key, included)
        torch._C._dispatch_tls_set_dispatch_key_excluded(self._key, excluded)
