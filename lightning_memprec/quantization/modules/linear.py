"""The int8 linear layer."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memprec.quantization.activations import fake_quantize, outlier_columns
from lightning_memprec.quantization.affine import Quantized
from lightning_memprec.quantization.kernels import select
from lightning_memprec.quantization.kernels_base import Kernel
from lightning_memprec.quantization.kernels_portable import blocks, portable
from lightning_memprec.quantization.modules.base import Int8Module, Scheme, float_input

__all__ = ["Int8Linear"]


class Int8Linear(Int8Module):
    """``nn.Linear`` with an int8 weight.

    State, besides that of :class:`Int8Module`: ``outlier_indices`` (int64) and ``outlier_weight`` (floating point), if
    :meth:`keep_columns` was called.

    Gradients reach the input: rounding of activations is passed straight through, and the weight is dequantized again
    in the backward pass instead of being kept. ``torch.compile`` sees one graph: ``torch._int_mm`` where that is
    right and fast, so that the rounding before it and the scales behind it are fused with their neighbors, else float.

    Args:
        weight: Quantized weight ``[out_features, in_features]``.
        bias: The float layer's bias ``[out_features]``.
        scheme: How the weight was quantized, and what happens to activations.
        float_dtype: Dtype of the float layer.

    Example:
        >>> scheme = Scheme()
        >>> layer = Int8Linear(scheme.quantize(torch.eye(3)), None, scheme, torch.float32)
        >>> layer(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 2., 3.])
    """

    outlier_indices: Tensor | None
    outlier_weight: Tensor | None

    def __init__(
        self, weight: Quantized, bias: nn.Parameter | None, scheme: Scheme, float_dtype: torch.dtype
    ) -> None:
        super().__init__(weight, bias, scheme, float_dtype)
        self.out_features, self.in_features = weight.values.shape
        self.register_buffer("outlier_indices", None)
        self.register_buffer("outlier_weight", None)
        self._choose()

    def _choose(self) -> None:
        """Choose the kernel; here, because a compiler cannot run a probe in the middle of a graph."""
        self._kernel: Kernel | None = select(self)
        self._traceable: Kernel | None = select(self, traceable=True)
        self._packed: Any = None

    def keep_columns(self, columns: Tensor, matrix: Tensor) -> None:
        """Keep columns of the float weight, which then always multiply in floating point.

        The int8 weight stays complete, for readers that do not know of them.

        Args:
            columns: Input features, int64 ``[C]``.
            matrix: The float weight ``[out_features, in_features]``.
        """
        self.outlier_indices = columns.to(self.weight_scale.device)
        self.outlier_weight = matrix[:, columns].detach().clone()
        self._packed = None

    def dequantize_rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """See the base class; columns that were kept are exact."""
        rows = super().dequantize_rows(start, stop)
        if self.outlier_indices is None or self.outlier_weight is None:
            return rows
        return rows.index_copy(1, self.outlier_indices, self.outlier_weight[start:stop].float())

    def channel_scale(self) -> Tensor | None:
        """See the base class; columns that were kept have no part in the scales."""
        return None if self.outlier_indices is not None else super().channel_scale()

    def forward(self, values: Tensor) -> Tensor:
        """Multiply with the weight and add the bias.

        Args:
            values: Floating point ``[*, in_features]``.

        Returns:
            ``[*, out_features]`` in the dtype of ``values``.
        """
        values = float_input(values)
        if values.shape[-1] != self.in_features:
            raise ValueError(
                f"This layer takes {self.in_features} features, got an input of shape {list(values.shape)}."
                " Its last dimension holds the features."
            )
        rows = values.flatten(0, -2) if values.dim() > 1 else values[None]
        if torch.compiler.is_compiling():
            product = self._traced(rows)
        elif torch.is_grad_enabled() and rows.requires_grad:
            product = cast("Tensor", _Product.apply(rows, self))
        else:
            product = self.product(rows)
        if self.bias is not None:
            product = product.add_(self.bias.to(product.dtype))
        return product.reshape(*values.shape[:-1], self.out_features)

    def _traced(self, rows: Tensor) -> Tensor:
        """Multiply in operators that a compiler can see into and fuse with their neighbors."""
        kernel = self._traceable
        plain = self.scheme.outlier_threshold is None and not (torch.is_grad_enabled() and rows.requires_grad)
        if plain and kernel is not None and rows.shape[0] > 0:
            # Inductor would hand a single token over with a stride of 0, for which `_int_mm` computes nothing:
            # https://github.com/pytorch/pytorch/issues/195066
            tokens = rows.float().expand(2, -1) if rows.shape[0] == 1 else rows.float()
            return kernel.run(tokens, self, None)[: rows.shape[0]].to(rows.dtype)
        rounded = self._rounded(rows)
        return F.linear(rounded, self.dequantize().to(rounded.dtype)).to(rows.dtype)

    def product(self, rows: Tensor) -> Tensor:
        """Multiply ``[tokens, in_features]`` with the weight, without gradients."""
        kernel = self._kernel
        if kernel is None or not rows.numel():
            return portable(self._rounded(rows), self).to(rows.dtype)
        if self._packed is None:
            self._packed = kernel.pack(self)
        packed = self._packed
        values = rows.float()
        if self.scheme.outlier_threshold is None:
            return kernel.run(values, self, packed).to(rows.dtype)
        outliers = self._outliers(values, self.scheme.outlier_threshold)
        columns = outliers.nonzero().flatten()
        if not columns.numel():
            return kernel.run(values, self, packed).to(rows.dtype)
        product = kernel.run(values.index_fill(1, columns, 0.0), self, packed)
        return product.addmm_(values[:, columns], self._columns(columns).t()).to(rows.dtype)

    def _outliers(self, values: Tensor, threshold: float) -> Tensor:
        outliers = outlier_columns(values, threshold)
        return (
            outliers if self.outlier_indices is None else outliers.index_fill(0, self.outlier_indices, True)
        )

    def _columns(self, columns: Tensor) -> Tensor:
        weight = self.weight[:, columns].float() * self.weight_scale
        if self.outlier_indices is not None and self.outlier_weight is not None:
            # `columns` is sorted and holds every column that was kept.
            places = torch.searchsorted(columns, self.outlier_indices)
            weight.index_copy_(1, places, self.outlier_weight.float())
        return weight

    def _rounded(self, rows: Tensor) -> Tensor:
        scheme = self.scheme
        if scheme.activations == "float":
            return rows
        # Left in FP32: bfloat16 has too few digits for integers times a scale.
        values = rows.float()
        outliers = None
        if scheme.outlier_threshold is not None:
            outliers = self._outliers(values.detach(), scheme.outlier_threshold)
        per_token = scheme.activations == "token"
        return fake_quantize(
            values,
            per_token=per_token,
            mapping=scheme.mapping,
            outliers=outliers,
            parameters=self.static_inputs(),
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Int8Linear:
        super()._apply(fn, recurse)
        self._choose()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._packed = None
        # How many columns were kept only the state tells.
        for name in ("outlier_indices", "outlier_weight"):
            stored = state_dict.get(f"{prefix}{name}")
            setattr(
                self,
                name,
                None if stored is None else torch.empty_like(stored, device=self.weight_scale.device),
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        # These are bound to this machine.
        return {**self.__dict__, "_kernel": None, "_traceable": None, "_packed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._choose()


class _Product(torch.autograd.Function):
    """The product, with a backward pass that dequantizes the weight again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: Int8Linear) -> Tensor:
        ctx.layer = layer
        return layer.product(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        result = gradient.new_zeros(gradient.shape[0], layer.in_features)
        for start, stop in blocks(layer):
            result = result + gradient[:, start:stop] @ layer.dequantize_rows(start, stop).to(gradient.dtype)
        return result, None
