"""Where a Trainer keeps what its runs measured, and which run is which."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_memprec.memory.observe.residual import (
    FILE_NAME,
    RunKey,
    read_residual,
    shapes_digest,
)

if TYPE_CHECKING:
    from torch import nn

    from lightning_memprec.memory.result import MemoryEstimate

__all__ = ["calibration_path", "find_calibration", "run_key"]


def calibration_path(trainer: Any) -> Path | None:
    """Return the file, in the folder that holds the Trainer's checkpoints and logs of all versions.

    Args:
        trainer: The Trainer.

    Returns:
        The path, which holds after a change of the working directory, too; ``None`` if the folder is remote.
    """
    folder = str(trainer.default_root_dir)
    return None if "://" in folder else Path(folder).absolute() / FILE_NAME


def run_key(trainer: Any, module: nn.Module, shapes: str, estimate: MemoryEstimate) -> RunKey:
    """Describe a run by what must be equal for a measurement to hold for another one.

    Args:
        trainer: Its Trainer.
        module: Its LightningModule.
        shapes: Digest of the module's parameters, taken in `setup`.
        estimate: Its estimate.
    """
    device: torch.device = trainer.strategy.root_device
    is_unlisted = estimate.device == "cuda" and device.type == "cuda"
    return RunKey(
        model=f"{type(module).__module__}.{type(module).__qualname__}",
        shapes=shapes,
        precision=estimate.precision,
        optimizer=estimate.breakdown.optimizer_states_bytes,
        strategy=type(trainer.strategy).__name__,
        num_devices=trainer.num_devices * trainer.num_nodes,
        device=torch.cuda.get_device_name(device) if is_unlisted else estimate.device,
        torch_version=torch.__version__,
    )


def find_calibration(trainer: Any, module: nn.Module, estimate: MemoryEstimate) -> float:
    """Look up by what an estimate of a run is to be multiplied.

    Args:
        trainer: The Trainer.
        module: Its LightningModule, in `setup`.
        estimate: The estimate, as traced.

    Returns:
        Measured by traced peak of the last equal run; 1 if none is known.
    """
    path = calibration_path(trainer)
    if path is None:
        return 1.0
    residual = read_residual(path, run_key(trainer, module, shapes_digest(module), estimate))
    return 1.0 if residual is None else residual.ratio
