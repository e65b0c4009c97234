"""Export the weights of a checkpoint as safetensors, in a chosen dtype."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lightning_memprec._files.checkpoint_files import Source, open_checkpoint
from lightning_memprec._files.safetensors_writer import OutputTensor, write_safetensors
from lightning_memprec._files.stored_tensor import StoredTensor, untie
from lightning_memprec._units import parse_bytes

__all__ = ["ExportDtype", "ExportedWeights", "export_weights"]

ExportDtype = Literal["float32", "bfloat16", "float16", "float64", "keep"]

_FLOATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class ExportedWeights:
    """What was written.

    Args:
        files: The files, the index last where there is one.
        total_bytes: Size of all tensors, in bytes.
        tensors: Number of tensors written.
        averaged: Whether they are averaged weights.
        tied: Names that were not written because they share the tensor of another name.
        left_out: Names without the prefix that was to be stripped.
    """

    files: tuple[Path, ...]
    total_bytes: int
    tensors: int
    averaged: bool
    tied: dict[str, str]
    left_out: tuple[str, ...]


def export_weights(
    checkpoint_path: str | Path,
    out_path: str | Path,
    dtype: ExportDtype = "float32",
    *,
    source: Source = "auto",
    strip_prefix: str = "",
    max_shard_size: int | str = "5GiB",
    overwrite: bool = False,
) -> ExportedWeights:
    """Write the weights of a checkpoint as safetensors.

    One tensor is in memory at a time. Above ``max_shard_size`` the weights go to several files with an index,
    in the layout that Hugging Face Transformers reads. Names that share one tensor (tied weights) are written
    once, under the first name; the others stand in the metadata, as ``safetensors.torch.save_model`` does it,
    so that ``safetensors.torch.load_model`` and ``from_pretrained`` accept the file.

    Args:
        checkpoint_path: Whatever :func:`~lightning_memprec._files.checkpoint_files.open_checkpoint`
            reads.
        out_path: A file that ends in ``.safetensors``, or a folder, in which ``model.safetensors`` is made.
        dtype: Dtype of the floating-point weights. ``"keep"`` leaves each as it is. Integers, booleans,
            complex numbers and 8-bit floats are never changed.
        source: Averaged weights or the last raw ones; by default the averages if there are any.
        strip_prefix: Text to remove from the start of each name, such as ``"model."``, under which a
            LightningModule keeps its network. Names without it are left out.
        max_shard_size: Largest size of one file's tensors, in bytes or as text such as ``"5GiB"``. A tensor
            larger than that gets a file of its own.
        overwrite: Whether to replace an earlier export at ``out_path``.

    Returns:
        The files and what they hold.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        FileExistsError: If there is an export already and ``overwrite`` is false.
        CheckpointError: If the checkpoint is damaged, unsafe or of an unknown kind.
        OverflowError: If a weight is too large for ``dtype``; the message names the tensor.
        ValueError: If an argument is not one of its choices, or no name has the prefix.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"state_dict": {"layer.weight": torch.ones(2, 3)}}, f"{folder}/last.ckpt")
        ...     result = export_weights(f"{folder}/last.ckpt", f"{folder}/out", "bfloat16")
        ...     print([file.name for file in result.files], result.total_bytes)
        ['model.safetensors'] 12
    """
    if dtype not in (*_FLOATS, "keep"):
        raise ValueError(f"`dtype` must be one of {[*_FLOATS, 'keep']}, got {dtype!r}.")
    limit_bytes = parse_bytes(max_shard_size)
    target = Path(out_path)
    target = target if target.suffix == ".safetensors" else target / "model.safetensors"
    earlier = _earlier_export(target)
    if earlier and not overwrite:
        raise FileExistsError(f"{str(earlier[0])!r} exists. Pass `overwrite=True`, or choose another path.")
    checkpoint = open_checkpoint(checkpoint_path, source)
    weights, left_out = _strip(checkpoint.weights, strip_prefix)
    kept, tied = untie(weights)
    output = {name: _output(stored, dtype) for name, stored in kept.items()}
    shards = _split(output, limit_bytes)
    files = _write(target, shards, tied)
    for path in earlier:
        if path not in files:
            path.unlink(missing_ok=True)  # A stale index or file would be read in place of the new ones.
    total_bytes = sum(tensor.size_bytes for tensor in output.values())
    return ExportedWeights(files, total_bytes, len(output), checkpoint.averaged, tied, left_out)


def _earlier_export(target: Path) -> list[Path]:
    shard = re.compile(
        rf"{re.escape(target.stem)}(-\d{{5}}-of-\d{{5}}\.safetensors|\.safetensors(\.index\.json)?)"
    )
    if not target.parent.is_dir():
        return []
    return sorted(path for path in target.parent.iterdir() if shard.fullmatch(path.name))


def _strip(
    weights: Mapping[str, StoredTensor], prefix: str
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    stripped = {n.removeprefix(prefix): tensor for n, tensor in weights.items() if n.startswith(prefix)}
    if not stripped:
        raise ValueError(
            f"No weight's name starts with {prefix!r}; the first is {next(iter(weights))!r}. Correct "
            "`strip_prefix`."
        )
    return stripped, tuple(name for name in weights if not name.startswith(prefix))


def _output(stored: StoredTensor, dtype: ExportDtype) -> OutputTensor:
    convert = dtype != "keep" and stored.dtype in _FLOATS.values()
    return OutputTensor(_FLOATS[dtype] if convert else stored.dtype, stored.shape, stored.read)


def _split(tensors: Mapping[str, OutputTensor], limit_bytes: int) -> list[dict[str, OutputTensor]]:
    shards: list[dict[str, OutputTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.size_bytes > limit_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.size_bytes
    return shards


def _write(target: Path, shards: list[dict[str, OutputTensor]], tied: dict[str, str]) -> tuple[Path, ...]:
    """Write all files beside their places, then move them there: none is seen half written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    paths = [target]
    if len(shards) > 1:
        names = [f"{target.stem}-{i:05d}-of-{len(shards):05d}" for i in range(1, len(shards) + 1)]
        paths = [target.with_name(f"{name}.safetensors") for name in names]
        paths.append(target.with_name(f"{target.name}.index.json"))
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths}
    try:
        for path, tensors in zip(paths, shards, strict=False):
            aliases = {alias: name for alias, name in tied.items() if name in tensors}
            with temporary[path].open("wb") as file:
                write_safetensors(file, tensors, {"format": "pt", **aliases})
                file.flush()
                os.fsync(file.fileno())
        if len(shards) > 1:
            with temporary[paths[-1]].open("w", encoding="utf-8") as text:
                json.dump(_index(paths, shards), text, indent=2)
                text.flush()
                os.fsync(text.fileno())
        for path in paths:
            temporary[path].replace(path)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return tuple(paths)


def _index(paths: list[Path], shards: list[dict[str, OutputTensor]]) -> dict[str, object]:
    places = {name: path.name for path, tensors in zip(paths, shards, strict=False) for name in tensors}
    total_bytes = sum(tensor.size_bytes for tensors in shards for tensor in tensors.values())
    return {"metadata": {"total_size": total_bytes}, "weight_map": places}
