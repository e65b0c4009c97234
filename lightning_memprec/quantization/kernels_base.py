"""What a kernel is: it multiplies activations with an int8 weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Kernel", "Operand"]


class Operand(Protocol):
    """What a kernel needs to know of an int8 weight."""

    matrix_shape: tuple[int, int]
    weight_scale: Tensor
    weight_zero_point: Tensor | None
    input_scale: Tensor | None

    @property
    def weight(self) -> Tensor:
        """int8 ``[channels, features]``; packed ones are unpacked."""

    def stored(self) -> Tensor:
        """The buffer behind it, int8 or packed."""

    def integers(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows ``start`` to ``stop`` of the weight."""

    @property
    def scheme(self) -> Any:
        """The :class:`~lightning_memprec.quantization.modules.base.Scheme`."""

    def dequantize_rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """FP32 rows ``start`` to ``stop`` of the weight matrix."""

    def channel_scale(self) -> Tensor | None:
        """FP32 ``[channels]`` or ``[1]``, if the weight is just its integers times that, else ``None``."""


class Kernel(ABC):
    """Multiplies symmetric int8 activations with a symmetric int8 weight. Equal kernels are hashed alike."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for people."""

    @property
    @abstractmethod
    def device_type(self) -> str:
        """Where it runs."""

    @property
    def traceable(self) -> bool:
        """Whether a compiler sees into it; then it needs no packed weight either."""
        return False

    @abstractmethod
    def fits(self, layer: Operand) -> str | None:
        """Say why the kernel cannot take a layer of this shape, or ``None`` if it can."""

    def pack(self, layer: Operand) -> Any:
        """Prepare the weight; called once."""
        return None

    @abstractmethod
    def run(self, values: Tensor, layer: Operand, packed: Any) -> Tensor:
        """Return FP32 ``[tokens, channels]`` for FP32 ``[tokens, features]``, without bias."""
