"""A half parameter and its FP32 master."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Pair", "differs", "merge", "merged", "round_trips", "write_back"]

# Elements compared at a time, for each thread. torch gives a thread no fewer than 2**15 (`at::internal::GRAIN_SIZE`);
# twice that halves the calls, and its 128 KiB of rounded values still stay in a core's cache.
_GRAINS = 2 * 2**15
# Elsewhere than on a CPU a piece costs four kernels, and 7 bytes an element for a moment: 28 MiB. That stays in the
# cache of a large GPU (40 MB on an A100, 50 on an H100); smaller pieces would be more kernels.
_DEVICE_PIECE = 2**22


class Pair:
    """A parameter in half, the FP32 master that the optimizer steps, and how far they agree.

    Args:
        parameter: The module's parameter, float16 or bfloat16.
        source: FP32 values of the same shape; the master takes over their storage.
    """

    __slots__ = ("master", "parameter", "unreduced", "version")

    def __init__(self, parameter: nn.Parameter, source: Tensor) -> None:
        self.parameter = parameter
        self.master = nn.Parameter(source.data, requires_grad=parameter.requires_grad)
        self.version = self.master._version
        self.unreduced = False

    @property
    def is_moved(self) -> bool:
        """Whether the master was changed since the parameter was last rounded from it."""
        return self.master._version != self.version

    def to(self, device: torch.device) -> None:
        """Move the master; it stays the same object, which optimizers hold."""
        is_moved = self.is_moved
        self.master.data = self.master.data.to(device)
        self.version = self.master._version - is_moved


def differs(parameter: Tensor, master: Tensor) -> Tensor:
    """Tell for each element whether the half value is not its master rounded to nearest, bit by bit.

    Bits, because NaN differs from itself by value, and -0.0 does not differ from 0.0.

    Args:
        parameter: Half values, float16 or bfloat16.
        master: Their FP32 values, same shape.

    Returns:
        Booleans of the same shape.
    """
    return master.to(parameter.dtype).view(torch.int16) != parameter.detach().view(torch.int16)


def _pieces(parameter: Tensor, master: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide both in the same way, flat where they are contiguous, so that temporaries stay small and in cache."""
    parameter, master = parameter.detach(), master.detach()
    if not (parameter.is_contiguous() and master.is_contiguous()):
        return iter([(parameter, master)])
    size = _GRAINS * torch.get_num_threads() if parameter.device.type == "cpu" else _DEVICE_PIECE
    return zip(torch.split(parameter.view(-1), size), torch.split(master.view(-1), size), strict=True)


def _agree(parameter: Tensor, master: Tensor) -> bool:
    """Tell whether nothing differs. Faster on a CPU than asking each element; elsewhere it waits for the device."""
    return torch.equal(_bits(master.to(parameter.dtype)), _bits(parameter))


def _bits(half: Tensor) -> Tensor:
    """View half values as whole numbers, four in one where they line up: fewer to compare."""
    lined_up = half.is_contiguous() and half.dim() == 1 and not (half.numel() | half.storage_offset()) % 4
    return half.view(torch.int64 if lined_up else torch.int16)


def round_trips(original: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether every value can be represented exactly in ``dtype``."""
    return torch.equal(original, original.to(dtype).to(original.dtype))


def merged(parameter: Tensor, master: Tensor) -> Tensor:
    """Return FP32 values: the master's, and the half value wherever someone has written one over it."""
    if all(_agree(*piece) for piece in _pieces(parameter, master)):
        return master.detach()
    return torch.where(differs(parameter, master), parameter.detach(), master.detach())


@torch.no_grad()
def merge(pair: Pair) -> None:
    """Take what others wrote over the half parameter into the master; keep every other mantissa.

    A weight clamp, an average copied into the model and the like write to the parameter, perhaps through
    ``.data``, which no version counter sees. If the master itself was changed, it wins.
    """
    if pair.is_moved:
        write_back([pair])
        return
    # Elsewhere than on a CPU the question would make the device wait; there the write is unconditional.
    asks = pair.master.device.type == "cpu"
    for half, single in _pieces(pair.parameter, pair.master):
        if not (asks and _agree(half, single)):
            torch.where(differs(half, single), half, single, out=single)
    pair.version = pair.master._version


@torch.no_grad()
def write_back(pairs: Sequence[Pair]) -> None:
    """Round the masters into their parameters, to nearest even."""
    if pairs:
        torch._foreach_copy_([pair.parameter for pair in pairs], [pair.master for pair in pairs])
    for pair in pairs:
        pair.version = pair.master._version
