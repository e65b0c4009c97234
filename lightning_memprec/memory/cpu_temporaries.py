"""What CPU kernels allocate and free inside one operator.

Only what is large and simple: layout changes around oneDNN's convolutions and copies that ATen's own kernels
make. The scratch memory of oneDNN's matrix products is left out. Sources are paths in the PyTorch repository.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_memprec.memory.cpu_collectives import cpu_collective_allocations
from lightning_memprec.memory.cpu_elementwise import elementwise_allocations
from lightning_memprec.memory.cpu_products import product_allocations
from lightning_memprec.memory.layout import is_channels_last

__all__ = ["cpu_kernel_allocations"]

_aten = torch.ops.aten
_Rule = Callable[..., Iterable[int]]


def cpu_kernel_allocations(func: OpOverload, args: Any, kwargs: Any) -> Iterable[int]:
    """Return sizes of what a CPU kernel allocates and frees inside one call.

    Args:
        func: Operator that is about to run.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        Sizes in bytes, each live on its own before the operator's outputs are made. A temporary that lives
        beside an output therefore comes with that output's size added.
    """
    rule = _RULES.get(func)
    return () if rule is None else rule(*args, **kwargs)


def _dense_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- convolution: aten/src/ATen/native/mkldnn/Conv.cpp, third_party/ideep --------------------------------


def _block() -> int:
    """Channels that oneDNN keeps together: one vector register of 32-bit numbers."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _up(channels: int) -> int:
    return -(-channels // _block()) * _block()


def _blocked_bytes(tensor: Tensor) -> int:
    """Bytes of an activation whose channels (dimension 1) are padded to whole blocks, as in `nChw16c`."""
    return _dense_bytes(tensor) // max(tensor.size(1), 1) * _up(tensor.size(1))


def _blocked_weight_bytes(weight: Tensor, groups: int) -> int:
    outputs, inputs = weight.size(0), weight.size(1)
    if groups > 1 and inputs == 1:  # depth-wise: blocks of groups
        return _dense_bytes(weight) // outputs * _up(outputs)
    per_group = outputs // groups
    padded_inputs = inputs if inputs <= 3 else _up(inputs)
    return _dense_bytes(weight) // (per_group * inputs) * _up(per_group) * padded_inputs


def _copy_bytes(tensor: Tensor, channels_last: bool) -> int:
    """Bytes of `tensor.contiguous(memory_format=...)`, which copies nothing that lies so already."""
    layout = torch.contiguous_format
    if channels_last:
        layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return 0 if tensor.is_contiguous(memory_format=layout) else _dense_bytes(tensor)


def _source_bytes(data: Tensor) -> int:
    # The kernels of a network's first convolution read images of up to three channels as they are.
    return 0 if data.size(1) <= 3 else _blocked_bytes(data)


def _convolution(
    data: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Iterable[int]:
    """Copies in oneDNN's blocked layout of data, weight and output; channels_last needs none of the data."""
    if transposed or data.dim() < 3:
        return
    output = _aten.convolution.default(
        data, weight, None, stride, padding, dilation, transposed, output_padding, groups
    )
    weight_bytes = _blocked_weight_bytes(weight, groups)
    channels_last = is_channels_last(data) or is_channels_last(weight)
    copies = _copy_bytes(data, channels_last) + _copy_bytes(weight, channels_last)
    if channels_last:
        yield copies + weight_bytes + _dense_bytes(output)
        return
    yield copies + _source_bytes(data) + weight_bytes + _blocked_bytes(output)
    yield copies + _blocked_bytes(output) + _dense_bytes(output)


def _convolution_backward(
    grad: Tensor,
    data: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> Iterable[int]:
    """The same copies, first for the gradient of the data, then for that of the weight."""
    if transposed or data.dim() < 3:
        return
    channels_last = is_channels_last(data) or is_channels_last(weight)
    copies = sum(_copy_bytes(tensor, channels_last) for tensor in (grad, data, weight))
    weight_bytes = _blocked_weight_bytes(weight, groups)
    data_bytes = _dense_bytes(data) if output_mask[0] else 0
    if channels_last:
        yield copies + data_bytes + _channels_last_weight_gradient(weight, groups)
        return
    if output_mask[0]:
        yield copies + _blocked_bytes(grad) + weight_bytes + _blocked_bytes(data)
        yield copies + _blocked_bytes(data) + data_bytes
    if output_mask[1]:
        yield copies + data_bytes + _source_bytes(data) + _blocked_bytes(grad) + weight_bytes
        yield copies + data_bytes + weight_bytes + _dense_bytes(weight)


def _channels_last_weight_gradient(weight: Tensor, groups: int) -> int:
    """Bytes of the reordered weight gradient.

    oneDNN's depth-wise kernels know no channels_last weight gradient of kernels wider than 3. The kernel for
    grouped convolutions steps in: each group's 1 x 1 channels are padded to a block of 16 x 16, and half
    precision accumulates in a float32 copy of that.
    """
    size = _dense_bytes(weight)
    if groups > 1 and weight.size(1) == 1 and max(weight.shape[2:]) > 3:
        size *= _block() ** 2
        if weight.element_size() < 4:
            size += size // weight.element_size() * 4
    return size


# -- normalization: aten/src/ATen/native/Normalization.cpp, layer_norm.cpp -------------------------------


def _batch_norm_backward(grad: Tensor, data: Tensor, *rest: Any) -> Iterable[int]:
    # `batch_norm_backward_cpu_template` makes the data's gradient twice where both layouts agree.
    contiguous = grad.is_contiguous() and data.is_contiguous()
    if rest[-1][0] and (contiguous or (is_channels_last(grad) and is_channels_last(data))):
        yield 2 * _dense_bytes(data)


def _layer_norm(data: Tensor, *rest: Any) -> Iterable[int]:
    # `layer_norm_cpu` copies what is not contiguous; the copy lives beside the output.
    if not data.is_contiguous():
        yield 2 * _dense_bytes(data)


def _layer_norm_backward(grad: Tensor, data: Tensor, *rest: Any) -> Iterable[int]:
    copies = sum(_dense_bytes(t) for t in (grad, data) if not t.is_contiguous())
    if copies:
        yield copies + _dense_bytes(data)


# -- fused attention: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp ----------------------------------


def _attention_tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Return rows and columns of the scores that one thread holds (`flash_attention_kernel_impl`)."""
    length = query.size(2)
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.size(2))


def _attention(query: Tensor, key: Tensor, *rest: Any, **kwargs: Any) -> Iterable[int]:
    """Scores, two sums a row and the output of a tile in float32, beside output and log-sum-exp."""
    rows, columns = _attention_tile(query, key)
    per_thread = 4 * rows * (columns + 2 + query.size(3))
    if query.element_size() < 4:
        per_thread += rows * columns * query.element_size()
    yield torch.get_num_threads() * per_thread + _dense_bytes(query) + 4 * query[..., 0].numel()


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, *rest: Any, **kwargs: Any) -> Iterable[int]:
    """Scores of a tile and their gradient, beside the three gradients; the output's gradient made dense."""
    rows, columns = _attention_tile(query, key)
    element = 4 + (query.element_size() if query.element_size() < 4 else 0)
    others = _dense_bytes(query) + 2 * _dense_bytes(key) + _copy_bytes(grad.transpose(1, 2), False)
    yield torch.get_num_threads() * 2 * rows * columns * element + others


_RULES: dict[OpOverload, _Rule] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    **cpu_collective_allocations(),
    **elementwise_allocations(),
    **product_allocations(),
}
