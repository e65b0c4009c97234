"""Activations as int8: one scale for the tensor or for each token, measured or known; outliers left alone."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memprec.quantization.affine import Mapping, choose_parameters, dequantize, integer_range

__all__ = ["activation_parameters", "fake_quantize", "outlier_columns"]


def outlier_columns(values: Tensor, threshold: float) -> Tensor:
    """Tell which features reach a magnitude somewhere in the batch.

    Args:
        values: Activations ``[tokens, features]``.
        threshold: Magnitude from which on a value is an outlier; 6.0 in LLM.int8() (arXiv 2208.07339, section 3.2).

    Returns:
        bool ``[features]``.
    """
    if not values.shape[0]:
        return torch.zeros(values.shape[1], dtype=torch.bool, device=values.device)
    # Two reductions instead of a tensor of magnitudes and one of comparisons; a NaN counts as an outlier.
    return ~((values.amax(dim=0) < threshold) & (values.amin(dim=0) > -threshold))


def activation_parameters(
    values: Tensor, *, per_token: bool, mapping: Mapping
) -> tuple[Tensor, Tensor | None]:
    """Return FP32 scale and zero point of activations, ``[tokens, 1]`` or ``[1, 1]``.

    Args:
        values: FP32 activations ``[tokens, features]``.
        per_token: One scale for each row instead of one for all.
        mapping: See :mod:`lightning_memprec.quantization.affine`.
    """
    if values.numel() == 0:
        edges = values.new_zeros(values.shape[0] if per_token else 1, 1)
        return choose_parameters(edges, edges, mapping=mapping)
    if per_token:
        smallest, largest = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
    else:
        smallest, largest = values.amin().reshape(1, 1), values.amax().reshape(1, 1)
    return choose_parameters(smallest, largest, mapping=mapping)


def fake_quantize(
    values: Tensor,
    *,
    per_token: bool,
    mapping: Mapping = "symmetric",
    outliers: Tensor | None = None,
    parameters: tuple[Tensor, Tensor | None] | None = None,
) -> Tensor:
    """Round activations to what int8 can hold, outlier features excepted; gradients pass straight through.

    Args:
        values: FP32 activations ``[tokens, features]``.
        per_token: One scale for each row instead of one for all.
        mapping: See :mod:`lightning_memprec.quantization.affine`.
        outliers: bool ``[features]``: features that are left as they are and do not count for the scales.
        parameters: Scale and zero point of static activations; what lies outside of their range is clipped.

    Returns:
        FP32 ``[tokens, features]``.
    """
    regular = values.detach()
    if outliers is not None:
        regular = regular.masked_fill(outliers, 0.0)
    if parameters is None:
        parameters = activation_parameters(regular, per_token=per_token, mapping=mapping)
    scale, zero_point = parameters
    low, high = integer_range(8, mapping)
    integers = torch.round(regular / scale)
    if zero_point is not None:
        integers = integers + zero_point
    # The integers stay in FP32, so that a NaN stays a NaN.
    rounded = dequantize(integers.clamp(low, high), scale, zero_point)
    if outliers is not None:
        rounded = torch.where(outliers, values.detach(), rounded)
    return values + (rounded - values.detach()) if values.requires_grad else rounded
