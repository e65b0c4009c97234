"""Open a checkpoint of any common kind without loading it: names, dtypes and shapes now, values on demand.

Files come from outside, so nothing in them is executed, sizes are checked before memory is taken, and every
refusal names the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_memprec._files.safetensors_writer import DTYPES
from lightning_memprec._files.stored_tensor import CheckpointError, StoredTensor
from lightning_memprec._files.torch_files import load_lazily

__all__ = ["Checkpoint", "Source", "open_checkpoint"]

Source = Literal["auto", "averaged", "current"]

# Lightning's WeightAveraging callback saves the average as `state_dict` and the raw weights under this key
# (lightning/pytorch/callbacks/weight_averaging.py, `on_save_checkpoint`).
_CURRENT = "current_model_state"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Args:
        kind: ``"lightning"``, ``"state_dict"``, ``"safetensors"`` or ``"distributed"``.
        weights: The model's tensors by name, in the file's order.
        averaged: Whether ``weights`` are averages over the run instead of the last weights.
        has_average: Whether the checkpoint holds averages at all.
        optimizer: Tensors of the optimizers' states, by dotted name.
        contents: Everything else that the file holds, tensors as :class:`StoredTensor`.
    """

    kind: Literal["lightning", "state_dict", "safetensors", "distributed"]
    weights: dict[str, StoredTensor]
    averaged: bool = False
    has_average: bool = False
    optimizer: dict[str, StoredTensor] = field(default_factory=dict)
    contents: dict[str, Any] = field(default_factory=dict)


def open_checkpoint(path: str | Path, source: Source = "auto") -> Checkpoint:
    """Open a checkpoint without reading its weights.

    Args:
        path: A Lightning ``.ckpt``, a state dict saved by ``torch.save``, a ``.safetensors`` file, a folder
            with ``.safetensors`` shards, or a folder of ``torch.distributed.checkpoint`` (which Lightning's
            FSDP and model-parallel strategies write).
        source: Which weights to take where Lightning's ``WeightAveraging`` was used: ``"averaged"``,
            ``"current"`` (the last raw weights), or ``"auto"``, the averages if there are any.

    Returns:
        Names, dtypes and shapes, and readers for the values.

    Raises:
        FileNotFoundError: If there is nothing at ``path``.
        CheckpointError: If the file is damaged, unsafe or of an unknown kind, or lacks the averages asked for.
        ValueError: If ``source`` is not one of its choices.
    """
    path = Path(path)
    if source not in ("auto", "averaged", "current"):
        raise ValueError(f"`source` must be 'auto', 'averaged' or 'current', got {source!r}.")
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint at {str(path)!r}. Check the path.")
    checkpoint = _open(path, source)
    if source == "averaged" and not checkpoint.has_average:
        raise CheckpointError(
            f"{str(path)!r} holds no averaged weights. They are there if the run used Lightning's "
            "`WeightAveraging` or `EMAWeightAveraging`; otherwise take `source='current'`."
        )
    return checkpoint


def _open(path: Path, source: Source) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path, source)
    if path.suffix == ".safetensors":
        return _safetensors([path])
    return _pickled(load_lazily(path), path, source)


def _open_folder(path: Path, source: Source) -> Checkpoint:
    if (path / ".metadata").exists():
        return _distributed(path, source)
    if (path / "latest").exists() and (path / "checkpoint").is_dir():
        raise CheckpointError(
            f"{str(path)!r} is a DeepSpeed checkpoint, which has its own format. First run "
            "`lightning.pytorch.utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict` on it."
        )
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise CheckpointError(
            f"{str(path)!r} holds {len(indexes)} sharded checkpoints ({', '.join(i.name for i in indexes)}). "
            "Move the one you want to a folder of its own."
        )
    shards = _shards_of(indexes[0]) if indexes else sorted(path.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(
            f"{str(path)!r} holds neither `.safetensors` files nor a distributed checkpoint (`.metadata`). "
            "Give the checkpoint itself."
        )
    return _safetensors(shards)


def _shards_of(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = [index.parent / name for name in sorted(names) if Path(name).name == name]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{str(index)!r} is no index of shards: {error}. Copy it again.") from error
    if len(paths) != len(names):
        raise CheckpointError(f"{str(index)!r} names shards outside its folder. Do not trust this file.")
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise CheckpointError(f"{str(index)!r} names shards that are missing: {missing}. Copy them as well.")
    return paths


def _safetensors(paths: list[Path]) -> Checkpoint:
    weights: dict[str, StoredTensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    if name in weights:
                        raise CheckpointError(f"{name!r} is in two of the shards {[p.name for p in paths]}.")
                    part = file.get_slice(name)
                    weights[name] = _from_safetensors(path, name, part.get_dtype(), part.get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{str(path)!r} is no sound safetensors file: {error}.") from error
    return Checkpoint("safetensors", weights)


def _from_safetensors(path: Path, name: str, dtype: str, shape: list[int]) -> StoredTensor:
    def read() -> Tensor:
        # Opened anew for each tensor, so that pages of those read before do not stay mapped.
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    if dtype not in DTYPES:
        raise CheckpointError(f"{str(path)!r} holds {name!r} as {dtype}, which torch cannot hold plainly.")
    return StoredTensor(DTYPES[dtype], torch.Size(shape), read)


def _pickled(contents: Any, path: Path, source: Source) -> Checkpoint:
    if isinstance(contents, Mapping) and isinstance(contents.get("state_dict"), Mapping):
        return _lightning(dict(contents), path, source)
    tensors = _tensors(contents) if isinstance(contents, Mapping) else {}
    if not tensors:
        held = (
            f"keys {list(contents)[:8]}" if isinstance(contents, Mapping) else f"a {type(contents).__name__}"
        )
        raise CheckpointError(
            f"{str(path)!r} is neither a Lightning checkpoint (`state_dict`) nor a state dict of tensors; it "
            f"holds {held}. Save the state dict alone: torch.save(model.state_dict(), path)."
        )
    return Checkpoint("state_dict", tensors)


def _lightning(contents: dict[str, Any], path: Path, source: Source) -> Checkpoint:
    has_average = isinstance(contents.get(_CURRENT), Mapping)
    current = contents.pop(_CURRENT, None)
    chosen = contents.pop("state_dict")
    averaged = has_average and source != "current"
    weights = _tensors(current if has_average and not averaged else chosen)
    if not weights:
        raise CheckpointError(f"{str(path)!r} holds no tensors under `state_dict`. Was the model empty?")
    optimizer = dict(_named_tensors(contents.pop("optimizer_states", []), "optimizer_states"))
    return Checkpoint("lightning", weights, averaged, has_average, optimizer, contents)


def _distributed(path: Path, source: Source) -> Checkpoint:
    # Imported here: torch.distributed.checkpoint takes longer to import than most files take to open.
    from lightning_memprec._files.distributed_folder import read_folder

    tensors = read_folder(path)
    meta = path / "meta.pt"  # Lightning keeps there all that is not sharded.
    contents = load_lazily(meta) if meta.exists() else {}
    contents = dict(contents) if isinstance(contents, Mapping) else {}
    optimizer = {name: tensor for name, tensor in tensors.items() if name.startswith("optim")}
    weights = {name: tensor for name, tensor in tensors.items() if name not in optimizer}
    # FSDPStrategy nests the weights in `model`, ModelParallelStrategy in `state_dict`; so do most scripts.
    for prefix in ("state_dict.", "model."):
        nested = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
        if nested:
            weights = nested
            break
    has_average = isinstance(contents.get(_CURRENT), Mapping)
    current = _tensors(contents.pop(_CURRENT, {}))
    if has_average and source == "current":
        weights = current
    if not weights:
        raise CheckpointError(f"{str(path)!r} holds no tensors of a model. Give another checkpoint.")
    averaged = has_average and source != "current"
    return Checkpoint("distributed", weights, averaged, has_average, optimizer, contents)


def _tensors(mapping: Any) -> dict[str, StoredTensor]:
    """Take the tensors of a state dict; a module's extra state is not one."""
    return {str(name): value for name, value in mapping.items() if isinstance(value, StoredTensor)}


def _named_tensors(tree: Any, name: str) -> Iterator[tuple[str, StoredTensor]]:
    if isinstance(tree, StoredTensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _named_tensors(value, f"{name}.{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _named_tensors(value, f"{name}.{index}")
