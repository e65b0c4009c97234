"""What a CPU run does that a run on meta tensors does not: its own choice of kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_memprec.memory.cpu_recurrent import recurrent_kernels
from lightning_memprec.memory.cpu_temporaries import cpu_kernel_allocations
from lightning_memprec.memory.interpose import Kernel
from lightning_memprec.memory.layout import channels_last_convolution, is_channels_last
from lightning_memprec.memory.whole_kernels import whole_kernels

__all__ = ["cpu_kernel_allocations", "cpu_kernels"]

_aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# SDPBackend::flash_attention, c10 enum in aten/src/ATen/native/transformers/sdp_utils_cpp.h.
_FLASH_ATTENTION = 1


def cpu_kernels() -> dict[OpOverload, Kernel]:
    """Return the kernels that replace an operator by what a CPU run would call instead.

    Returns:
        Map from operator overload to kernel, for :class:`~lightning_memprec.memory.interpose.Interposer`.
    """
    return {
        _aten.convolution.default: channels_last_convolution,
        _aten.native_batch_norm.default: _batch_norm,
        _aten.native_batch_norm_backward.default: _batch_norm_backward,
        _aten.scaled_dot_product_attention.default: _scaled_dot_product_attention,
        **recurrent_kernels(),
        **whole_kernels(),
    }


def _batch_norm(func: Any, data: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Normalize; the output is contiguous unless the data are channels-last.

    The meta kernel keeps any dense layout, so that a layer after a transposition back would copy nothing.
    Source: `suggest_memory_format` in `batch_norm_cpu`, aten/src/ATen/native/Normalization.cpp.
    """
    outputs = func(data, *args, **kwargs)
    _lay_out(outputs[0], data)
    return outputs


def _batch_norm_backward(func: Any, grad: Tensor, data: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The gradient of the data is laid out as the output is (`batch_norm_backward_cpu_template`)."""
    grads = func(grad, data, *args, **kwargs)
    if grads[0] is not None:
        _lay_out(grads[0], data)
    return grads


def _lay_out(output: Tensor, data: Tensor) -> None:
    if not output.is_meta or is_channels_last(data) or output.is_contiguous():
        return
    strides = torch.empty_like(output, memory_format=torch.contiguous_format).stride()
    # Other strides on the same storage: a copy would show up as memory.
    output.data = output.detach().as_strided(output.size(), strides)


def _scaled_dot_product_attention(
    func: OpOverload,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as `scaled_dot_product_attention` chooses it for CPU tensors.

    Source: aten/src/ATen/native/transformers/attention.cpp. Meta tensors would take the math path there.
    """
    options = {"scale": scale, "enable_gqa": enable_gqa}
    # The CPU's own choice reads shapes, strides and dtypes only, so that it can be asked about meta tensors.
    choice = _aten._fused_sdp_choice.default.redispatch(
        _CPU, query, key, value, attn_mask, dropout_p, is_causal, **options
    )
    if not query.is_meta or choice != _FLASH_ATTENTION:
        return func(query, key, value, attn_mask, dropout_p, is_causal, **options)  # type: ignore[no-any-return]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # `convert_boolean_attn_mask`: an additive mask of the query's dtype.
        zero, minus_infinity = (query.new_full((), x) for x in (0.0, float("-inf")))
        attn_mask = torch.where(attn_mask, zero, minus_infinity)
    attention = _aten._scaled_dot_product_flash_attention_for_cpu.default
    output: Tensor = attention(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output
