"""Which layers of a model are int8 and how, as plain values; and a float model turned back into that shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memprec._errors import MemPrecError
from lightning_memprec.quantization.affine import Quantized
from lightning_memprec.quantization.modules.base import Int8Module, Scheme
from lightning_memprec.quantization.modules.dequantizing import DequantizingModule
from lightning_memprec.quantization.modules.embedding import Int8Embedding
from lightning_memprec.quantization.modules.linear import Int8Linear
from lightning_memprec.quantization.packing import is_packed
from lightning_memprec.quantization.swapping import build_layers, swap
from lightning_memprec.quantization.targets import Target, find_targets

__all__ = [
    "LayerLayout",
    "QuantizedFileError",
    "blank_weights",
    "layout_from_config",
    "layout_of",
    "layout_to_config",
    "rebuild",
]

# Of this description; raised when an older reader would misread a newer file. In version 1 integers of any width are
# int8, from version 2 on those of up to 4 bits are packed.
_PLAIN, _PACKED = 1, 2
_KINDS: dict[type[nn.Module], str] = {Int8Linear: "Linear", Int8Embedding: "Embedding"}
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class QuantizedFileError(MemPrecError, ValueError):
    """A file of a quantized model is damaged, of an unknown kind, or belongs to another model."""


@dataclass(frozen=True)
class LayerLayout:
    """How one layer is stored.

    Args:
        kind: ``"Linear"``, ``"Embedding"``, or ``"other"`` for layers that only this package reads.
        scheme: How it was quantized.
        float_dtype: Dtype in which it computes.
    """

    kind: str
    scheme: Scheme
    float_dtype: torch.dtype


def layout_of(module: nn.Module) -> dict[str, LayerLayout]:
    """List the int8 layers of a model.

    Args:
        module: What ``quantize_`` changed.

    Raises:
        ValueError: If it has none.
    """
    layers: dict[str, LayerLayout] = {}
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in layers)  # Attention is one layer.
        if isinstance(part, (Int8Module, DequantizingModule)) and not inside:
            kind = next((text for cls, text in _KINDS.items() if isinstance(part, cls)), "other")
            layers[name] = LayerLayout(kind, part.scheme, part.float_dtype)
    if not layers:
        raise ValueError(f"The `{type(module).__name__}` has no int8 layers. Call `quantize_` on it first.")
    return layers


def layout_to_config(layers: Mapping[str, LayerLayout]) -> dict[str, Any]:
    """Return the layout as plain values for JSON, layers of one kind and scheme together."""
    groups: dict[LayerLayout, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(layer, []).append(name)
    return {
        "version": _PACKED if any(is_packed(layer.scheme.bits) for layer in layers.values()) else _PLAIN,
        "groups": [
            {
                "kind": layer.kind,
                "scheme": asdict(layer.scheme),
                "float_dtype": str(layer.float_dtype).removeprefix("torch."),
                "layers": names,
            }
            for layer, names in groups.items()
        ],
    }


def layout_from_config(config: Any, source: str) -> dict[str, LayerLayout]:
    """Undo :func:`layout_to_config` on values from outside.

    Args:
        config: What the file holds.
        source: The file, for messages.

    Raises:
        QuantizedFileError: If it is no layout.
    """
    try:
        version = config["version"]
        if version not in (_PLAIN, _PACKED):
            raise QuantizedFileError(
                f"{source!r} has a layout of version {version!r}; this release reads {_PLAIN} and {_PACKED}. Update"
                " the package."
            )
        return dict(_layers(config["groups"]))
    except QuantizedFileError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise QuantizedFileError(
            f"{source!r} has a damaged description of its layers ({type(error).__name__}: {error}). Export it again."
        ) from error


def _layers(groups: list[Any]) -> Iterator[tuple[str, LayerLayout]]:
    for group in groups:
        layer = LayerLayout(str(group["kind"]), Scheme(**group["scheme"]), _DTYPES[group["float_dtype"]])
        for name in group["layers"]:
            if not isinstance(name, str):
                raise TypeError(f"{name!r} is no name of a layer")
            yield name, layer


def rebuild(module: nn.Module, layers: Mapping[str, LayerLayout], source: str) -> None:
    """Put int8 layers without values into a float model, in place; layers that are int8 already stay.

    Args:
        module: The float model, on any device, also meta.
        layers: What :func:`layout_of` returned for the quantized model.
        source: The file, for messages.

    Raises:
        QuantizedFileError: If the model lacks one of the layers, or has another kind of layer in its place.
    """
    present = dict(module.named_modules())
    missing = [name for name in layers if name not in present]
    if missing:
        raise QuantizedFileError(
            f"{source!r} is of another model: a `{type(module).__name__}` has no layers {missing[:5]}"
            f" ({len(missing)} of {len(layers)} are missing). Give the model that was quantized."
        )
    wanted = {
        name: layer
        for name, layer in layers.items()
        if not isinstance(present[name], (Int8Module, DequantizingModule))
    }
    targets = _targets(module, wanted, source)
    weights = blank_weights(targets)
    with torch.no_grad():
        built = build_layers(targets, weights)
        swap(module, {id(target.module): built[target.name] for target in targets})
    for name, layer in layers.items():
        part = module.get_submodule(name)
        if isinstance(part, (Int8Module, DequantizingModule)):
            part.float_dtype = layer.float_dtype


def _targets(module: nn.Module, layers: Mapping[str, LayerLayout], source: str) -> list[Target]:
    found: dict[str, Target] = {}
    reasons: dict[str, str] = {}
    for scheme in {layer.scheme for layer in layers.values()}:
        # All names each time: a weight tied to a layer that is left out would be left out, too.
        targets, skipped = find_targets(module, scheme, include=list(layers))
        reasons |= {left.name: left.reason for left in skipped}
        found |= {t.name: t for t in targets if t.name in layers and layers[t.name].scheme == t.scheme}
    lost = [name for name in layers if name not in found]
    if lost:
        kind = type(module.get_submodule(lost[0])).__name__
        reason = reasons.get(lost[0], "that is no layer of the scheme in the file")
        raise QuantizedFileError(
            f"{source!r} has int8 weights for {lost[0]!r}, which is a `{kind}` here: {reason}. Give the model that"
            " was quantized, in the state in which it was quantized."
        )
    return [found[name] for name in layers]


def blank_weights(targets: list[Target]) -> dict[str, dict[str, Quantized]]:
    """Return weights of the right shapes and dtypes whose values do not matter yet, shared where they are tied.

    Args:
        targets: Layers to make int8.
    """
    seen: dict[tuple[int, torch.Size], Quantized] = {}
    weights: dict[str, dict[str, Quantized]] = {}
    for target in targets:
        parameters = dict(target.module.named_parameters())
        weights[target.name] = {}
        for key, read in target.weights.items():
            matrix = read()
            # With the shape, because GPT-2's Conv1D reads the same parameter transposed.
            identity = (id(parameters.get(key, matrix)), matrix.shape)
            if identity not in seen or key not in parameters:
                seen[identity] = _blank(matrix, target.scheme)
            weights[target.name][key] = seen[identity]
    return weights


def _blank(matrix: Tensor, scheme: Scheme) -> Quantized:
    rows, columns = matrix.shape
    groups = 1 if scheme.group_size is None else -(-columns // scheme.group_size)
    shape = (1,) if scheme.weight_granularity == "tensor" else (rows, groups)
    zero_point = None
    if scheme.mapping != "symmetric":
        dtype = torch.int8 if scheme.mapping == "affine" else torch.int32
        zero_point = torch.zeros(shape, dtype=dtype, device=matrix.device)
    values = torch.zeros(matrix.shape, dtype=torch.int8, device=matrix.device)
    return Quantized(values, torch.ones(shape, device=matrix.device), zero_point)
