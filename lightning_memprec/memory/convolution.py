"""What cuDNN's convolutions allocate beside tensors.

Sources are paths in the PyTorch repository: aten/src/ATen/native/Convolution.cpp, cudnn/ConvShared.cpp and
cudnn/Conv_v8.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_memprec.memory.cudnn import Convolution, CudnnHeuristics, Kind, Workspace
from lightning_memprec.memory.layout import is_channels_last

__all__ = ["convolution_workspaces"]

_aten = torch.ops.aten


def convolution_workspaces(
    func: OpOverload, args: Any, kwargs: Any, heuristics: CudnnHeuristics
) -> Iterable[Workspace]:
    """Return the workspaces that a convolution allocates and frees, one for each of its products.

    Args:
        func: Operator that runs.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        heuristics: Knows the algorithms.

    Returns:
        Each live on its own beside the operator's outputs; none for other operators.
    """
    if func is _aten.convolution.default:
        return _forward(heuristics, *args, **kwargs)
    if func is _aten.convolution_backward.default:
        return _backward(heuristics, *args, **kwargs)
    return ()


def _runs_natively(data: Tensor, weight: Tensor, groups: int) -> bool:
    """Tell whether torch's own depth-wise kernels run, which need no workspace (`use_cudnn_depthwise`).

    In half precision torch takes cuDNN for many shapes: it is asked for all of them.
    """
    is_depthwise = groups > 1 and groups == data.size(1) and weight.size(0) % groups == 0
    in_cudnn_layout = is_channels_last(data) or is_channels_last(weight)
    return is_depthwise and not in_cudnn_layout and data.dtype in (torch.float32, torch.float64)


def _images(tensor: Tensor, *, channels_last: bool) -> Tensor:
    """Lay a tensor out as cuDNN gets it: signals as images of height 1 (`view1d_as_2d`)."""
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(2)
    if channels_last:
        layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        return tensor.contiguous(memory_format=layout)
    return tensor.contiguous()


class _Layer:
    """A convolution layer whose three products cuDNN computes."""

    def __init__(
        self, data: Tensor, weight: Tensor, output: Tensor, stride: Any, padding: Any, dilation: Any
    ) -> None:
        channels_last = is_channels_last(data) or is_channels_last(weight)
        self.tensors = [_images(t, channels_last=channels_last) for t in (data, weight, output)]
        # `view1d_as_2d` puts a height in front: stride 1, padding 0, dilation 1.
        self.geometry = [
            [first, *g] if data.dim() == 3 else list(g)
            for first, g in ((1, stride), (0, padding), (1, dilation))
        ]

    def workspace(self, heuristics: CudnnHeuristics, kind: Kind) -> Workspace:
        """Ask for one of the products."""
        data, weight, output = self.tensors
        return heuristics.workspace(Convolution.of(kind, data, weight, output, *self.geometry))


def _forward(
    heuristics: CudnnHeuristics,
    data: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Iterable[Workspace]:
    if _runs_natively(data, weight, groups):
        return
    output = _aten.convolution.default(
        data, weight, None, stride, padding, dilation, transposed, output_padding, groups
    )
    if transposed:  # The gradient of a convolution that leads from the output to the data.
        layer = _Layer(output, weight, data, stride, padding, dilation)
        yield layer.workspace(heuristics, "data gradient")
    else:
        yield _Layer(data, weight, output, stride, padding, dilation).workspace(heuristics, "forward")


def _backward(
    heuristics: CudnnHeuristics,
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
) -> Iterable[Workspace]:
    if _runs_natively(data, weight, groups):
        return
    ends = (grad, weight, data) if transposed else (data, weight, grad)
    layer = _Layer(*ends, stride, padding, dilation)
    if output_mask[0]:
        yield layer.workspace(heuristics, "forward" if transposed else "data gradient")
    if output_mask[1]:
        yield layer.workspace(heuristics, "weight gradient")
