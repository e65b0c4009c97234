"""An int8 lookup table."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memprec.quantization.affine import Quantized, dequantize, spread
from lightning_memprec.quantization.modules.base import Int8Module, Scheme
from lightning_memprec.quantization.packing import is_packed, unpack

__all__ = ["Int8Embedding"]


class Int8Embedding(Int8Module):
    """``nn.Embedding`` with int8 rows; only the rows that are looked up are dequantized.

    Args:
        weight: Quantized table ``[num_embeddings, embedding_dim]``.
        embedding: The float layer.
        scheme: How the table was quantized.
    """

    def __init__(self, weight: Quantized, embedding: nn.Embedding, scheme: Scheme) -> None:
        super().__init__(weight, None, scheme, embedding.weight.dtype)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx

    def forward(self, indices: Tensor) -> Tensor:
        """Look up rows.

        Args:
            indices: Integers of any shape.

        Returns:
            ``[*indices.shape, embedding_dim]`` in the float layer's dtype.
        """
        rows = F.embedding(indices, self.stored())
        if is_packed(self.scheme.bits):
            rows = unpack(rows, self.scheme.bits, self.embedding_dim)
        scale, zero_point = self._of_rows(indices, self.weight_scale), self.weight_zero_point
        return dequantize(rows, scale, None if zero_point is None else self._of_rows(indices, zero_point)).to(
            self.float_dtype
        )

    def _of_rows(self, indices: Tensor, parameter: Tensor) -> Tensor:
        if self.scheme.weight_granularity == "tensor":
            return parameter
        chosen = F.embedding(indices, parameter)
        if self.scheme.group_size is None:
            return chosen
        flat = spread(chosen.reshape(-1, chosen.shape[-1]), self.embedding_dim, self.scheme.group_size)
        return flat.reshape(*indices.shape, self.embedding_dim)
