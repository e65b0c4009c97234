"""What every int8 layer has: an int8 weight with FP32 scales, as plain buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_memprec.quantization.affine import (
    Granularity,
    Mapping,
    Quantized,
    check_group_size,
    choose_parameters,
    dequantize_matrix,
    integer_range,
    quantize_matrix,
)
from lightning_memprec.quantization.packing import is_packed, pack, unpack

__all__ = ["Activations", "Int8Module", "Scheme", "SharedBuffers", "float_input"]

Activations = Literal["float", "tensor", "token", "static"]


@dataclass(frozen=True)
class Scheme:
    """How a layer is quantized.

    Args:
        bits: Width of weights, 2 to 8; activations have 8. Up to 4 bits are packed, 5 to 7 are stored in int8.
        mapping: ``"symmetric"`` (absmax), ``"affine"`` (zero-point) or ``"affine_textbook"``, for weights and
            activations.
        weight_granularity: One scale for each ``"tensor"``, output ``"channel"`` or ``"group"`` of a channel.
        group_size: Neighbouring weights of a channel that share a scale, with ``"group"``.
        activations: ``"float"``; or int8, with one scale for each ``"tensor"`` or ``"token"`` measured at run time, or
            with a ``"static"`` one for all tensors, found in calibration data.
        outlier_threshold: Input features that reach this magnitude anywhere in the batch stay in floating point.

    Raises:
        ValueError: If a value is out of range, or two of them exclude each other.
    """

    bits: int = 8
    mapping: Mapping = "symmetric"
    weight_granularity: Granularity = "channel"
    group_size: int | None = None
    activations: Activations = "float"
    outlier_threshold: float | None = None

    def __post_init__(self) -> None:
        integer_range(self.bits, self.mapping)
        check_group_size(self.weight_granularity, self.group_size)
        if self.activations not in get_args(Activations):
            raise ValueError(
                f"`activations` must be 'float', 'tensor', 'token' or 'static', got {self.activations!r}."
                " 'token' needs no calibration data."
            )
        if self.outlier_threshold is None:
            return
        if not self.outlier_threshold > 0:
            raise ValueError(
                f"`outlier_threshold` must be larger than 0, got {self.outlier_threshold!r}. The paper's is 6.0."
            )
        if self.activations == "float":
            raise ValueError(
                "`outlier_threshold` splits quantized activations, but `activations` is 'float'. Use 'token'."
            )

    def __str__(self) -> str:
        grain = self.weight_granularity if self.group_size is None else f"group {self.group_size}"
        text = f"W{self.bits} {grain} {self.mapping}"
        if self.activations != "float":
            text += f", A8 {self.activations}"
        if self.outlier_threshold is not None:
            text += f", outliers ≥ {self.outlier_threshold:g} in floating point"
        return text

    def quantize(self, matrix: Tensor) -> Quantized:
        """Quantize a weight matrix ``[channels, features]`` by rounding to nearest."""
        return quantize_matrix(
            matrix,
            bits=self.bits,
            mapping=self.mapping,
            granularity=self.weight_granularity,
            group_size=self.group_size,
        )


class SharedBuffers(nn.Module):
    """Holds integers; keeps tied buffers tied and scales in FP32 through ``.to()``, ``.half()``, ``.cuda()``.

    ``nn.Module`` gives a parameter new data but replaces a buffer, which would untie an embedding from its head.
    Integers of up to 4 bits are packed, in a buffer whose name ends in ``_packed``.
    """

    scheme: Scheme
    float_dtype: torch.dtype

    def _hold(self, name: str, matrix: Tensor, stored: Tensor) -> None:
        """Register the integers of a weight.

        Args:
            name: Name of the weight.
            matrix: int8 ``[channels, features]``, to pack.
            stored: The same in the shape of the float weight, to keep as it is if the scheme does not pack.
        """
        if is_packed(self.scheme.bits):
            self.register_buffer(f"{name}_packed", pack(matrix, self.scheme.bits))
        else:
            # `weight` is a property as well, which `register_buffer` would refuse.
            self._buffers[name] = stored

    def stored(self, name: str = "weight") -> Tensor:
        """Return the buffer that holds the integers of a weight: int8, or packed int32."""
        buffer = self._buffers.get(f"{name}_packed")
        return self._buffers[name] if buffer is None else buffer  # type: ignore[return-value]

    def pack_state(self, state: dict[str, Any], prefix: str) -> None:
        """Pack integers of a state in which they are int8, as those of up to 4 bits once were.

        What does not fit the layer is left in the state, to be refused.

        Args:
            state: Changed in place.
            prefix: What its names of this layer's tensors begin with.
        """
        low, high = integer_range(self.scheme.bits, self.scheme.mapping)
        for buffer in self._buffers:
            name = buffer.removesuffix("_packed")
            value = state.get(f"{prefix}{name}")
            if name == buffer or not isinstance(value, Tensor) or value.dtype != torch.int8:
                continue
            if value.shape == self.weight_shape(name) and bool(((value >= low) & (value <= high)).all()):
                state[f"{prefix}{buffer}"] = pack(self.to_matrix(value), self.scheme.bits)
                del state[f"{prefix}{name}"]

    def weight_shape(self, name: str = "weight") -> torch.Size:
        """Return the shape of a float weight."""
        raise NotImplementedError

    def to_matrix(self, weight: Tensor) -> Tensor:
        """View a weight in the float layer's shape as ``[channels, features]``."""
        return weight.flatten(1)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> SharedBuffers:
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        for name in kept:
            self._buffers[name] = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            self._buffers[name] = _moved(buffer, fn)
        # What a cast asks for is seen on a tensor that has the dtype in which this layer gives its results.
        probe = (
            torch.empty(0, dtype=self.float_dtype, device=next(iter(kept.values())).device) if kept else None
        )
        if probe is not None:
            self.float_dtype = fn(probe).dtype
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        self.pack_state(state_dict, prefix)
        for name, buffer in self._buffers.items():
            key = f"{prefix}{name.removesuffix('_packed')}"
            integers = name.endswith("_packed") or (buffer is not None and buffer.dtype == torch.int8)
            if integers and _is_float(state_dict.get(key)):
                # Copied, it would be cut to integers, without an error if `strict` is off.
                errors.append(
                    f"`{key}` is in floating point in the state, but int8 in this model. Load the state into"
                    " the float model and quantize that."
                )
                return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _moved(buffer: Tensor, fn: Callable[..., Tensor]) -> Tensor:
    moved = fn(buffer)
    if moved.dtype != buffer.dtype:
        moved = buffer.to(moved.device)
    if moved is buffer:
        return buffer
    if torch._has_compatible_shallow_copy_type(buffer, moved):
        buffer.data = moved
        return buffer
    return moved


class Int8Module(SharedBuffers):
    """A layer with an int8 weight.

    State: ``weight`` (int8) or, for up to 4 bits, ``weight_packed`` (int32, see
    :mod:`lightning_memprec.quantization.packing`), ``weight_scale`` (FP32: ``[1]`` for the tensor, ``[N, 1]`` for each
    output channel, ``[N, G]`` for each group), ``weight_zero_point`` (int8 or int32, affine only), ``bias`` (as it
    was); with static activations ``input_scale`` (FP32 ``[1]``) and, affine, ``input_zero_point`` (``[1]``). The names
    are those of the ``compressed-tensors`` format.

    Args:
        weight: Integers, scales and zero points of the weight as a matrix ``[channels, features]``.
        bias: The float layer's bias, which stays as it is.
        scheme: How it was quantized.
        float_dtype: Dtype of the float layer.
    """

    weight_scale: Tensor
    weight_zero_point: Tensor | None
    input_scale: Tensor | None
    input_zero_point: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self, weight: Quantized, bias: nn.Parameter | None, scheme: Scheme, float_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.scheme = scheme
        self.float_dtype = float_dtype
        self.matrix_shape: tuple[int, int] = (weight.values.shape[0], weight.values.shape[1])
        self._hold("weight", weight.values, self.from_matrix(weight.values))
        self.register_buffer("weight_scale", weight.scale)
        self.register_buffer("weight_zero_point", weight.zero_point)
        self.register_parameter("bias", bias)
        self.register_buffer("input_scale", None)
        self.register_buffer("input_zero_point", None)
        if scheme.activations == "static":
            one = torch.ones(1, device=weight.scale.device)
            self.set_inputs(*choose_parameters(-one, one, mapping=scheme.mapping))

    def set_inputs(self, scale: Tensor, zero_point: Tensor | None) -> None:
        """Say how static activations are rounded; until then they are taken to lie between -1 and 1.

        Args:
            scale: FP32 ``[1]``.
            zero_point: int8 or int32 ``[1]``, affine only.
        """
        device = self.weight_scale.device
        self.input_scale = scale.detach().to(device, torch.float32)
        self.input_zero_point = None if zero_point is None else zero_point.detach().to(device)

    def static_inputs(self) -> tuple[Tensor, Tensor | None] | None:
        """Return scale and zero point of static activations, or ``None`` if they are not static."""
        return None if self.input_scale is None else (self.input_scale, self.input_zero_point)

    @property
    def weight(self) -> Tensor:
        """The integers, int8 in the float layer's shape; packed ones are unpacked at each call."""
        packed = is_packed(self.scheme.bits)
        return self.from_matrix(self.integers()) if packed else self.stored()

    def integers(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return output channels ``start`` to ``stop`` of the weight matrix, int8 ``[rows, features]``."""
        if is_packed(self.scheme.bits):
            return unpack(self.stored()[start:stop], self.scheme.bits, self.matrix_shape[1])
        return self.to_matrix(self.stored())[start:stop]

    def weight_shape(self, name: str = "weight") -> torch.Size:
        """Return the shape of the float weight."""
        return self.from_matrix(torch.empty(self.matrix_shape, device="meta")).shape

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """Undo :meth:`to_matrix`."""
        return matrix

    def dequantize_rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return output channels ``start`` to ``stop`` of the weight matrix, FP32 ``[rows, features]``."""
        integers = self.integers(start, stop)
        scale, zero_point = self.weight_scale, self.weight_zero_point
        if self.scheme.weight_granularity != "tensor":
            scale = scale[start:stop]
            zero_point = None if zero_point is None else zero_point[start:stop]
        return dequantize_matrix(integers, scale, zero_point, self.scheme.group_size)

    def channel_scale(self) -> Tensor | None:
        """Return the FP32 scales of the channels, ``[N]`` or ``[1]``, if the weight is just integers times those."""
        if self.weight_zero_point is not None or self.scheme.group_size is not None:
            return None
        return self.weight_scale.flatten()

    def dequantize(self) -> Tensor:
        """Return the weight in FP32, in the float layer's shape."""
        return self.from_matrix(self.dequantize_rows())

    def extra_repr(self) -> str:
        """Describe shape and scheme."""
        return f"{tuple(self.weight_shape())}, {self.scheme}"


def float_input(values: Tensor) -> Tensor:
    """Cast an input as autocast would for a matrix product.

    Args:
        values: What the layer was called with.

    Raises:
        TypeError: If it holds integers, as when a model casts its input to ``weight.dtype``.
    """
    if not values.is_floating_point():
        raise TypeError(
            f"An int8 layer needs a floating-point input, got {values.dtype}. A model that casts its input to"
            " `layer.weight.dtype` does this: leave that layer in floating point with `exclude`."
        )
    if torch.is_autocast_enabled(values.device.type):
        return values.to(torch.get_autocast_dtype(values.device.type))
    return values
