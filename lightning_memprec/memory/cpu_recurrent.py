"""Recurrent layers as a CPU run computes them: oneDNN's LSTM, and input products of all steps at once.

Source: aten/src/ATen/native/RNN.cpp, aten/src/ATen/native/mkldnn/RNN.cpp of PyTorch, and
src/cpu/rnn/rnn_utils.{hpp,cpp} of oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from lightning_memprec.memory.interpose import Kernel

__all__ = ["lstm_workspace_bytes", "recurrent_kernels"]

_aten = torch.ops.aten
_PAGE_BYTES = 4096
_Step = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def recurrent_kernels() -> dict[OpOverload, Kernel]:
    """Return the kernels of the recurrent operators on padded (not packed) sequences."""
    return {
        _aten.lstm.input: _lstm,
        _aten.gru.input: _stack_kernel(_gru_step),
        _aten.rnn_tanh.input: _stack_kernel(lambda *args: _simple_step(*args).tanh()),
        _aten.rnn_relu.input: _stack_kernel(lambda *args: _simple_step(*args).relu()),
    }


def _stack_kernel(step: _Step) -> Kernel:
    def layer(
        data: Tensor, hidden: Tensor, weights: Sequence[Tensor], reverse: bool
    ) -> tuple[Tensor, Tensor, Any]:
        """On the CPU alone `FullLayer` multiplies the inputs of all steps before the first step."""
        bias_ih, bias_hh = (weights[2], weights[3]) if len(weights) > 2 else (None, None)
        inputs = functional.linear(data, weights[0], bias_ih).unbind(0)
        outputs = []
        for value in reversed(inputs) if reverse else inputs:
            hidden = step(value, hidden, weights[1], bias_hh)
            outputs.append(hidden)
        output = torch.stack(outputs[::-1] if reverse else outputs)
        # `FullBidirectionalLayer` holds the steps of both directions, and the second one's products.
        return output, hidden, (outputs, inputs if reverse else None)

    def kernel(
        func: OpOverload, data: Tensor, hidden: Tensor, params: Sequence[Tensor], *options: Any
    ) -> Any:
        if not data.is_meta:
            return func(data, hidden, params, *options)
        output, states = _run_layers(layer, data, hidden.unbind(0), params, *options)
        return output, torch.stack(states)

    return kernel


def _run_layers(
    layer: Callable[..., tuple[Tensor, Any, Any]],
    data: Tensor,
    hidden: Sequence[Any],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, list[Any]]:
    """Run layers and directions; return the last layer's output and the final states of all.

    A layer returns its output, its final state, and what lives until both directions are joined.
    """
    directions, per_layer = 2 if bidirectional else 1, 4 if has_biases else 2
    data = data.transpose(0, 1) if batch_first else data
    states: list[Any] = []
    for index in range(num_layers):
        results = []
        for direction in range(directions):
            k = index * directions + direction
            weights = params[k * per_layer : (k + 1) * per_layer]
            results.append(layer(data, hidden[k], weights, direction == 1))
            states.append(results[-1][1])
        data = torch.cat([result[0] for result in results], -1) if bidirectional else results[0][0]
        del results
        if dropout and train and index < num_layers - 1:
            data = functional.dropout(data, dropout)
    return (data.transpose(0, 1) if batch_first else data), states


def _gru_step(value: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The same operators in place as `GRUCell`.
    inputs = value.unsafe_chunk(3, 1)
    products = functional.linear(hidden, weight, bias).unsafe_chunk(3, 1)
    reset = products[0].add_(inputs[0]).sigmoid_()
    update = products[1].add_(inputs[1]).sigmoid_()
    new = inputs[2].add(products[2].mul_(reset)).tanh_()
    return (hidden - new).mul_(update).add_(new)


def _simple_step(value: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(hidden, weight, bias).add_(value)


def _lstm(
    func: OpOverload, data: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor], *options: Any
) -> Any:
    """Run the layers in oneDNN (`mkldnn_rnn`), which takes float32 and bfloat16 without projections."""
    projected = hidden[0].size(2) != hidden[1].size(2)
    if not data.is_meta or projected or data.dtype not in (torch.float32, torch.bfloat16):
        return func(data, hidden, params, *options)
    states = list(zip(hidden[0].unbind(0), hidden[1].unbind(0), strict=True))
    output, states = _run_layers(_lstm_layer, data, states, params, *options)
    return output, torch.stack([h for h, _ in states]), torch.stack([c for _, c in states])


def _lstm_layer(
    data: Tensor, state: tuple[Tensor, Tensor], weights: Sequence[Tensor], reverse: bool
) -> tuple[Tensor, tuple[Tensor, Tensor], None]:
    tensors = [data.contiguous(), *weights, *state]
    if torch.is_autocast_enabled("cpu"):
        tensors = [tensor.to(torch.get_autocast_dtype("cpu")) for tensor in tensors]
    output, hidden, cell = _OneDnnLstm.apply(*tensors)
    return output, (hidden, cell), None


class _OneDnnLstm(torch.autograd.Function):
    """One layer in one direction; its meta kernel in PyTorch knows no workspace, its backward has none."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, weight_ih: Tensor, weight_hh: Tensor, *rest: Tensor) -> Any:
        steps, batch, inputs = data.shape
        width = weight_hh.size(1)
        hidden, cell = rest[-2:]
        outputs = data.new_empty(steps, batch, width), torch.empty_like(hidden), torch.empty_like(cell)
        saved = [data, weight_ih, weight_hh, *rest, *outputs]
        if any(ctx.needs_input_grad):
            size = lstm_workspace_bytes(steps, batch, inputs, width, data.element_size())
            saved.append(data.new_empty(size, dtype=torch.uint8))
        ctx.save_for_backward(*saved)
        data.new_empty(_reordered_weight_bytes(weight_ih) + _gates_bytes(data, width), dtype=torch.uint8)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        data, weight_ih, weight_hh = ctx.saved_tensors[:3]
        grads = tuple(grad.contiguous() for grad in grads)
        # oneDNN accumulates in float32; autograd casts to each input's dtype.
        result = tuple(
            torch.empty_like(t, dtype=torch.float32) if needed else None
            for t, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        )
        width, element = weight_hh.size(1), data.element_size()
        transposed = 4 * width * (_leading(weight_ih.size(1), element) + _leading(width, element)) * element
        scratch = transposed + _reordered_weight_bytes(weight_ih, 4) + _gates_bytes(data, width)
        data.new_empty(scratch, dtype=torch.uint8)
        return result


def lstm_workspace_bytes(steps: int, batch: int, inputs: int, width: int, element_bytes: int) -> int:
    """Bytes that oneDNN keeps from the forward to the backward pass of one LSTM layer.

    Gates and projected outputs of each step; states, cells and the gradients of data, states and cells of
    each step and of the one before the first, for the layer's input and for its output. Each region starts on
    a page (`set_workspace_sizes`, `set_offsets`).

    Args:
        steps: Length of the sequences, T.
        batch: Number of sequences, N.
        inputs: Width of the input.
        width: Width of the hidden state, H.
        element_bytes: Bytes of one element: 4 in float32, 2 in bfloat16.

    Returns:
        Size in bytes.

    Example:
        >>> lstm_workspace_bytes(64, 32, 128, 256, 4)
        32845824
    """
    wide, states = max(inputs, width), 2 * (steps + 1) * batch
    regions = (
        steps * batch * _leading(4 * width, element_bytes) * element_bytes,
        steps * batch * _leading(width, element_bytes) * element_bytes,
        states * _leading(wide, element_bytes) * element_bytes,
        states * width * element_bytes,
        states * _leading(wide, 4) * 4,
        states * _leading(wide, 4) * 4,
        states * width * 4,
    )
    return sum(-(-region // _PAGE_BYTES) * _PAGE_BYTES for region in regions)


def _leading(elements: int, element_bytes: int) -> int:
    """Row length that is a multiple of 64 bytes but not of 256 elements (`get_good_ld`)."""
    line = 64 // element_bytes
    padded = -(-elements // line) * line
    return padded + line if padded % 256 == 0 else padded


def _reordered_weight_bytes(weight_ih: Tensor, element_bytes: int = 0) -> int:
    element_bytes = element_bytes or weight_ih.element_size()
    gates, inputs = weight_ih.shape
    return (inputs + gates // 4) * _leading(gates, element_bytes) * element_bytes


def _gates_bytes(data: Tensor, width: int) -> int:
    """Bytes of the gates of all steps, which float32 multiplies at once; bfloat16 goes step by step."""
    steps, batch, _ = data.shape
    return steps * batch * _leading(4 * width, 4) * 4 if data.dtype is torch.float32 else 0
