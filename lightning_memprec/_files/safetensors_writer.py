"""Write the safetensors format tensor by tensor; ``safetensors.torch.save_file`` needs all of them at once.

The format (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length, little-endian;
the header, JSON with dtype, shape and byte range of each tensor; the values, without gaps.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor

__all__ = ["DTYPES", "OutputTensor", "write_safetensors"]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_CHUNK_ELEMENTS = 2**20  # Converted and written at once: a few MiB, next to nothing beside a tensor.


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write.

    Args:
        dtype: Element type in the new file.
        shape: Shape.
        read: Returns the values, in any dtype.
    """

    dtype: torch.dtype
    shape: torch.Size
    read: Callable[[], Tensor]

    @property
    def size_bytes(self) -> int:
        """Size in the new file, in bytes."""
        return self.shape.numel() * self.dtype.itemsize


def write_safetensors(
    file: IO[bytes], tensors: Mapping[str, OutputTensor], metadata: Mapping[str, str]
) -> None:
    """Write one file; one tensor is in memory at a time.

    Args:
        file: Open binary file.
        tensors: What to write, by name.
        metadata: Texts for the header.

    Raises:
        OverflowError: If a finite value would become infinite in its new dtype; the message names the tensor.
        ValueError: If a dtype has no name in the format.
    """
    # Widest first, as safetensors itself does, so that each tensor is aligned.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name!r} is {tensor.dtype}, which safetensors cannot hold. Leave it out.")
        start, end = end, end + tensor.size_bytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        for chunk in _converted(name, tensors[name]):
            file.write(chunk.view(torch.uint8).numpy().data)


def _converted(name: str, tensor: OutputTensor) -> Iterator[Tensor]:
    values = tensor.read()
    for chunk in torch.split(values.reshape(-1), _CHUNK_ELEMENTS) if values.numel() else ():
        if chunk.dtype == tensor.dtype:
            yield chunk
            continue
        converted = chunk.to(tensor.dtype)
        if (converted.isinf() & ~chunk.isinf()).any():
            largest = chunk[chunk.isfinite()].abs().max().item()
            limit = torch.finfo(tensor.dtype).max
            raise OverflowError(
                f"{name!r} holds {largest:g}, beyond the {limit:g} that {str(tensor.dtype)[6:]} can hold. "
                "Export as bfloat16 or float32."
            )
        yield converted
