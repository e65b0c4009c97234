"""Quantize a model whose weights lie in files, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_memprec.quantization.affine import Quantized, quantize
from lightning_memprec.quantization.checkpoint_io import written_for_each
from lightning_memprec.quantization.checkpoint_layout import (
    LayerLayout,
    QuantizedFileError,
    blank_weights,
    layout_of,
)
from lightning_memprec.quantization.methods import resolve
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.modules.dequantizing import DequantizingModule
from lightning_memprec.quantization.packing import is_packed, pack
from lightning_memprec.quantization.swapping import build_layers, swap
from lightning_memprec.quantization.targets import Target, find_targets

__all__ = ["Stored", "Streamed", "StreamedTensor", "stream_quantized"]

_BLOCK_ELEMENTS = 2**20  # Rounded at once: 4 MiB in FP32, next to nothing beside a large tensor.
_SHOWN = 5  # Names in a message.


class Stored(Protocol):
    """A tensor in a file."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""

    @property
    def shape(self) -> torch.Size:
        """Shape."""

    @property
    def read(self) -> Callable[[], Tensor]:
        """Reads the values."""


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor of the quantized model, not yet computed.

    Args:
        dtype: Element type.
        shape: Shape.
        read: Reads the float weight and computes the values.
    """

    dtype: torch.dtype
    shape: torch.Size
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Streamed:
    """A quantized model, not yet computed.

    Args:
        tensors: Its state by name, tied tensors once.
        tied: Further names, and the name under which each tensor is in ``tensors``.
        layers: Its int8 layers.
        left: Layers that stay in floating point, and why.
    """

    tensors: dict[str, StreamedTensor]
    tied: dict[str, str]
    layers: dict[str, LayerLayout]
    left: dict[str, str]


def stream_quantized(
    module: nn.Module,
    weights: Mapping[str, Stored],
    method: str = "weight_only",
    *,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    **overrides: Any,
) -> Streamed:
    """Plan the quantization of weights that are read when they are needed.

    The tensors are those that ``quantize_`` gives for the model with these weights.

    Args:
        module: The float model, best on the meta device, where it takes no memory. Its layers are replaced in place.
        weights: Its parameters and persistent buffers.
        method: A method that rounds to nearest, such as ``"weight_only"``.
        include: Names, patterns or classes of layers to quantize.
        exclude: The same, to leave.
        **overrides: Parts of the method's scheme, as for ``quantize_``.

    Raises:
        ValueError: If the method learns from data, or an argument is wrong.
        QuantizedFileError: If the weights are not those of the model.
    """
    chosen = resolve(method, overrides)
    if chosen.solver is not None or chosen.needs_calibration:
        static = chosen.scheme.activations == "static"
        what = "Static activations need" if static else f"The method {method!r} learns from"
        raise ValueError(
            f"{what} data, which a checkpoint does not hold. Use 'weight_only',"
            " 'vectorwise' or 'llm_int8', or the callback `PostTrainingQuantization`."
        )
    variables = module.state_dict(keep_vars=True)
    available = _complete(variables, weights, type(module).__name__)
    targets, skipped = find_targets(module, chosen.scheme, include, exclude)
    built = build_layers(targets, blank_weights(targets))
    readers: dict[int, Callable[[], Tensor]] = {}
    for target in targets:
        readers |= _readers(target, built[target.name], available)
    with torch.no_grad():
        swap(module, {id(target.module): built[target.name] for target in targets})
    layers = layout_of(module)
    tensors, tied = _plan(module, available, readers)
    return Streamed(tensors, tied, layers, {left.name: left.reason for left in skipped})


def _complete(own: Mapping[str, Any], weights: Mapping[str, Stored], model: str) -> dict[str, Stored]:
    """Return a stored tensor for each name of the model; of tied names, one in the file is enough."""
    own = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    by_identity = {id(own[name]): stored for name, stored in weights.items() if name in own}
    found = {name: weights.get(name) or by_identity.get(id(value)) for name, value in own.items()}
    missing = [name for name, stored in found.items() if stored is None]
    unexpected = [name for name in weights if name not in own]
    if missing or unexpected:
        raise QuantizedFileError(
            f"The checkpoint is not of a `{model}`: {len(missing)} tensors are missing {missing[:_SHOWN]},"
            f" {len(unexpected)} are not of this model {unexpected[:_SHOWN]}. Give the class that was trained."
        )
    complete = {name: stored for name, stored in found.items() if stored is not None}
    for name, stored in complete.items():
        if stored.shape != own[name].shape:
            raise QuantizedFileError(
                f"The checkpoint holds {name!r} in the shape {list(stored.shape)}, but a `{model}` has"
                f" {list(own[name].shape)}. Build the model as it was trained."
            )
    return complete


def _readers(target: Target, built: Any, available: Mapping[str, Stored]) -> dict[int, Callable[[], Tensor]]:
    """Return a reader for each int8 buffer of a layer, and its scales, by the buffer's identity."""
    readers: dict[int, Callable[[], Tensor]] = {}
    for key, read in target.weights.items():
        owner, _, leaf = key.rpartition(".")
        layer = built.get_submodule(owner)
        if isinstance(built, DequantizingModule):
            stored = available[f"{target.name}.{key}"]
            matrix, shaped, dtype = stored.read, _same, stored.dtype
        else:
            dtype = _dtype_of(target, available)
            matrix, shaped = _filled(target, available, read), layer.from_matrix
        if is_packed(target.scheme.bits):
            shaped = partial(pack, bits=target.scheme.bits)
        layer.float_dtype = built.float_dtype = dtype
        weight = _Weight(f"{target.name}.{key}", target.scheme, matrix, shaped)
        readers[id(layer.stored(leaf))] = weight.values
        readers[id(layer.get_buffer(f"{leaf}_scale"))] = weight.scale
        if target.scheme.mapping != "symmetric":
            readers[id(layer.get_buffer(f"{leaf}_zero_point"))] = weight.zero_point
    return readers


def _same(values: Tensor) -> Tensor:
    return values


def _dtype_of(target: Target, available: Mapping[str, Stored]) -> torch.dtype:
    dtypes = [available[f"{target.name}.{name}"].dtype for name, _ in target.module.named_parameters()]
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def _filled(
    target: Target, available: Mapping[str, Stored], read: Callable[[], Tensor]
) -> Callable[[], Tensor]:
    """Return what reads a weight out of the float layer, filled for the moment (weight norm has two parts)."""

    def matrix() -> Tensor:
        own = {name: parameter for name, parameter in target.module.named_parameters() if name != "bias"}
        try:
            for name, parameter in own.items():
                value = available[f"{target.name}.{name}"].read()
                _set(target.module, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
            return read()
        finally:
            for name, parameter in own.items():
                _set(target.module, name, parameter)

    return matrix


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    module.get_submodule(owner)._parameters[leaf] = parameter


class _Weight:
    """One weight; its scales are kept once they are known, its integers are not."""

    def __init__(
        self,
        name: str,
        scheme: Scheme,
        matrix: Callable[[], Tensor],
        shaped: Callable[[Tensor], Tensor],
    ) -> None:
        self.name, self.scheme, self.matrix, self.shaped = name, scheme, matrix, shaped
        self._parameters: tuple[Tensor, Tensor | None] | None = None

    def values(self) -> Tensor:
        return self.shaped(self._quantize().values).contiguous()

    def scale(self) -> Tensor:
        return self._known()[0]

    def zero_point(self) -> Tensor:
        zero_point = self._known()[1]
        assert zero_point is not None
        return zero_point

    def _known(self) -> tuple[Tensor, Tensor | None]:
        if self._parameters is None:
            quantized = self._quantize()
            self._parameters = quantized.scale, quantized.zero_point
        return self._parameters

    def _quantize(self) -> Quantized:
        try:
            with torch.no_grad():
                return _in_blocks(self.matrix(), self.scheme)
        except ValueError as error:
            raise ValueError(f"`{self.name}` cannot be quantized: {error}") from None


def _in_blocks(matrix: Tensor, scheme: Scheme) -> Quantized:
    """Do as ``Scheme.quantize``, with temporaries for some rows at a time."""
    blocks = torch.split(matrix, max(1, _BLOCK_ELEMENTS // max(1, matrix.shape[1])))
    if len(blocks) < 2:
        return scheme.quantize(matrix)
    if scheme.weight_granularity == "tensor":
        # The extremes alone decide the scale.
        _, scale, zero_point = scheme.quantize(torch.stack(torch.aminmax(matrix))[None])
        parts = [
            quantize(block.float(), scale, zero_point, bits=scheme.bits, mapping=scheme.mapping)
            for block in blocks
        ]
        return Quantized(torch.cat(parts), scale, zero_point)
    values = torch.empty(matrix.shape, dtype=torch.int8)
    scales, zero_points = [], []
    start = 0
    for block in blocks:
        part = scheme.quantize(block)
        values[start : start + len(block)] = part.values
        start += len(block)
        scales.append(part.scale)
        zero_points += [] if part.zero_point is None else [part.zero_point]
    return Quantized(values, torch.cat(scales), torch.cat(zero_points) if zero_points else None)


def _plan(
    module: nn.Module, available: Mapping[str, Stored], readers: Mapping[int, Callable[[], Tensor]]
) -> tuple[dict[str, StreamedTensor], dict[str, str]]:
    tensors: dict[str, StreamedTensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        owner = first.setdefault(id(value), name)
        if owner != name and not written_for_each(name):
            tied[name] = owner
        elif id(value) in readers:
            tensors[name] = StreamedTensor(value.dtype, value.shape, readers[id(value)])
        else:
            stored = available[name]
            tensors[name] = StreamedTensor(stored.dtype, stored.shape, stored.read)
    return tensors, tied
