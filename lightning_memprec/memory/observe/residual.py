"""What an earlier run of the same model measured, kept in a file, and used by the next estimate."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_memprec._files.atomic import write_json
from lightning_memprec._plain import read_json, read_plain
from lightning_memprec._units import MIB
from lightning_memprec.memory.result import Assumption, MemoryEstimate

__all__ = [
    "FILE_NAME",
    "Residual",
    "RunKey",
    "applied_ratio",
    "calibrated",
    "is_plausible",
    "read_residual",
    "shapes_digest",
    "write_residual",
]

FILE_NAME = "memprec_calibration.json"
_VERSION = 1
_ASSUMPTION = "calibration"
# Runs in one folder: some models, precisions and cards. The oldest goes.
_MAX_RUNS = 64
_MAX_FILE_BYTES = MIB
# A trace that is off by more than a factor of two described another run: it is not corrected but ignored.
_LARGEST_RATIO = 2.0
_NEGLIGIBLE = 5e-4


@dataclass(frozen=True)
class RunKey:
    """What must be equal for a measured run to say something about another one; batches may differ.

    Args:
        model: Name of the model's class.
        shapes: Digest of its parameters' names and shapes.
        precision: Lightning's name of the precision.
        optimizer: Bytes of optimizer states that the estimate counts, which tell the optimizer before there is one.
        strategy: Lightning's name of the strategy.
        num_devices: Devices of the run.
        device: Name of the device.
        torch_version: Version of torch.
    """

    model: str
    shapes: str
    precision: str
    optimizer: int
    strategy: str
    num_devices: int
    device: str
    torch_version: str


@dataclass(frozen=True)
class Residual:
    """What a run took beside what was traced for it.

    Args:
        run: The run.
        ratio: Measured peak of live tensors by the traced one.
        optimizers: Names of the optimizers, for people.
    """

    run: RunKey
    ratio: float
    optimizers: tuple[str, ...] = ()


def is_plausible(ratio: float) -> bool:
    """Tell whether a ratio of measured to traced memory can be used; with a factor above 2 the runs differ.

    Example:
        >>> is_plausible(1.04), is_plausible(7.0)
        (True, False)
    """
    return math.isfinite(ratio) and 1 / _LARGEST_RATIO <= ratio <= _LARGEST_RATIO


def shapes_digest(module: nn.Module) -> str:
    """Return a digest of the names and shapes of a module's parameters.

    Args:
        module: The module; parameters without a shape yet count by name.

    Example:
        >>> shapes_digest(nn.Linear(2, 3)) == shapes_digest(nn.Linear(3, 2))
        False
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        shape = "lazy" if is_lazy(parameter) else tuple(parameter.shape)
        digest.update(f"{name} {shape} {parameter.requires_grad}\n".encode())
    return digest.hexdigest()[:16]


def calibrated(estimate: MemoryEstimate, ratio: float) -> MemoryEstimate:
    """Scale an estimate by what an earlier run of the same model measured.

    Peaks and need inside the allocator are scaled; parts, phases and timeline stay as they were traced.

    Args:
        estimate: An estimate as it was traced.
        ratio: Measured by traced peak of the earlier run; what prints as 0.0 % leaves the estimate as it is.
    """
    if abs(ratio - 1.0) < _NEGLIGIBLE:
        return estimate
    need = round(estimate.minimum_reserved_bytes * ratio)
    note = Assumption(
        _ASSUMPTION,
        f"An earlier run of this model measured {ratio - 1:+.1%} against its trace: need and peaks are scaled by "
        f"{ratio:.4f}, parts and phases are as traced. `MemoryPreflight(calibrate=False)` leaves that out.",
        FILE_NAME,
        need - estimate.minimum_reserved_bytes,
    )
    return replace(
        estimate,
        peak_allocated_bytes=round(estimate.peak_allocated_bytes * ratio),
        peak_reserved_bytes=round(estimate.peak_reserved_bytes * ratio),
        minimum_reserved_bytes=need,
        assumptions=(*estimate.assumptions, note),
    )


def applied_ratio(estimate: MemoryEstimate) -> float:
    """Return the ratio by which :func:`calibrated` has scaled an estimate; 1 if it has not."""
    for note in estimate.assumptions:
        if note.name == _ASSUMPTION and note.size_bytes is not None:
            need = estimate.minimum_reserved_bytes
            return need / max(1, need - note.size_bytes)
    return 1.0


def read_residual(path: Path, run: RunKey) -> Residual | None:
    """Look up what an earlier run measured.

    Args:
        path: The file.
        run: The run that is about to be estimated.

    Returns:
        The residual; ``None`` if there is no file, it cannot be read, or it knows no such run.
    """
    found = [residual for residual in _read(path) if residual.run == run]
    return found[-1] if found else None


def write_residual(path: Path, residual: Residual) -> None:
    """Keep what a run measured, in the place of what the same run measured before.

    Args:
        path: The file; it is made if it is missing, and replaced whole.
        residual: What was measured.

    Raises:
        OSError: If the folder cannot be written.
    """
    others = [known for known in _read(path) if known.run != residual.run]
    runs = [asdict(known) for known in (*others, residual)[-_MAX_RUNS:]]
    write_json(path, {"version": _VERSION, "runs": runs}, default=None)


def _read(path: Path) -> list[Residual]:
    """Return the entries that are well formed."""
    try:
        content = read_json(path, _MAX_FILE_BYTES)
    except (OSError, ValueError):
        return []
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        return []
    runs = content.get("runs")
    entries = runs if isinstance(runs, list) else []
    return [residual for entry in entries if (residual := _residual(entry)) is not None]


def _residual(entry: Any) -> Residual | None:
    try:
        residual: Residual = read_plain(Residual, entry, "run")
    except ValueError:
        return None
    return residual if is_plausible(residual.ratio) else None
