"""Tell what a checkpoint holds: dtypes, real FP32 masters or upcast halves, scaler, optimizer states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_memprec._files.checkpoint_files import Source, open_checkpoint
from lightning_memprec._files.stored_tensor import StoredTensor, untie

__all__ = ["CheckpointReport", "DtypeTotal", "count_half_values", "inspect_checkpoint"]

_CHUNK_ELEMENTS = 2**20  # Tested at once, so that temporaries stay at a few MiB.
_WIDE = ("float32", "float64")
_HALVES = ("bfloat16", "float16")
_MOST = 0.5  # Above this share of upcast halves the verdict no longer speaks of masters.


@dataclass(frozen=True)
class DtypeTotal:
    """Tensors of one dtype.

    Args:
        tensors: Their number.
        elements: Number of elements of all.
        size_bytes: Size of all.
    """

    tensors: int
    elements: int
    size_bytes: int


@dataclass(frozen=True)
class CheckpointReport:
    """What a checkpoint holds.

    Args:
        kind: Kind of file: ``"lightning"``, ``"state_dict"``, ``"safetensors"`` or ``"distributed"``.
        weights: Parameters and buffers by dtype; tied weights count once.
        optimizer: Moments and other states of the optimizers by dtype, step counters aside.
        quantized: How many weights are integers with a scale.
        averaged: Whether the weights are averages over the run.
        has_average: Whether the checkpoint holds averages.
        tested: FP32 and FP64 values that can tell: finite and not zero.
        half_values: How many of them are also values of ``"bfloat16"`` and ``"float16"``.
        scalers: States of gradient scalers by the key under which they were saved.
        epoch: Epoch at which it was saved.
        global_step: Optimizer steps made until then.
        lightning_version: Version that wrote it.
    """

    kind: str
    weights: dict[str, DtypeTotal]
    optimizer: dict[str, DtypeTotal] = field(default_factory=dict)
    quantized: int = 0
    averaged: bool = False
    has_average: bool = False
    tested: int = 0
    half_values: dict[str, int] = field(default_factory=dict)
    scalers: dict[str, dict[str, float]] = field(default_factory=dict)
    epoch: int | None = None
    global_step: int | None = None
    lightning_version: str | None = None

    @property
    def elements(self) -> int:
        """Number of elements of all weights."""
        return sum(total.elements for total in self.weights.values())

    @property
    def size_bytes(self) -> int:
        """Size of all weights in bytes."""
        return sum(total.size_bytes for total in self.weights.values())

    @property
    def upcast_dtype(self) -> str:
        """The half dtype to which most FP32 values belong."""
        return max(_HALVES, key=lambda dtype: self.half_values.get(dtype, 0))

    @property
    def upcast_share(self) -> float | None:
        """Share of the tested FP32 values that are values of that half dtype; ``None`` without any."""
        return self.half_values.get(self.upcast_dtype, 0) / self.tested if self.tested else None

    @property
    def verdict(self) -> str:
        """One sentence on what the weights are worth."""
        if self.quantized:
            noun = "weight is" if self.quantized == 1 else "weights are"
            return f"Quantized: {self.quantized} {noun} stored as integers with scales, not as FP32 master weights."
        count = {dtype: self.weights[dtype].elements for dtype in (*_WIDE, *_HALVES) if dtype in self.weights}
        half = sum(count.get(dtype, 0) for dtype in _HALVES)
        if not sum(count.values()):
            return "No floating-point weights."
        names = " and ".join(dtype for dtype in _HALVES if dtype in count)
        if half == sum(count.values()):
            return f"Half-precision weights ({names}): mantissas were rounded."
        if half:
            share = half / sum(count.values())
            return (
                f"Mixed: {share:.1%} of the weights are {names}, whose mantissas were rounded. {self._wide()}"
            )
        return self._wide()

    def _wide(self) -> str:
        share, dtype = self.upcast_share, self.upcast_dtype
        if share is None:
            return "Cannot tell whether these are FP32 master weights: every value is zero or not finite."
        if share == 1:
            return f"FP32 in name only: every weight is a {dtype} value."
        if share > _MOST:
            return f"FP32 in part: {share:.1%} of the FP32 weights are {dtype} values."
        return "Holds FP32 master weights."

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; sizes are integers in bytes."""
        names = ("elements", "size_bytes", "upcast_dtype", "upcast_share", "verdict")
        return {"version": 1, **asdict(self), **{name: getattr(self, name) for name in names}}


def inspect_checkpoint(path: str | Path, source: Source = "auto") -> CheckpointReport:
    """Read a checkpoint and report what it holds; one tensor is in memory at a time.

    A value that went through bfloat16 has 16 zero bits at the end of its FP32 mantissa, one that went through
    float16 has 13. Random FP32 values have them by chance once in 65,536 and 8,192. So the share of such values
    tells whether FP32 weights kept their mantissas or were rounded once and stored wide.

    Args:
        path: Whatever :func:`~lightning_memprec._files.checkpoint_files.open_checkpoint` reads.
        source: Averaged weights or the last raw ones; by default the averages if there are any.

    Returns:
        The report.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        CheckpointError: If it is damaged, unsafe or of an unknown kind.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"weight": torch.tensor([0.1, 0.2]).bfloat16().float()}, f"{folder}/weights.pt")
        ...     inspect_checkpoint(f"{folder}/weights.pt").verdict
        'FP32 in name only: every weight is a bfloat16 value.'
    """
    checkpoint = open_checkpoint(path, source)
    weights, _ = untie(checkpoint.weights)
    counts: Counter[str] = Counter()
    for stored in weights.values():
        if _name(stored.dtype) in _WIDE:
            counts.update(count_half_values(stored.read()))
    moments = (t for name, t in checkpoint.optimizer.items() if name.rpartition(".")[2] != "step")
    contents = checkpoint.contents
    version = contents.get("pytorch-lightning_version")
    return CheckpointReport(
        kind=checkpoint.kind,
        weights=_totals(weights.values()),
        optimizer=_totals(moments),
        quantized=_quantized(weights),
        averaged=checkpoint.averaged,
        has_average=checkpoint.has_average,
        tested=counts["tested"],
        half_values={dtype: counts[dtype] for dtype in _HALVES},
        scalers=dict(_scalers(contents)),
        epoch=_integer(contents.get("epoch")),
        global_step=_integer(contents.get("global_step")),
        lightning_version=version if isinstance(version, str) else None,
    )


def count_half_values(values: Tensor) -> dict[str, int]:
    """Count how many values of a wide tensor are values of a half-precision dtype, too.

    Args:
        values: float32 or float64, any shape.

    Returns:
        ``"tested"``: finite values other than zero, which every dtype has; ``"bfloat16"`` and ``"float16"``:
        how many of them survive a cast to that dtype unchanged.

    Example:
        >>> count_half_values(torch.tensor([0.0, 1.0, 65536.0, 0.1]))
        {'tested': 3, 'bfloat16': 2, 'float16': 1}
    """
    counts = {"tested": 0, **dict.fromkeys(_HALVES, 0)}
    for chunk in torch.split(values.reshape(-1), _CHUNK_ELEMENTS) if values.numel() else ():
        telling = chunk.isfinite() & (chunk != 0)
        counts["tested"] += int(telling.sum())
        for name in _HALVES:
            survives = chunk.to(getattr(torch, name)).to(chunk.dtype) == chunk
            counts[name] += int((survives & telling).sum())
    return counts


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _totals(tensors: Iterable[StoredTensor]) -> dict[str, DtypeTotal]:
    groups: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        groups.setdefault(_name(tensor.dtype), []).append(tensor)
    return {
        dtype: DtypeTotal(len(group), sum(t.elements for t in group), sum(t.size_bytes for t in group))
        for dtype, group in groups.items()
    }


def _quantized(weights: Mapping[str, StoredTensor]) -> int:
    """Count integer tensors beside which there is a scale, by the names that writers of such files use."""
    found = set()
    for name in weights:
        # `weight_scale` of compressed-tensors and our layers beside `weight` or `weight_packed`; `SCB` of bitsandbytes.
        weight = name.removesuffix("SCB") + "weight" if name.endswith(".SCB") else name.removesuffix("_scale")
        if weight != name:
            found |= {key for key in (weight, f"{weight}_packed") if key in weights}
    return sum(not weights[key].dtype.is_floating_point for key in found)


def _scalers(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, float]]]:
    """Find what `torch.amp.GradScaler.state_dict` returned, wherever a plugin or a script put it."""
    for key, value in tree.items():
        if not isinstance(value, Mapping):
            continue
        name = f"{path}{key}"
        if "scale" in value and "_growth_tracker" in value:
            numbers = {str(entry): _number(number) for entry, number in value.items()}
            state = {entry: number for entry, number in numbers.items() if number is not None}
            if {"scale", "_growth_tracker"} <= set(state):
                yield name, state
        else:
            yield from _scalers(value, f"{name}.")


def _number(value: Any) -> float | None:
    if isinstance(value, StoredTensor) and value.elements == 1:
        value = value.read().item()
    return value if isinstance(value, (int, float)) else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
