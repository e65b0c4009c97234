"""Lightning plugins for memory and precision: will it fit, is it healthy, is it saved right, does it ship.

Names are imported when they are first used, so that ``import lightning_memprec`` costs next to nothing and the
pure parts work where Lightning is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_memprec.__about__ import __version__

if TYPE_CHECKING:
    from lightning_memprec._errors import DataDependentError, MemoryOverflowError, MemPrecError, TraceError
    from lightning_memprec._files.stored_tensor import CheckpointError
    from lightning_memprec.callbacks.grad_scaler_monitor import GradScalerMonitor
    from lightning_memprec.callbacks.memory_monitor import MemoryMonitor
    from lightning_memprec.callbacks.memory_preflight import MemoryPreflight
    from lightning_memprec.callbacks.out_of_memory import OutOfMemoryReport
    from lightning_memprec.callbacks.post_training_quantization import PostTrainingQuantization
    from lightning_memprec.callbacks.stagnation_monitor import StagnationMonitor
    from lightning_memprec.master_weights.export import export_weights
    from lightning_memprec.master_weights.inspect import inspect_checkpoint
    from lightning_memprec.memory.estimate import estimate_memory
    from lightning_memprec.memory.probe import probe_memory
    from lightning_memprec.memory.result import MemoryEstimate, Remedy
    from lightning_memprec.plugins.master_weights import MasterWeightPrecision
    from lightning_memprec.quantization.checkpoint import load_quantized, restore_int8_layers, save_quantized
    from lightning_memprec.quantization.checkpoint_layout import QuantizedFileError
    from lightning_memprec.quantization.convert import quantize_
    from lightning_memprec.quantization.report import QuantizationReport
    from lightning_memprec.scaling.capabilities import Capabilities
    from lightning_memprec.scaling.choose import PrecisionChoice, choose_precision
    from lightning_memprec.scaling.compare import compare_precisions
    from lightning_memprec.scaling.comparison import PrecisionComparison
    from lightning_memprec.scaling.errors import ScalerCollapseError

__all__ = [
    "Capabilities",
    "CheckpointError",
    "DataDependentError",
    "GradScalerMonitor",
    "MasterWeightPrecision",
    "MemPrecError",
    "MemoryEstimate",
    "MemoryMonitor",
    "MemoryOverflowError",
    "MemoryPreflight",
    "OutOfMemoryReport",
    "PostTrainingQuantization",
    "PrecisionChoice",
    "PrecisionComparison",
    "QuantizationReport",
    "QuantizedFileError",
    "Remedy",
    "ScalerCollapseError",
    "StagnationMonitor",
    "TraceError",
    "__version__",
    "choose_precision",
    "compare_precisions",
    "estimate_memory",
    "export_weights",
    "inspect_checkpoint",
    "load_quantized",
    "probe_memory",
    "quantize_",
    "restore_int8_layers",
    "save_quantized",
]

_HOMES = {
    "Capabilities": "scaling.capabilities",
    "CheckpointError": "_files.stored_tensor",
    "DataDependentError": "_errors",
    "GradScalerMonitor": "callbacks.grad_scaler_monitor",
    "MasterWeightPrecision": "plugins.master_weights",
    "MemPrecError": "_errors",
    "MemoryEstimate": "memory.result",
    "MemoryMonitor": "callbacks.memory_monitor",
    "MemoryOverflowError": "_errors",
    "MemoryPreflight": "callbacks.memory_preflight",
    "OutOfMemoryReport": "callbacks.out_of_memory",
    "PostTrainingQuantization": "callbacks.post_training_quantization",
    "PrecisionChoice": "scaling.choose",
    "PrecisionComparison": "scaling.comparison",
    "QuantizationReport": "quantization.report",
    "QuantizedFileError": "quantization.checkpoint_layout",
    "Remedy": "memory.result",
    "ScalerCollapseError": "scaling.errors",
    "StagnationMonitor": "callbacks.stagnation_monitor",
    "TraceError": "_errors",
    "choose_precision": "scaling.choose",
    "compare_precisions": "scaling.compare",
    "estimate_memory": "memory.estimate",
    "export_weights": "master_weights.export",
    "inspect_checkpoint": "master_weights.inspect",
    "load_quantized": "quantization.checkpoint",
    "probe_memory": "memory.probe",
    "quantize_": "quantization.convert",
    "restore_int8_layers": "quantization.checkpoint",
    "save_quantized": "quantization.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
