"""Lightning callbacks. Names are looked up lazily: importing this package does not import Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_memprec.callbacks.memory_preflight import MemoryPreflight

__all__ = ["MemoryPreflight"]


def __getattr__(name: str) -> Any:
    if name == "MemoryPreflight":
        from lightning_memprec.callbacks.memory_preflight import MemoryPreflight

        return MemoryPreflight
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
