"""How our layers are kept under the keys of ``compressed-tensors``, and the configuration by which others read them.

Layers of 5 to 8 bits have its format ``int-quantized``: ``weight`` int8, ``weight_scale``, and ``weight_zero_point`` if
affine, as in our layers. Those of 2 to 4 bits have ``pack-quantized``: ``weight_packed``, with the shape of the matrix
in ``weight_shape`` (int64 ``[2]``) and zero points of channels and groups packed along the channels. ``input_scale``
and ``input_zero_point`` are those of static activations (https://github.com/vllm-project/compressed-tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memprec.quantization.checkpoint_layout import LayerLayout, QuantizedFileError
from lightning_memprec.quantization.modules.base import Int8Module, Scheme
from lightning_memprec.quantization.packing import is_packed, pack, unpack, words
from lightning_memprec.quantization.streaming import StreamedTensor

__all__ = [
    "from_compressed_tensors",
    "quantization_config",
    "stream_to_compressed_tensors",
    "to_compressed_tensors",
]


def to_compressed_tensors(
    module: nn.Module, state: Mapping[str, Tensor], layers: Mapping[str, LayerLayout]
) -> dict[str, Tensor]:
    """Add the shapes of packed layers to a state, and pack their zero points.

    Args:
        module: The quantized model.
        state: Its state.
        layers: Its int8 layers.

    Returns:
        A new state.
    """
    changes = _changes(module, layers, lambda name: state[name])
    return {**state, **{name: tensor.read() for name, tensor in changes.items()}}


def stream_to_compressed_tensors(
    module: nn.Module, tensors: Mapping[str, StreamedTensor], layers: Mapping[str, LayerLayout]
) -> dict[str, StreamedTensor]:
    """Do as :func:`to_compressed_tensors` with tensors that are not computed yet.

    Args:
        module: The quantized model, without values.
        tensors: Its state.
        layers: Its int8 layers.
    """
    return {**tensors, **_changes(module, layers, lambda name: tensors[name].read())}


def from_compressed_tensors(
    module: nn.Module, state: Mapping[str, Tensor], layers: Mapping[str, LayerLayout], source: str
) -> dict[str, Tensor]:
    """Undo :func:`to_compressed_tensors`.

    Args:
        module: The model with layers without values.
        state: What the file holds; a zero point that is no packed one of the right shape stays as it is.
        layers: The int8 layers in it.
        source: The file, for messages.

    Raises:
        QuantizedFileError: If the shape of a layer is not that of the model.
    """
    state = dict(state)
    for name, part in _packed(module, layers):
        shape = state.pop(f"{name}.weight_shape", None)
        if shape is not None and shape.tolist() != list(part.matrix_shape):
            raise QuantizedFileError(
                f"{source!r} holds {name!r} as a matrix of {shape.tolist()}, but this model has"
                f" {list(part.matrix_shape)}. Give the model that was quantized."
            )
        key = f"{name}.weight_zero_point"
        own, given = part.weight_zero_point, state.get(key)
        if own is None or given is None or given.dtype != torch.int32 or given.dim() != 2:
            continue
        if given.shape == (words(own.shape[0], part.scheme.bits), own.shape[-1]):
            state[key] = unpack(given.t(), part.scheme.bits, own.shape[0]).t().contiguous()
    return state


def _described(layer: LayerLayout) -> bool:
    """Tell whether the format can express a layer."""
    return layer.kind != "other" and layer.scheme.mapping != "affine_textbook"


def _packed(module: nn.Module, layers: Mapping[str, LayerLayout]) -> Iterator[tuple[str, Int8Module]]:
    for name, layer in layers.items():
        part = module.get_submodule(name)
        if isinstance(part, Int8Module) and _described(layer) and is_packed(part.scheme.bits):
            yield name, part


def _changes(
    module: nn.Module, layers: Mapping[str, LayerLayout], read: Callable[[str], Tensor]
) -> dict[str, StreamedTensor]:
    changes = {}
    for name, part in _packed(module, layers):
        shape = partial(torch.tensor, part.matrix_shape, dtype=torch.int64)
        changes[f"{name}.weight_shape"] = StreamedTensor(torch.int64, torch.Size([2]), shape)
        own, bits = part.weight_zero_point, part.scheme.bits
        # A zero point for the whole tensor is not packed there.
        if own is not None and part.scheme.weight_granularity != "tensor":
            key = f"{name}.weight_zero_point"
            size = torch.Size([words(own.shape[0], bits), own.shape[1]])
            changes[key] = StreamedTensor(torch.int32, size, partial(_pack_channels, read, key, bits))
    return changes


def _pack_channels(read: Callable[[str], Tensor], name: str, bits: int) -> Tensor:
    return pack(read(name).t(), bits).t().contiguous()


def quantization_config(layers: Mapping[str, LayerLayout], ignore: Iterable[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a ``config.json``.

    Only what the format can express is listed: linear layers and embeddings. Convolutions, attention and
    recurrent layers are read by this package alone.

    Args:
        layers: The int8 layers.
        ignore: Names of linear layers that are not quantized.
    """
    groups: dict[Scheme, list[str]] = {}
    for name, layer in layers.items():
        if _described(layer):
            groups.setdefault(layer.scheme, []).append(name)
    formats = {_format(scheme) for scheme in groups} or {"int-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "config_groups": {
            f"group_{index}": {
                "targets": names,
                # Without it in the group, readers of weight-only files take int8 weights for packed ones.
                "format": _format(scheme),
                "weights": _weights(scheme),
                "input_activations": _activations(scheme),
                "output_activations": None,
            }
            for index, (scheme, names) in enumerate(groups.items())
        },
    }


def _format(scheme: Scheme) -> str:
    return "pack-quantized" if is_packed(scheme.bits) else "int-quantized"


def _weights(scheme: Scheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.mapping == "symmetric",
        "strategy": scheme.weight_granularity,
        "group_size": scheme.group_size,
        "dynamic": False,
    }


def _activations(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.activations == "float":
        return None
    return {
        "num_bits": 8,
        "type": "int",
        "symmetric": scheme.mapping == "symmetric",
        "strategy": "token" if scheme.activations == "token" else "tensor",
        "group_size": None,
        "dynamic": scheme.activations != "static",
    }
