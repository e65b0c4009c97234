"""Read and write files of quantized models: safetensors and Lightning checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_memprec._files import safetensors_writer
from lightning_memprec._files.atomic import replacing
from lightning_memprec._files.safetensors_writer import OutputTensor
from lightning_memprec.quantization.checkpoint_layout import QuantizedFileError

__all__ = [
    "CHECKPOINT_KEY",
    "METADATA_KEY",
    "read_checkpoint",
    "read_safetensors",
    "write_checkpoint",
    "write_safetensors",
    "written_for_each",
]

METADATA_KEY = "lightning_memprec"  # In the header of safetensors files, and in config.json.
CHECKPOINT_KEY = "lightning_memprec_quantization"  # In a Lightning checkpoint, beside `state_dict`.


def write_safetensors(path: Path, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write tensors and, in the header, a configuration; tied tensors are written once.

    Args:
        path: The file.
        state: Tensors by name.
        config: Plain values.
    """
    kept, aliases = _untie(state)
    metadata = {"format": "pt", METADATA_KEY: json.dumps({**config, "tied": aliases}), **aliases}
    output = {name: OutputTensor(tensor.dtype, tensor.shape, tensor.cpu) for name, tensor in kept.items()}
    with replacing(path) as file:
        safetensors_writer.write_safetensors(file, output, metadata)


def written_for_each(name: str) -> bool:
    """Tell whether a tensor is written under each of its names: Transformers ties weights, but not their scales."""
    return name.endswith(("_scale", "_zero_point", "_shape"))


def _untie(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        owner = first.setdefault(place if tensor.numel() and not written_for_each(name) else name, name)
        if owner != name:
            aliases[name] = owner
    return {name: tensor for name, tensor in state.items() if name not in aliases}, aliases


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_safetensors` wrote, or a streamed file of that layout.

    Returns:
        Tensors by name, tied ones under each of their names, and the configuration.

    Raises:
        FileNotFoundError: If there is no file.
        QuantizedFileError: If the file is damaged or of another kind.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no quantized model at {str(path)!r}. Check the path.")
    try:
        with safe_open(path, framework="pt") as file:
            config = _parse((file.metadata() or {}).get(METADATA_KEY), path)
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise QuantizedFileError(
            f"{str(path)!r} is no sound safetensors file: {error}. Copy it again."
        ) from error
    tied = config.get("tied") or {}
    if not isinstance(tied, dict) or not all(owner in state for owner in tied.values()):
        raise QuantizedFileError(f"{str(path)!r} ties names to tensors that it lacks. Export it again.")
    return state | {alias: state[owner] for alias, owner in tied.items()}, config


def _parse(text: str | None, path: Path) -> dict[str, Any]:
    if text is None:
        raise QuantizedFileError(
            f"{str(path)!r} does not say which layers are int8: `save_quantized` did not write it. Quantize the"
            " model and save it again, or open the file with the tool that wrote it."
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise QuantizedFileError(f"{str(path)!r} has a damaged header: {error}. Export it again.") from error
    if not isinstance(config, dict):
        raise QuantizedFileError(f"{str(path)!r} has a damaged header. Export it again.")
    return config


def write_checkpoint(
    path: Path, state: Mapping[str, Tensor], config: Mapping[str, Any], entries: Mapping[str, Any]
) -> None:
    """Write a Lightning checkpoint with weights alone.

    Args:
        path: The file.
        state: The model's state.
        config: Plain values, kept under :data:`CHECKPOINT_KEY`.
        entries: Further entries of the checkpoint.
    """
    with replacing(path) as file:
        try:
            torch.save({**entries, "state_dict": dict(state), CHECKPOINT_KEY: dict(config)}, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None  # A full disk, which torch reports as a wrong position.
            raise


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Read what :func:`write_checkpoint` wrote; nothing in the file is executed.

    Returns:
        State, configuration, and the other entries.

    Raises:
        FileNotFoundError: If there is no file.
        QuantizedFileError: If the file is damaged, unsafe or of another kind.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no quantized model at {str(path)!r}. Check the path.")
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # A damaged file can fail anywhere in torch's reader, with any type.
        reason = str(error).partition("\n")[0]
        raise QuantizedFileError(
            f"{str(path)!r} is damaged, or holds more than tensors and plain values: {reason} Export it again."
        ) from error
    config, state = (
        (contents.pop(key, None) for key in (CHECKPOINT_KEY, "state_dict"))
        if isinstance(contents, dict)
        else (None, None)
    )
    if not isinstance(config, dict) or not isinstance(state, dict):
        raise QuantizedFileError(
            f"{str(path)!r} holds no int8 model (`{CHECKPOINT_KEY}`). Quantize its weights with"
            " `lightning-memprec quantize`."
        )
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}, config, contents
