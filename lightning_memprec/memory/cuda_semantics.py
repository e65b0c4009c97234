"""What a CUDA run does that the same step on meta tensors would not.

Composite operators ask ``tensor.is_cuda()`` and then take another way: fused attention, dropout with a byte
mask, cuDNN layers. These kernels take that way for meta tensors. Host tensors are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_memprec.memory.cuda_attention import attention_kernel
from lightning_memprec.memory.cuda_rnn import rnn_kernels
from lightning_memprec.memory.interpose import Kernel
from lightning_memprec.memory.layout import channels_last_convolution
from lightning_memprec.memory.whole_kernels import whole_kernels

__all__ = ["cuda_kernels", "cuda_optimizer_defaults"]


def cuda_kernels(compute_capability: tuple[int, int] = (8, 0)) -> dict[OpOverload, Kernel]:
    """Return the kernels that make meta tensors take CUDA's way.

    Args:
        compute_capability: Of the device that meta tensors stand for, such as ``(9, 0)``.

    Returns:
        Map for :meth:`Interposer.use`, at a key below the autocast emulation's.

    Example:
        >>> from lightning_memprec.memory.interpose import Interposer
        >>> interposer = Interposer("AutocastIPU")
        >>> interposer.use(cuda_kernels((8, 0)))
        >>> with interposer.active():
        ...     x = torch.empty(1, 2, 16, 8, dtype=torch.half, device="meta", requires_grad=True)
        ...     torch.nn.functional.scaled_dot_product_attention(x, x, x).grad_fn.name()
        'ScaledDotProductFlashAttentionBackward0'
    """
    aten = torch.ops.aten
    # `gru_cell` is missing: its fused operator has no meta kernel, so a `GRUCell` keeps a little too much.
    return {
        aten.scaled_dot_product_attention.default: attention_kernel(compute_capability),
        aten.dropout.default: _dropout,
        aten.softmax.int: _make_softmax(aten._softmax.default),
        aten.log_softmax.int: _make_softmax(aten._log_softmax.default),
        aten.rms_norm.default: _rms_norm,
        aten.lstm_cell.default: _lstm_cell,
        aten.convolution.default: channels_last_convolution,
        **rnn_kernels(compute_capability),
        **whole_kernels(),
    }


def _dropout(func: Any, data: Tensor, p: float, train: bool) -> Any:
    """Keep a mask of one byte an element (``Dropout.cpp``, ``is_fused_kernel_acceptable``)."""
    if data.is_meta and train and 0.0 < p < 1.0 and data.numel() > 0:
        return torch.native_dropout(data, p, True)[0]
    return func(data, p, train)


def _make_softmax(fused: OpOverload) -> Kernel:
    """Go from float16 to float32 without a float32 copy of the input (``SoftMax.cpp``)."""

    def softmax(func: Any, data: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if data.is_meta and data.dtype is torch.float16 and dtype is torch.float32:
            return fused(data, dim, True)
        return func(data, dim, dtype)

    return softmax


class _FusedRmsNorm(torch.autograd.Function):
    """What ``_fused_rms_norm`` allocates and saves: input, weight and the reciprocal root, in float32."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, weight: Tensor | None, stat_shape: list[int]) -> Tensor:
        data = data.contiguous()
        dtype = torch.float64 if data.dtype is torch.float64 else torch.float32
        out = torch.empty_like(data)
        ctx.save_for_backward(data, weight, data.new_empty(stat_shape, dtype=dtype))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        data, weight, _ = ctx.saved_tensors
        return torch.empty_like(data), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    func: Any,
    data: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Take the fused kernel unless dtypes differ or the layout is channels-last (``layer_norm.cpp``)."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(data.dim(), torch.contiguous_format)
    channels_last = not data.is_contiguous() and data.is_contiguous(memory_format=layout)
    other_dtype = weight is not None and weight.dtype is not data.dtype
    if not data.is_meta or other_dtype or data.is_complex() or channels_last:
        return func(data, normalized_shape, weight, eps)
    kept = data.dim() - len(normalized_shape)
    stat_shape = [*data.shape[:kept], *[1] * len(normalized_shape)]
    return _FusedRmsNorm.apply(data, weight, stat_shape)  # type: ignore[no-untyped-call]


def _lstm_cell(
    func: Any,
    data: Tensor,
    states: list[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Use the fused cell, which keeps its four gates (``RNN.cpp``, ``LSTMCell``)."""
    if not data.is_meta:
        return func(data, states, w_ih, w_hh, b_ih, b_hh)
    hidden, cell = states
    gates = data.matmul(w_ih.t()), hidden.matmul(w_hh.t())
    hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(*gates, cell, b_ih, b_hh)
    return hidden, cell


@contextmanager
def cuda_optimizer_defaults() -> Iterator[None]:
    """Let ``torch.optim`` and gradient clipping treat meta parameters as CUDA ones.

    Inside, ``foreach`` is the default for them, and ``fused=True`` and ``capturable=True`` are accepted. What
    was replaced is put back at the end.

    Example:
        >>> from torch.optim.optimizer import _default_to_fused_or_foreach
        >>> weight = torch.nn.Parameter(torch.empty(2, device="meta"))
        >>> with cuda_optimizer_defaults():
        ...     _default_to_fused_or_foreach([weight], differentiable=False)
        (False, True)
    """
    replaced: list[tuple[Any, str, Any]] = []
    owners = [module for name, module in sys.modules.items() if name.startswith("torch.optim")]
    try:
        for owner in (torch.utils._foreach_utils, *owners):
            for name in (
                "_get_foreach_kernels_supported_devices",
                "_get_fused_kernels_supported_devices",
                "_get_capturable_supported_devices",
            ):
                original = vars(owner).get(name)
                if original is not None:
                    replaced.append((owner, name, original))
                    setattr(owner, name, _with_meta(original))
        yield
    finally:
        for owner, name, original in replaced:
            setattr(owner, name, original)


def _with_meta(supported_devices: Any) -> Any:
    def with_meta(*args: Any, **kwargs: Any) -> list[str]:
        return [*supported_devices(*args, **kwargs), "meta"]

    return with_meta
