"""Lightning plugins that tell whether a run will fit in memory, before it starts.

Names are imported when they are first used, so that ``import lightning_memprec`` costs next to nothing and the
pure parts work where Lightning is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_memprec.__about__ import __version__

if TYPE_CHECKING:
    from lightning_memprec._errors import DataDependentError, MemoryOverflowError, MemPrecError, TraceError
    from lightning_memprec.callbacks.memory_preflight import MemoryPreflight
    from lightning_memprec.memory.estimate import estimate_memory
    from lightning_memprec.memory.result import MemoryEstimate, Remedy

__all__ = [
    "DataDependentError",
    "MemPrecError",
    "MemoryEstimate",
    "MemoryOverflowError",
    "MemoryPreflight",
    "Remedy",
    "TraceError",
    "__version__",
    "estimate_memory",
]

_HOMES = {
    "DataDependentError": "_errors",
    "MemPrecError": "_errors",
    "MemoryEstimate": "memory.result",
    "MemoryOverflowError": "_errors",
    "MemoryPreflight": "callbacks.memory_preflight",
    "Remedy": "memory.result",
    "TraceError": "_errors",
    "estimate_memory": "memory.estimate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
