"""Emulate ``torch.autocast`` on meta tensors, for the device that they stand for.

Meta tensors have no autocast of their own. The emulation keeps torch's own autocast state (enabled, dtype,
cache, nesting) and adds kernels that read it and cast as AutocastCUDA or AutocastCPU would. A user's
``with torch.autocast("cuda")`` therefore works in a trace on a machine without CUDA, and so does
``torch.autocast(x.device.type, enabled=False)``, although ``x.device.type`` is ``"meta"`` there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

import torch
from torch.amp import autocast_mode

from lightning_memprec.memory.autocast_kernels import CastKernels
from lightning_memprec.memory.interpose import Interposer

__all__ = ["AutocastEmulation"]

_INTERPOSER = Interposer("AutocastHPU", nested=False)


class AutocastEmulation:
    """Autocast for the meta tensors of one trace.

    Use it as a context manager around the whole trace. Inside, every ``torch.autocast`` context for
    ``device_type`` or for ``"meta"`` acts on meta tensors; contexts for other devices act as they always do.
    Host tensors are left to torch itself.

    Args:
        device_type: Device that meta tensors stand for.

    Example:
        >>> emulation = AutocastEmulation("cuda")
        >>> with emulation, torch.autocast("cuda", dtype=torch.bfloat16):
        ...     x = torch.empty(2, 3, device="meta")
        ...     (x @ x.T).dtype
        torch.bfloat16
    """

    def __init__(self, device_type: Literal["cuda", "cpu"]) -> None:
        self._device_type = device_type
        self._kernels = CastKernels(device_type)
        self._exit_stack = ExitStack()

    def context(
        self, dtype: torch.dtype | None = None, *, enabled: bool = True, cache_enabled: bool = True
    ) -> torch.autocast:
        """Return an autocast context for the emulated device, as a precision plugin enters it.

        Args:
            dtype: Lower-precision dtype; ``None`` is the device's default.
            enabled: Whether to cast inside the context.
            cache_enabled: Whether to keep casts of parameters until the outermost context ends.
        """
        return torch.autocast(self._device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    def __enter__(self) -> AutocastEmulation:
        stack = self._exit_stack
        device = self._device_type
        stack.callback(self._kernels.clear_cache)
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        stack.callback(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
        stack.callback(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
        _INTERPOSER.use(self._kernels.table)
        stack.callback(_INTERPOSER.restore, _INTERPOSER.switch(torch.is_autocast_enabled(device)))
        for owner, name, replacement in self._replacements():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit_stack.close()

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        """Return ``(owner, attribute, replacement)`` of what has to know that meta stands for the device."""
        replacements: list[tuple[Any, str, Any]] = [
            (torch.autocast, "__init__", self._make_init()),
            (torch, "is_autocast_enabled", self._on_device(torch.is_autocast_enabled)),
            (torch, "get_autocast_dtype", self._on_device(torch.get_autocast_dtype)),
            (torch, "set_autocast_dtype", self._on_device(torch.set_autocast_dtype)),
            (torch, "set_autocast_enabled", self._make_set_enabled()),
            (torch, "clear_autocast_cache", self._make_clear_cache()),
            # Decides what `torch.utils.checkpoint` restores when it recomputes.
            (torch.amp, "is_autocast_available", self._on_device(torch.amp.is_autocast_available)),
            (autocast_mode, "_cast", self._make_custom_fwd_cast()),
        ]
        transformers_generic = sys.modules.get("transformers.utils.generic")
        if hasattr(transformers_generic, "maybe_autocast"):
            # It takes meta tensors for shape inference and leaves autocast alone; models hold the function
            # itself, so its code is what can be replaced.
            helper: Any = transformers_generic.maybe_autocast  # type: ignore[union-attr]
            replacements.append((helper, "__code__", _maybe_autocast.__code__))
        return replacements

    def _name(self, device_type: Any) -> Any:
        return self._device_type if device_type == "meta" else device_type

    def _on_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def on_device(*args: Any, **kwargs: Any) -> Any:
            if "device_type" in kwargs:
                kwargs["device_type"] = self._name(kwargs["device_type"])
            return function(*(self._name(a) if isinstance(a, str) else a for a in args), **kwargs)

        return on_device

    def _make_init(self) -> Callable[..., None]:
        original: Callable[..., None] = torch.autocast.__init__

        def __init__(
            context: torch.autocast,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            device_type = self._name(device_type)
            # With CUDA the constructor asks the driver for a device; a context made disabled asks nothing.
            ask = enabled and not (device_type == self._device_type == "cuda")
            original(context, device_type, dtype=dtype, enabled=ask, cache_enabled=cache_enabled)
            if not ask:
                context._enabled = enabled

        return __init__

    def _make_set_enabled(self) -> Callable[..., None]:
        original = torch.set_autocast_enabled

        def set_autocast_enabled(device_type: Any, enabled: bool | None = None) -> None:
            if enabled is None:  # The old form with one argument means CUDA.
                device_type, enabled = "cuda", device_type
            device_type = self._name(device_type)
            original(device_type, enabled)
            if device_type == self._device_type:
                _INTERPOSER.switch(enabled)

        return set_autocast_enabled

    def _make_clear_cache(self) -> Callable[[], None]:
        original = torch.clear_autocast_cache

        def clear_autocast_cache() -> None:
            self._kernels.clear_cache()
            original()

        return clear_autocast_cache

    def _make_custom_fwd_cast(self) -> Callable[..., Any]:
        original = autocast_mode._cast

        def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
            return original(value, "meta" if device_type == self._device_type else device_type, dtype)

        return _cast


def _maybe_autocast(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> Any:
    """Stand in for ``transformers.utils.generic.maybe_autocast``, without its exception for meta tensors."""
    from contextlib import nullcontext

    import torch

    if torch.is_autocast_enabled(device_type) or enabled:
        return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
    return nullcontext()
