"""Memory layouts that meta kernels do not know, since they depend on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["channels_last_convolution", "is_channels_last"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(tensor: Tensor) -> bool:
    """Tell whether a tensor of images or volumes lies channels-last and in no other dense layout."""
    layout = _FORMATS.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()


def channels_last_convolution(
    func: OpOverload, data: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Convolve as cuDNN and oneDNN do: channels-last output where data or weight are channels-last.

    The meta kernel answers contiguous always. Layer norms, copies and convolutions that follow need other
    memory on the two layouts. Source: `cudnn_conv_suggest_memory_format` and `mkldnn_conv_use_channels_last`
    in aten/src/ATen/native/ConvUtils.h of PyTorch.
    """
    output: Tensor = func(data, weight, *args, **kwargs)
    if output.is_meta and (is_channels_last(data) or is_channels_last(weight)):
        strides = torch.empty_like(output, memory_format=_FORMATS[output.dim()]).stride()
        # Other strides on the same storage: a copy would show up as memory.
        output.data = output.detach().as_strided(output.size(), strides)
    return output
