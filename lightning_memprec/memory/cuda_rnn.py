"""Recurrent layers as cuDNN runs them: one operator a layer stack, with a reserve kept for the backward pass.

Without this a trace would run the layers step by step, slowly, and keep what no CUDA run keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_memprec.memory.interpose import Kernel

__all__ = ["reserve_numel", "rnn_kernels"]

# cudnnRNNMode_t.
_RELU, _TANH, _LSTM, _GRU = range(4)
# Elements that cuDNN keeps for each layer, time step and hidden unit. The reserves that it asked for in
# github.com/pytorch/pytorch/issues/2895, float32, were 736,000,000 bytes (LSTM) and 864,000,000 (GRU). Both
# had 4 layers of 320 units (from their parameter counts): 320 * 4 * 23 n and 320 * 4 * 27 n bytes, with
# n = 25,000 steps x batch. That is five a layer (four gates and the cell) or six, and three outputs between
# layers. The plain RNN is taken to keep its activation.
_KEPT = {_RELU: 1, _TANH: 1, _LSTM: 5, _GRU: 6}


def reserve_numel(mode: int, steps: int, hidden_size: int, num_layers: int, directions: int) -> int:
    """Count the elements of the reserve that cuDNN keeps from forward to backward.

    Args:
        mode: 0 for ReLU, 1 for tanh, 2 for LSTM, 3 for GRU.
        steps: Time steps times batch.
        hidden_size: Hidden units.
        num_layers: Layers.
        directions: 2 if bidirectional, else 1.

    Returns:
        Elements of the layers' dtype: what each layer keeps, and the output of each layer but the last.

    References:
        Fitted to https://github.com/pytorch/pytorch/issues/2895, where both sizes were measured.

    Example:
        >>> reserve_numel(2, 25_000, 320, 4, 1) * 4
        736000000
    """
    return steps * hidden_size * directions * (_KEPT[mode] * num_layers + num_layers - 1)


class _CudnnRnn(torch.autograd.Function):
    """What ``_cudnn_rnn`` allocates and saves; it has no meta kernel for its backward pass."""

    @staticmethod
    def forward(ctx: Any, layout: _Layout, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        data, hidden, cell, *weights = tensors
        assert data is not None
        assert hidden is not None
        dense = _steps_first(data, layout)
        output = data.new_empty(*data.shape[:-1], layout.output_size)
        hidden_out = torch.empty_like(hidden)
        cell_out = data.new_empty(0) if cell is None else torch.empty_like(cell)
        reserve = data.new_empty(layout.reserve_numel(data) if layout.training else 0)
        del dense
        ctx.layout = layout
        ctx.save_for_backward(data, hidden, cell, output, reserve, *weights)
        return output, hidden_out, cell_out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        data, hidden, cell, _, _, *weights = ctx.saved_tensors
        copies = _steps_first(data, ctx.layout), _steps_first(grads[0], ctx.layout)
        grad_data, grad_hidden = torch.empty_like(data), torch.empty_like(hidden)
        grad_cell = None if cell is None else torch.empty_like(cell)
        # Gradients of all weights are views of one buffer.
        sizes = [w.numel() for w in weights]
        pieces = data.new_zeros(sum(sizes)).split(sizes)
        del copies
        grad_weights = [p.view_as(w) for p, w in zip(pieces, weights, strict=True)]
        return None, grad_data, grad_hidden, grad_cell, *grad_weights


@dataclass(frozen=True)
class _Layout:
    mode: int
    hidden_size: int
    proj_size: int
    num_layers: int
    directions: int
    batch_first: bool
    training: bool

    @property
    def output_size(self) -> int:
        return (self.proj_size or self.hidden_size) * self.directions

    def reserve_numel(self, data: Tensor) -> int:
        steps = data.numel() // data.shape[-1]
        return reserve_numel(self.mode, steps, self.hidden_size, self.num_layers, self.directions)


def _steps_first(tensor: Tensor, layout: _Layout) -> Tensor:
    """Copy as cuDNN wants it: time steps first, dense."""
    return (tensor.transpose(0, 1) if layout.batch_first else tensor).contiguous()


def _cudnn_rnn(func: Any, data: Tensor, weights: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    _, buffer, hidden, cell, mode, hidden_size, proj_size, num_layers, batch_first, _, train, both, *_ = args
    layout = _Layout(mode, hidden_size, proj_size, num_layers, 2 if both else 1, batch_first, train)
    outputs: tuple[Tensor, ...] = _CudnnRnn.apply(layout, data, hidden, cell, *weights)  # type: ignore[no-untyped-call]
    return *outputs, data.new_empty(0, dtype=torch.uint8), buffer


def _is_accepted(data: Tensor, capability: tuple[int, int]) -> bool:
    dtypes = (torch.float32, torch.float16, torch.float64) + ((torch.bfloat16,) if capability[0] >= 8 else ())
    return data.is_meta and torch.backends.cudnn.enabled and data.numel() > 0 and data.dtype in dtypes


def _make_layer(mode: int, capability: tuple[int, int], *, packed: bool) -> Kernel:
    """Make the kernel of ``lstm``, ``gru`` or ``rnn_*``, for padded or packed sequences."""

    def layer(func: Any, data: Tensor, *args: Any) -> Any:
        if not _is_accepted(data, capability) or (packed and args[0].is_meta):
            return func(data, *args)
        sizes = args[0].tolist() if packed else []
        states, weights, has_biases, num_layers, dropout, train, both, *batch_first = (
            args[1:] if packed else args
        )
        hidden, cell = states if mode == _LSTM else (states, None)
        hidden_size = (hidden if cell is None else cell).shape[-1]
        proj_size = hidden.shape[-1] if hidden.shape[-1] != hidden_size else 0
        per_layer = (4 if has_biases else 2) + (1 if proj_size else 0)
        first = bool(batch_first and batch_first[0])
        out = torch.ops.aten._cudnn_rnn.default(
            data, weights, per_layer, None, hidden, cell, mode, hidden_size, proj_size, num_layers,
            first, dropout, train, both, sizes, None,
        )  # fmt: skip
        return out[:3] if mode == _LSTM else out[:2]

    return layer


def rnn_kernels(capability: tuple[int, int]) -> dict[OpOverload, Kernel]:
    """Return the kernels of recurrent layers.

    Args:
        capability: Compute capability; before 8.0 cuDNN has no bfloat16 layers.
    """
    aten = torch.ops.aten
    kernels: dict[OpOverload, Kernel] = {aten._cudnn_rnn.default: _cudnn_rnn}
    for name, mode in (("rnn_relu", _RELU), ("rnn_tanh", _TANH), ("lstm", _LSTM), ("gru", _GRU)):
        packet = getattr(aten, name)
        kernels[packet.input] = _make_layer(mode, capability, packed=False)
        kernels[packet.data] = _make_layer(mode, capability, packed=True)
    return kernels
