"""Save a quantized model, and fill a float model with it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from torch import Tensor, nn

from lightning_memprec.__about__ import __version__
from lightning_memprec._files.atomic import write_json
from lightning_memprec.quantization import bitsandbytes_format, compressed_tensors_format
from lightning_memprec.quantization.checkpoint_filling import OUTLIERS, arguments_for, fill
from lightning_memprec.quantization.checkpoint_io import (
    CHECKPOINT_KEY,
    read_checkpoint,
    read_safetensors,
    write_checkpoint,
    write_safetensors,
)
from lightning_memprec.quantization.checkpoint_layout import (
    LayerLayout,
    layout_from_config,
    layout_of,
    layout_to_config,
    rebuild,
)
from lightning_memprec.quantization.modules.base import Int8Module
from lightning_memprec.quantization.modules.dequantizing import DequantizingModule

__all__ = [
    "Format",
    "describe",
    "foreign_config",
    "load_quantized",
    "model_config",
    "restore_int8_layers",
    "save_quantized",
]

Format = Literal["compressed-tensors", "bitsandbytes"]
M = TypeVar("M", bound=nn.Module)

_FOLDER_FILE = "model.safetensors"


def save_quantized(
    module: nn.Module,
    path: str | Path,
    *,
    format: Format = "compressed-tensors",
    checkpoint_entries: Mapping[str, Any] | None = None,
) -> Path:
    """Save a model with int8 layers.

    A path that ends in ``.safetensors`` becomes one file with the configuration in its header, one that ends in
    ``.ckpt`` a Lightning checkpoint, any other a folder with ``model.safetensors`` and ``config.json``. Files
    take the place of earlier ones whole or not at all. Tied tensors are written once.

    Args:
        module: What ``quantize_`` changed.
        path: Where to write.
        format: Keys of the tensors: ``"compressed-tensors"`` (its formats ``int-quantized`` and, for up to 4 bits,
            ``pack-quantized``; Hugging Face Transformers reads linear layers and embeddings of it) or
            ``"bitsandbytes"`` (linear layers in int8, all else in floating point).
        checkpoint_entries: Further plain entries for a ``.ckpt``.

    Returns:
        The path.

    Raises:
        ValueError: If the model has no int8 layers, the format is unknown, or it can hold none of the layers.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from lightning_memprec.quantization.convert import quantize_
        >>> model = nn.Sequential(nn.Linear(4, 2))
        >>> report = quantize_(model)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save_quantized(model, f"{folder}/int8")
        ...     again = load_quantized(path, lambda: nn.Sequential(nn.Linear(4, 2)))
        >>> torch.equal(model(torch.ones(1, 4)), again(torch.ones(1, 4)))
        True
    """
    path = Path(path)
    if format not in ("compressed-tensors", "bitsandbytes"):
        raise ValueError(f"`format` must be 'compressed-tensors' or 'bitsandbytes', got {format!r}.")
    layers = layout_of(module)
    state = {name: value.detach() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    if format == "bitsandbytes":
        layers = _held_by_bitsandbytes(module, layers)
        state = bitsandbytes_format.to_bitsandbytes(_with_float(module, state, layers), layers)
    elif path.suffix != ".ckpt":  # Which no other tool reads.
        state = compressed_tensors_format.to_compressed_tensors(module, state, layers)
    config = describe(layers, format)
    if path.suffix == ".ckpt":
        write_checkpoint(path, state, config, checkpoint_entries or {})
    elif path.suffix == ".safetensors":
        write_safetensors(
            path, state, config | {"quantization_config": foreign_config(module, layers, format)}
        )
    else:
        # The reader of this package needs the first file alone, so that an interruption between the two is harmless.
        write_safetensors(path / _FOLDER_FILE, state, config)
        content = model_config(module) | {"quantization_config": foreign_config(module, layers, format)}
        write_json(path / "config.json", content)
    return path


def describe(layers: Mapping[str, LayerLayout], format: Format) -> dict[str, Any]:
    """Return what a reader must know of a file, as plain values."""
    return {"library_version": __version__, "format": format, **layout_to_config(layers)}


def foreign_config(module: nn.Module, layers: Mapping[str, LayerLayout], format: Format) -> dict[str, Any]:
    """Return the ``quantization_config`` by which other tools read a file.

    Args:
        module: The model, float or quantized.
        layers: Its int8 layers.
        format: Keys of the tensors.
    """
    ignore = [
        name for name, part in module.named_modules() if isinstance(part, nn.Linear) and name not in layers
    ]
    if format == "bitsandbytes":
        ignore += [
            name
            for name, part in module.named_modules()
            if isinstance(part, Int8Module) and name not in layers
        ]
        return bitsandbytes_format.quantization_config(layers, ignore)
    return compressed_tensors_format.quantization_config(layers, ignore)


def model_config(module: nn.Module) -> dict[str, Any]:
    """Return what Hugging Face Transformers needs to build its own models."""
    config = getattr(module, "config", None)
    if not callable(getattr(config, "to_dict", None)):
        return {}
    # `save_pretrained` fills in the architecture, which `from_pretrained` of an Auto class needs.
    return {**config.to_dict(), "architectures": [type(module).__name__]}  # type: ignore[union-attr]


def _held_by_bitsandbytes(module: nn.Module, layers: Mapping[str, LayerLayout]) -> dict[str, LayerLayout]:
    others = {
        buffer.data_ptr()
        for name, layer in layers.items()
        if not bitsandbytes_format.holds(layer)
        for buffer in module.get_submodule(name).buffers()
        if buffer.numel()
    }
    held = {
        name: layer
        for name, layer in layers.items()
        if bitsandbytes_format.holds(layer)
        # Tied to an embedding, which it would keep in floating point.
        and module.get_submodule(name).get_buffer("weight").data_ptr() not in others
    }
    if not held:
        raise ValueError(
            "No layer fits the bitsandbytes format, which holds linear layers with 8 bits, symmetric, one scale a"
            " row. Use the format 'compressed-tensors'."
        )
    return held


def _with_float(
    module: nn.Module, state: dict[str, Tensor], kept: Mapping[str, LayerLayout]
) -> dict[str, Tensor]:
    """Dequantize the int8 layers of a state that are not among ``kept``; what is tied stays tied."""
    state = dict(state)
    done: dict[int, Tensor] = {}
    for name, part in module.named_modules():
        if name in kept or not isinstance(part, (Int8Module, DequantizingModule)):
            continue
        keys = part._names if isinstance(part, DequantizingModule) else ("weight",)
        for key in keys:
            identity = part.stored(key).data_ptr()
            if identity not in done:
                weight = part.dequantize() if isinstance(part, Int8Module) else part.dequantize_weight(key)
                done[identity] = weight.to(part.float_dtype)
            prefix = f"{name}.{key}" if name else key
            state.pop(f"{prefix}_packed", None)
            state[prefix] = done[identity]
            for suffix in ("scale", "zero_point"):
                state.pop(f"{prefix}_{suffix}", None)
        for buffer in OUTLIERS:
            state.pop(f"{name}.{buffer}", None)
    return state


def load_quantized(path: str | Path, module: M | type[M] | Callable[[], M]) -> M:
    """Fill a float model with what :func:`save_quantized` wrote.

    Args:
        path: A folder, a ``.safetensors`` file or a ``.ckpt``.
        module: The float model, changed in place; or its class, or another callable that makes it. A class is
            called without arguments, or with the hyperparameters that a ``.ckpt`` holds.

    Returns:
        The model with int8 layers, in the training mode in which it was built: call ``.eval()`` on it to predict. Its
        outputs are bit for bit those of the model that was saved (in the format
        ``"bitsandbytes"``, up to the last place of the scales).

    Raises:
        FileNotFoundError: If there is nothing at ``path``.
        QuantizedFileError: If the file is damaged, or belongs to another model.
    """
    path = Path(path)
    entries: dict[str, Any] = {}
    if path.suffix == ".ckpt":
        state, config, entries = read_checkpoint(path)
    else:
        state, config = read_safetensors(path if path.suffix == ".safetensors" else path / _FOLDER_FILE)
    layers = layout_from_config(config, str(path))
    if not isinstance(module, nn.Module):
        module = module(**arguments_for(module, entries.get("hyper_parameters")))
    built = cast("M", module)
    if config.get("format") == "bitsandbytes":
        state = bitsandbytes_format.from_bitsandbytes(state, layers)
    rebuild(built, layers, str(path))
    if config.get("format") != "bitsandbytes":
        state = compressed_tensors_format.from_compressed_tensors(built, state, layers, str(path))
    fill(built, state, str(path))
    return built


def restore_int8_layers(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Give a float model the int8 layers of a Lightning checkpoint, so that its state can be loaded.

    With this in a LightningModule, ``load_from_checkpoint`` and ``trainer.test(ckpt_path=...)`` take an int8
    ``.ckpt``::

        def on_load_checkpoint(self, checkpoint):
            restore_int8_layers(self, checkpoint)

    Args:
        module: The float model.
        checkpoint: The checkpoint as Lightning read it. One without int8 layers changes nothing.
    """
    config = checkpoint.get(CHECKPOINT_KEY)
    if config is not None:
        rebuild(module, layout_from_config(config, "the checkpoint"), "the checkpoint")
