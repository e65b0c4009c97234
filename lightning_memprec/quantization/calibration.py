"""Show layers their inputs: run data through a model and hand on what reaches each layer, block by block.

Nothing is stored, so memory does not grow with the data. The inputs of a layer are its *rows*: of a linear layer its
tokens, of a convolution its windows (im2col), each once for every group of channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from lightning_memprec.quantization.measure import run_batches
from lightning_memprec.quantization.padding import without_padding

__all__ = ["InputProducts", "feed", "input_rows", "stand_in"]

_HELD_OUT = 5  # One row in five judges, four are learned from: the share of five-fold cross-validation.
_BLOCK = 2**24  # Numbers in a block of rows: 64 MiB in FP32.


class InputProducts:
    """Sums :math:`X^T X` of a layer's inputs, and keeps the rows that judge apart from those to learn from.

    The products are FP32 and their sum FP64: a sum of many products in FP32 may lose its smallest eigenvalues. Held out
    is the last fifth of each block of rows: neighbouring rows (windows of one image) are much alike, so rows picked in
    between would be no test.

    Attributes:
        learned_from: FP64 ``[G, K, K]`` for G groups of K features.
        held_out: The same, of the other rows.
        rows: How many rows came by in all.
    """

    def __init__(self) -> None:
        self.learned_from: Tensor = torch.empty(0)
        self.held_out: Tensor = torch.empty(0)
        self.rows = 0

    def add(self, rows: Tensor) -> None:
        """Add a block.

        Args:
            rows: FP32 ``[N, G, K]``.
        """
        count, groups, features = rows.shape
        if not self.rows:
            # Metal has no FP64.
            device = "cpu" if rows.device.type == "mps" else rows.device
            zeros = torch.zeros(groups, features, features, dtype=torch.float64, device=device)
            self.learned_from, self.held_out = zeros, zeros.clone()
        held = (self.rows + count) // _HELD_OUT - self.rows // _HELD_OUT
        self.rows += count
        for total, part in ((self.learned_from, rows[: count - held]), (self.held_out, rows[count - held :])):
            by_group = part.transpose(0, 1)
            products = by_group.transpose(1, 2) @ by_group
            if not bool(products.isfinite().all()):  # Squares of more than 1e19 overflow FP32.
                products = by_group.to(total).transpose(1, 2) @ by_group.to(total)
            total += products.to(total)

    @property
    def judge(self) -> Tensor:
        """Held-out products; all there are if too few rows came by to hold one out."""
        return self.held_out if self.rows >= _HELD_OUT else self.learned_from


def input_rows(module: nn.Module, values: Tensor) -> Iterator[Tensor]:
    """Yield the rows that a layer multiplies its weight matrix with.

    Args:
        module: A linear layer, GPT-2's ``Conv1D``, or a convolution that is not transposed.
        values: What it was called with.

    Yields:
        FP32 ``[N, G, K]``: N tokens or windows, G groups (1 unless a grouped convolution) of K features, in the order
        of the columns of the weight matrix ``[channels, K]``.

    Example:
        >>> [rows.shape for rows in input_rows(nn.Conv2d(4, 8, 3, groups=2), torch.zeros(5, 4, 8, 8))]
        [torch.Size([180, 2, 18])]
    """
    if not isinstance(module, _ConvNd):
        tokens = values.reshape(-1, 1, values.shape[-1])
        for block in torch.split(tokens, max(1, _BLOCK // max(1, values.shape[-1]))):
            yield block.float()
        return
    if values.dim() == len(module.kernel_size) + 1:
        values = values[None]
    # A window overlaps its neighbours, so a sample takes this many times its numbers.
    overlap = math.prod(module.kernel_size) / math.prod(module.stride)
    for samples in torch.split(values, max(1, int(_BLOCK / max(1, values[:1].numel() * overlap)))):
        yield _windows(module, samples.float())


def _windows(conv: _ConvNd, samples: Tensor) -> Tensor:
    """Lay out the windows of a convolution as ``[N, G, K]``."""
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    windows = F.pad(samples, conv._reversed_padding_repeated_twice, mode=mode)
    for axis, (kernel, stride, dilation) in enumerate(
        zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)
    ):
        windows = windows.unfold(2 + axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    # [samples, channels, *places, *kernel] -> [samples, *places, channels, *kernel]
    windows = windows.movedim(1, 1 + len(conv.kernel_size))
    places = math.prod(windows.shape[: 1 + len(conv.kernel_size)])
    return windows.reshape(places, conv.groups, -1)


def feed(
    model: nn.Module,
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
    layers: dict[str, nn.Module],
    consume: Callable[[str, Tensor], None],
) -> None:
    """Run batches through a model in evaluation mode and hand on the inputs of layers, all uses of each.

    Padding that ``forward`` knows of is left out, see :mod:`lightning_memprec.quantization.padding`. Modes and random
    generators are left as they were.

    Args:
        model: The model.
        batches: What ``forward`` takes.
        forward: Runs one batch.
        layers: Layers to listen to, by name.
        consume: Called with a layer's name and a block of its rows, see :func:`input_rows`.

    Raises:
        ValueError: If there are no batches, or one gives a layer a NaN or an infinity.
    """
    position = 0

    def listen(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        values = without_padding(forward, module, args[0] if args else next(iter(kwargs.values())))
        # A model may switch gradients on for itself, such as one whose forces are derivatives.
        for rows in input_rows(module, values.detach()):
            if not bool(rows.isfinite().all()):
                raise ValueError(
                    f"Calibration batch {position} gives `{name}` an input with NaN or infinite values."
                    " Take such batches out."
                )
            if rows.shape[0]:
                consume(name, rows)

    def run(module: nn.Module, batch: Any) -> None:
        nonlocal position
        forward(module, batch)
        position += 1

    with ExitStack() as hooks:
        for name, layer in layers.items():
            # Bound here, because hooks are only told of the module.
            def hook(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                listen(name, module, args, kwargs)

            hooks.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        run_batches(model, batches, run)


def stand_in(module: nn.Module, replacement: nn.Module) -> RemovableHandle:
    """Let a replacement's output stand for a module's until the handle is removed.

    The model itself is not changed, so nothing has to be undone if what follows fails.
    """
    replacement.eval()

    def answer(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return replacement(*args, **kwargs)

    return module.register_forward_hook(answer, with_kwargs=True)
