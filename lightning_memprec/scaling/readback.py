"""Read values from a device without waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Readback"]


class Readback:
    """A copy of some numbers on its way from a device to the host.

    On CUDA the copy is queued behind the work that makes the numbers, into pinned memory, and nothing waits.
    Whoever reads one step later finds it done as a rule: the device has begun the next step by then.

    Args:
        values: Floating-point tensors on one device, any shapes. They may be changed afterwards.

    Example:
        >>> scale = torch.tensor(4.0)
        >>> copy = Readback([scale, torch.tensor([1.0, 2.0])])
        >>> _ = scale.fill_(0)
        >>> copy.read()
        [4.0, 1.0, 2.0]
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        device = values[0].device
        parts = [_fp32_on(device, value) for value in values]
        # One kernel for scalars, which is what quiet steps send.
        scalars = all(part.dim() == 0 for part in parts)
        flat = torch.stack(parts) if scalars else torch.cat([part.reshape(-1) for part in parts])
        # `non_blocking` to the CPU copies into pinned memory.
        self._host = flat if device.type == "cpu" else flat.to("cpu", non_blocking=True)
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(device))

    def read(self) -> list[float]:
        """Return the numbers in order, once the copy has arrived."""
        if self._done is not None:
            self._done.synchronize()
        values: list[float] = self._host.tolist()
        return values


def _fp32_on(device: torch.device, value: Tensor) -> Tensor:
    """Take a tensor out of the graph and move it if that is needed; asking is cheaper than ``to``."""
    if value.dtype == torch.float32 and value.device == device:
        return value.detach() if value.requires_grad else value
    return value.detach().to(device, torch.float32)
