"""What Lightning's precision names mean for memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["PRECISIONS", "PrecisionPolicy", "resolve_precision"]


@dataclass(frozen=True)
class PrecisionPolicy:
    """How one precision stores and computes.

    Attributes:
        name: Lightning's canonical name.
        parameter_dtype: Floating parameters and buffers are converted to it; ``None`` leaves them.
        autocast_dtype: Dtype of autocast around the forward pass; ``None`` uses none.
        master_weights: Whether the optimizer works on FP32 copies of half-precision parameters.
        loss_scaling: Whether a gradient scaler multiplies the loss and unscales the gradients.
    """

    name: str
    parameter_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    master_weights: bool = False
    loss_scaling: bool = False


PRECISIONS = {
    policy.name: policy
    for policy in (
        PrecisionPolicy("32-true"),
        # Lightning's DoublePrecision and HalfPrecision convert parameters, inputs and the default dtype.
        PrecisionPolicy("64-true", parameter_dtype=torch.float64),
        PrecisionPolicy("bf16-true", parameter_dtype=torch.bfloat16),
        PrecisionPolicy("16-true", parameter_dtype=torch.float16),
        PrecisionPolicy("bf16-mixed", autocast_dtype=torch.bfloat16),
        PrecisionPolicy("16-mixed", autocast_dtype=torch.float16, loss_scaling=True),
        PrecisionPolicy("bf16-master", parameter_dtype=torch.bfloat16, master_weights=True),
        PrecisionPolicy("16-master", parameter_dtype=torch.float16, master_weights=True, loss_scaling=True),
    )
}

# Aliases accepted by Lightning's Trainer.
_ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


def resolve_precision(precision: str | int) -> PrecisionPolicy:
    """Return the policy of a precision name.

    Args:
        precision: A name such as ``"bf16-mixed"``, or one of Lightning's aliases ``16``, ``32``, ``64``.

    Raises:
        ValueError: If the precision is unknown or cannot be traced.

    Example:
        >>> resolve_precision(16).name
        '16-mixed'
    """
    name = _ALIASES.get(str(precision), str(precision))
    if name not in PRECISIONS:
        raise ValueError(
            f"`precision` must be one of {', '.join(PRECISIONS)}, got {precision!r}. "
            "Other precisions cannot be traced yet: estimate with the nearest of these."
        )
    return PRECISIONS[name]
