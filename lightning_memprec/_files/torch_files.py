"""Read files of ``torch.save`` lazily: the structure at once, each tensor's bytes when they are needed."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_memprec._files.stored_tensor import CheckpointError, StoredTensor

__all__ = ["load_lazily", "read_into"]


# What files of torch.save begin with: a zip archive, or before torch 1.6 a pickle of protocol 2 or later.
_BEGINNINGS = (b"PK", b"\x80")


class _Unknown(list[Any]):
    """Stands for an object of a class that is not built: hyperparameters, states of callbacks.

    A list, because torch's unpickler appends to nothing else.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> _Unknown:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def load_lazily(path: Path) -> Any:
    """Return what ``torch.save`` wrote, with a :class:`StoredTensor` in each tensor's place.

    Only torch's weights-only unpickler reads the file. Classes that it does not know, for example in saved
    hyperparameters, are not imported: an empty object stands in their place.

    Args:
        path: The file. One in the format before torch 1.6 is read whole.

    Raises:
        OSError: If the file may not be read.
        CheckpointError: If the file is cut, is no file of ``torch.save``, or holds what is not safe to read.
    """
    with path.open(
        "rb"
    ) as file:  # One that may not be read says so itself; torch says OSError of cut ones, too.
        beginning = file.read(2)
    if not beginning.startswith(_BEGINNINGS):
        raise CheckpointError(
            f"{str(path)!r} is not a checkpoint: torch.save did not write it. Give a `.ckpt` or another file of "
            "torch.save, or a file that ends in `.safetensors`."
        )
    try:
        if not zipfile.is_zipfile(path):
            contents = torch.load(path, map_location="cpu", weights_only=True)
        else:
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            stand_ins: list[Any] = [(type(name, (_Unknown,), {}), name) for name in unknown]
            with torch.serialization.safe_globals(stand_ins):
                contents = torch.load(path, map_location="meta", weights_only=True)
        return _lazy(contents, path, path.stat().st_size)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        raise CheckpointError(
            f"{str(path)!r} cannot be read without running code from it: {reason.rstrip('.')}. Save the weights "
            "alone: torch.save(model.state_dict(), path)."
        ) from error
    except Exception as error:  # A damaged file can fail anywhere in torch's reader, with any type.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{str(path)!r} is damaged or no file of torch.save: {reason}. Copy it again."
        ) from error


def read_into(path: Path, offset: int, tensor: Tensor) -> None:
    """Fill a contiguous tensor with bytes of a file.

    Args:
        path: The file.
        offset: Position of the first byte.
        tensor: Any contiguous tensor on the CPU.

    Raises:
        CheckpointError: If the file ends too early.
    """
    if not tensor.numel():
        return
    target = tensor.reshape(-1).view(torch.uint8).numpy().data
    with path.open("rb") as file:
        file.seek(offset)
        if file.readinto(target) != len(target):
            raise CheckpointError(f"{str(path)!r} ends before byte {offset + len(target)}. Copy it again.")


def _lazy(tree: Any, path: Path, file_bytes: int) -> Any:
    if isinstance(tree, Tensor):
        return _stored(tree, path, file_bytes)
    if isinstance(tree, Mapping):
        return {key: _lazy(value, path, file_bytes) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_lazy(value, path, file_bytes) for value in tree]
    return tree


def _stored(tensor: Tensor, path: Path, file_bytes: int) -> StoredTensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{str(path)!r} holds a {tensor.layout} or quantized tensor; only dense ones are read."
        )
    if tensor.device.type != "meta":
        return StoredTensor(
            tensor.dtype, tensor.shape, tensor.detach, (tensor.data_ptr(), tensor.shape, tensor.stride())
        )
    storage = tensor.untyped_storage()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span = span if tensor.numel() else 0
    start = int(tensor.storage_offset()) * tensor.dtype.itemsize
    offset: int = vars(storage)["_checkpoint_offset"]  # Set by torch/serialization.py, `load_tensor`.
    inside = (
        start + span * tensor.dtype.itemsize <= storage.nbytes() and offset + storage.nbytes() <= file_bytes
    )
    # An expanded tensor (stride 0) could claim any size from a few bytes.
    if not inside or tensor.nbytes > file_bytes:
        raise CheckpointError(
            f"{str(path)!r} claims a tensor of shape {tuple(tensor.shape)}, larger than what the file holds. "
            "It is damaged: copy it again."
        )
    dtype, shape, stride = tensor.dtype, tensor.shape, tensor.stride()

    def read() -> Tensor:
        buffer = torch.empty(span, dtype=dtype)
        read_into(path, offset + start, buffer)
        return buffer.as_strided(shape, stride)

    return StoredTensor(dtype, shape, read, (offset + start, shape, stride))
