"""Lightning callbacks. Names are looked up lazily: importing this package does not import Lightning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_memprec.callbacks.grad_scaler_monitor import GradScalerMonitor
    from lightning_memprec.callbacks.memory_monitor import MemoryMonitor
    from lightning_memprec.callbacks.memory_preflight import MemoryPreflight
    from lightning_memprec.callbacks.out_of_memory import OutOfMemoryReport
    from lightning_memprec.callbacks.post_training_quantization import PostTrainingQuantization
    from lightning_memprec.callbacks.stagnation_monitor import StagnationMonitor

__all__ = [
    "GradScalerMonitor",
    "MemoryMonitor",
    "MemoryPreflight",
    "OutOfMemoryReport",
    "PostTrainingQuantization",
    "StagnationMonitor",
]

_HOMES = {
    "GradScalerMonitor": "grad_scaler_monitor",
    "MemoryMonitor": "memory_monitor",
    "MemoryPreflight": "memory_preflight",
    "OutOfMemoryReport": "out_of_memory",
    "PostTrainingQuantization": "post_training_quantization",
    "StagnationMonitor": "stagnation_monitor",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
