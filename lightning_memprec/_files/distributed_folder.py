"""Read a folder of ``torch.distributed.checkpoint``, one tensor at a time."""

from __future__ import annotations

import functools
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_memprec._files.stored_tensor import CheckpointError, StoredTensor

__all__ = ["read_folder"]

# The classes that `torch.distributed.checkpoint` writes into `.metadata`; torch itself unpickles any.
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(d)[6:] for d in vars(torch).values() if isinstance(d, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "WindowsPath", "Path"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _METADATA_CLASSES.get(module, ()):
            raise CheckpointError(f"it names {module}.{name}, which a distributed checkpoint does not need")
        return super().find_class(module, name)


class _SafeReader(FileSystemReader):
    """Torch's reader with metadata that was checked."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checked metadata instead of unpickling the file."""
        return self._metadata


def read_folder(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of a distributed checkpoint.

    Args:
        path: Folder with ``.metadata`` and ``.distcp`` files.

    Returns:
        Tensors by dotted name; reading one gathers its shards.

    Raises:
        CheckpointError: If the metadata are damaged, name code to run, point outside the folder, or claim more
            than the files hold.
    """
    metadata = _read_metadata(path / ".metadata")
    _check(metadata, path)
    reader = _SafeReader(path, metadata)
    return {
        name: StoredTensor(
            entry.properties.dtype,
            entry.size,
            functools.partial(_read, reader, name, entry.size, entry.properties.dtype),
        )
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"it holds a {type(metadata).__name__}")
    except OSError:
        raise
    except Exception as error:  # A damaged pickle can fail with any type.
        raise CheckpointError(
            f"{str(path)!r} is no sound metadata of a distributed checkpoint: {error}. Copy the folder again."
        ) from error
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


def _check(metadata: Metadata, path: Path) -> None:
    files = {info.relative_path for info in (metadata.storage_data or {}).values()}
    outside = [name for name in files if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{str(path)!r} points outside its folder ({outside[0]!r}). Do not trust it.")
    missing = sorted(name for name in files if not (path / name).exists())
    if missing:
        raise CheckpointError(f"{str(path)!r} lacks the files {missing}. Copy the whole folder.")
    held_bytes = sum((path / name).stat().st_size for name in files)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            size_bytes = entry.size.numel() * entry.properties.dtype.itemsize
            if not 0 <= size_bytes <= held_bytes:
                raise CheckpointError(
                    f"{str(path)!r} claims {size_bytes} bytes for {name!r}, but its files hold {held_bytes}. "
                    "Copy the folder again."
                )


def _read(reader: _SafeReader, name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(size, dtype=dtype)
    try:
        with warnings.catch_warnings():
            # One process reads on purpose.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load({name: tensor}, storage_reader=reader, no_dist=True)
    except (
        Exception,
        CheckpointException,
    ) as error:  # Torch wraps what went wrong in its own types, with many lines.
        raise CheckpointError(
            f"{name!r} cannot be read from {str(reader.path)!r}: {str(error).partition(chr(10))[0]}"
        ) from error
    return tensor
