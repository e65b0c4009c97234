"""Int8 convolutions of one to three dimensions, transposed ones included."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lightning_memprec.quantization.activations import fake_quantize
from lightning_memprec.quantization.affine import Quantized
from lightning_memprec.quantization.modules.base import Int8Module, Scheme, float_input

__all__ = ["Int8Conv", "Int8ConvTranspose", "conv_matrix"]

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def conv_matrix(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """Lay a convolution's weight out as ``[output channels, features]``.

    Args:
        weight: ``[out, in / groups, *kernel]``, or ``[in, out / groups, *kernel]`` if transposed.
        groups: Groups of the convolution.
        transposed: Whether it is a transposed convolution.
    """
    if not transposed:
        return weight.flatten(1)
    inputs, outputs, *kernel = weight.shape
    grouped = weight.reshape(groups, inputs // groups, outputs, *kernel)
    return grouped.transpose(1, 2).flatten(0, 1).flatten(1)


class Int8Conv(Int8Module):
    """``nn.Conv1d``, ``2d`` or ``3d`` with an int8 weight, dequantized for each call.

    Quantized activations have one scale for the tensor, for ``"token"`` one for each sample, or a static one.

    Args:
        weight: Quantized weight ``[output channels, features]``.
        bias: The float layer's bias.
        conv: The float layer.
        scheme: How the weight was quantized, and what happens to activations.
    """

    def __init__(self, weight: Quantized, bias: nn.Parameter | None, conv: _ConvNd, scheme: Scheme) -> None:
        self._shape = conv.weight.shape
        self.groups = conv.groups
        super().__init__(weight, bias, scheme, conv.weight.dtype)
        self.stride, self.padding, self.dilation = conv.stride, conv.padding, conv.dilation
        self.output_padding = conv.output_padding
        self.padding_mode = conv.padding_mode
        self.kernel_size, self.in_channels, self.out_channels = (
            conv.kernel_size,
            conv.in_channels,
            conv.out_channels,
        )
        self._border = conv._reversed_padding_repeated_twice

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """Undo :meth:`to_matrix`."""
        return matrix.reshape(self._shape)

    def forward(self, values: Tensor) -> Tensor:
        """Convolve.

        Args:
            values: ``[batch, in_channels, *size]``, or without the batch.

        Returns:
            What the float layer would, in the dtype of ``values``.
        """
        values = self._quantized(float_input(values))
        weight, bias = self.dequantize().to(values.dtype), _cast(self.bias, values)
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            values, padding = F.pad(values, self._border, mode=self.padding_mode), 0
        convolve = cast("Any", _CONV[len(self.kernel_size)])
        return cast(
            "Tensor", convolve(values, weight, bias, self.stride, padding, self.dilation, self.groups)
        )

    def _quantized(self, values: Tensor) -> Tensor:
        if self.scheme.activations == "float":
            return values
        batched = values.dim() == len(self.kernel_size) + 2
        samples = values.flatten(1) if batched else values.reshape(1, -1)
        rounded = fake_quantize(
            samples.float(),
            per_token=self.scheme.activations == "token",
            mapping=self.scheme.mapping,
            parameters=self.static_inputs(),
        )
        return rounded.reshape(values.shape).to(values.dtype)


class Int8ConvTranspose(Int8Conv):
    """``nn.ConvTranspose1d``, ``2d`` or ``3d`` with an int8 weight; channels are the output's."""

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Lay the weight out as ``[output channels, features]``."""
        return conv_matrix(weight, self.groups, transposed=True)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """Undo :meth:`to_matrix`."""
        inputs, outputs, *kernel = self._shape
        grouped = matrix.reshape(self.groups, outputs, inputs // self.groups, *kernel)
        return grouped.transpose(1, 2).flatten(0, 1).contiguous()

    def forward(self, values: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Convolve, transposed.

        Args:
            values: ``[batch, in_channels, *size]``, or without the batch.
            output_size: Size that resolves the ambiguity of strides larger than 1.

        Returns:
            What the float layer would, in the dtype of ``values``.
        """
        values = self._quantized(float_input(values))
        dimensions = len(self.kernel_size)
        output_padding = _ConvTransposeNd._output_padding(
            cast("Any", self), values, output_size, list(self.stride), list(cast("tuple[int, ...]", self.padding)),
            list(self.kernel_size), dimensions, list(self.dilation),
        )  # fmt: skip
        weight, bias = self.dequantize().to(values.dtype), _cast(self.bias, values)
        convolve = cast("Any", _CONV_TRANSPOSE[dimensions])
        settings = (self.stride, self.padding, output_padding, self.groups, self.dilation)
        return cast("Tensor", convolve(values, weight, bias, *settings))


def _cast(bias: nn.Parameter | None, values: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(values.dtype)
