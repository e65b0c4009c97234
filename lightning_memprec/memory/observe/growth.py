"""Notice memory that grows from step to step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lightning_memprec._units import KIB, MIB

__all__ = ["DEVICE_RULE", "HOST_RULE", "Growth", "GrowthRule", "GrowthWatch"]


@dataclass(frozen=True)
class GrowthRule:
    """When a rise counts.

    Args:
        rises: Floors in a row that each lie above the one before.
        samples: Samples of which the lowest is a floor.
        bytes_per_step: Smallest rate over these floors.
        total_bytes: Smallest rise over these floors.
    """

    rises: int
    samples: int = 1
    bytes_per_step: int = 0
    total_bytes: int = 0


# A cache may fill over the first dozen steps (masks by length, say) and then rest; a leak does not rest. If nothing
# grows, the order of samples is as good as random, and 17 of them rise with a probability of 1 / 17!. A KiB a step is
# two scalars (the CUDA allocator's smallest block is 512 bytes): less takes a million steps to lose one GiB, as a list
# of detached losses does.
DEVICE_RULE = GrowthRule(rises=16, bytes_per_step=KIB)
# Resident memory goes up and down by what malloc holds at the moment, hence floors of several samples, of which 9 rise
# by chance with a probability of 1 / 9!. It settles upwards after the start, as libraries and heaps come in: hence a
# rise that such things do not reach.
HOST_RULE = GrowthRule(rises=8, samples=4, bytes_per_step=16 * KIB, total_bytes=64 * MIB)


@dataclass(frozen=True)
class Growth:
    """A rise that counts.

    Args:
        first_step: Step of the first sample of the rise.
        last_step: Step of the last one.
        from_bytes: Memory at the first.
        to_bytes: Memory at the last.
    """

    first_step: int
    last_step: int
    from_bytes: int
    to_bytes: int

    @property
    def bytes_per_step(self) -> float:
        """Mean rate."""
        return (self.to_bytes - self.from_bytes) / max(1, self.last_step - self.first_step)


class GrowthWatch:
    """Watches the floor of memory: what is alive at the same point of each sampled step.

    An alarm needs every one of ``rule.rises`` floors in a row to lie above the one before; a rise that counts is
    told once. It comes late rather than false: what grows and is emptied within the window is never told.

    Args:
        rule: When a rise counts.

    Example:
        >>> watch = GrowthWatch(GrowthRule(rises=2))
        >>> [watch.observe(step, size) for step, size in enumerate([100, 90, 100])]
        [None, None, None]
        >>> watch.observe(3, 120)
        Growth(first_step=1, last_step=3, from_bytes=90, to_bytes=120)
    """

    def __init__(self, rule: GrowthRule) -> None:
        self._rule = rule
        self._samples: list[int] = []
        # The oldest floor goes when a new one comes: the rate is that of the window.
        self._rising: deque[tuple[int, int]] = deque(maxlen=rule.rises + 1)
        self._is_told = False

    @property
    def is_suspicious(self) -> bool:
        """Whether the next floor may be the one that counts."""
        return not self._is_told and len(self._rising) >= self._rule.rises

    def observe(self, step: int, size_bytes: int) -> Growth | None:
        """Take in a sample; return the growth if it counts and was not told yet.

        Args:
            step: Step of the sample. Steps rise.
            size_bytes: What is alive.
        """
        self._samples.append(size_bytes)
        if len(self._samples) < self._rule.samples:
            return None
        floor = min(self._samples)
        self._samples.clear()
        if self._rising and floor <= self._rising[-1][1]:
            self._rising.clear()
        self._rising.append((step, floor))
        return self._judge()

    def _judge(self) -> Growth | None:
        if self._is_told or len(self._rising) <= self._rule.rises:
            return None
        (first_step, from_bytes), (last_step, to_bytes) = self._rising[0], self._rising[-1]
        growth = Growth(first_step, last_step, from_bytes, to_bytes)
        is_large = to_bytes - from_bytes >= self._rule.total_bytes
        if not is_large or growth.bytes_per_step < self._rule.bytes_per_step:
            return None
        self._is_told = True
        return growth
