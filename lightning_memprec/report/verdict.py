"""Does it fit? One small comparison, shared by the callback and the command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_memprec.memory.result import (
    LargestBatch,
)  # Not for type checkers only: files are read by the types.

__all__ = ["Status", "Verdict", "judge"]

Status = Literal["fits", "tight", "overflow", "undetermined"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a memory check.

    Args:
        status: ``"fits"``; ``"tight"``: only inside the safety margin; ``"overflow"``; ``"undetermined"``: no
            estimate, or no capacity to hold it against.
        need_bytes: What the device must offer, ``None`` if unknown.
        capacity_bytes: What it offers, ``None`` if unknown.
        safety_margin: Fraction of the capacity that is to stay free.
        when: Where the verdict was given: a Trainer hook, or the command.
        reason: Why it is undetermined, in words; else empty.
        largest_batch: The largest training batch that fits; ``None`` if it was not looked for, or not found.
    """

    status: Status
    need_bytes: int | None = None
    capacity_bytes: int | None = None
    safety_margin: float = field(default=0.0, metadata={"minimum": 0, "maximum": 1})
    when: str = ""
    reason: str = ""
    largest_batch: LargestBatch | None = None

    @property
    def headroom_bytes(self) -> int | None:
        """Capacity that stays free, negative if the run lacks memory; ``None`` if unknown."""
        if self.need_bytes is None or self.capacity_bytes is None:
            return None
        return self.capacity_bytes - self.need_bytes


def judge(
    need_bytes: int | None,
    capacity_bytes: int | None,
    *,
    safety_margin: float = 0.0,
    when: str = "",
    reason: str = "",
) -> Verdict:
    """Hold a need against a capacity.

    Args:
        need_bytes: Estimated need of the device, ``None`` if there is no estimate.
        capacity_bytes: What the device offers, ``None`` if unknown.
        safety_margin: Fraction of the capacity to keep free, in [0, 1).
        when: Where the verdict is given.
        reason: Why an estimate or a capacity is missing.

    Returns:
        ``"fits"`` up to ``capacity * (1 - margin)``, ``"tight"`` up to the capacity, ``"overflow"`` above.

    Raises:
        ValueError: If the margin lies outside [0, 1).

    Example:
        >>> judge(95, 100, safety_margin=0.1).status
        'tight'
    """
    if not 0.0 <= safety_margin < 1.0:
        raise ValueError(f"`safety_margin` must lie in [0, 1), got {safety_margin}. Write 0.05 for 5 %.")
    status: Status
    if need_bytes is None or capacity_bytes is None:
        status = "undetermined"
    elif need_bytes <= capacity_bytes * (1.0 - safety_margin):
        status = "fits"
    else:
        status = "tight" if need_bytes <= capacity_bytes else "overflow"
    return Verdict(
        status=status,
        need_bytes=need_bytes,
        capacity_bytes=capacity_bytes,
        safety_margin=safety_margin,
        when=when,
        reason=reason,
    )
