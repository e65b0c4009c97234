"""The exception family: every error of this package derives from :class:`MemPrecError`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprec.memory.result import MemoryEstimate, Remedy

__all__ = ["DataDependentError", "MemPrecError", "MemoryOverflowError", "TraceError"]


class MemPrecError(Exception):
    """Base class of the package's own errors."""


class TraceError(MemPrecError, RuntimeError):
    """A training step could not be traced; the message says why and what to do instead."""


class DataDependentError(TraceError):
    """The step reads a value that only real weights or real data could give.

    Args:
        message: What was read.
        location: ``"file.py:12"`` of the line that read it, or ``None`` where it is unknown.
    """

    def __init__(self, message: str, location: str | None = None) -> None:
        super().__init__(message)
        self.location = location

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.location)


class MemoryOverflowError(MemPrecError, RuntimeError):
    """A run needs more memory than the device offers.

    Args:
        message: Need, capacity, largest part and remedies in words.
        estimate: The estimate on which the verdict rests.
        capacity_bytes: What the device offers, in bytes.
        remedies: Changes that were re-estimated, best first.
    """

    def __init__(
        self,
        message: str,
        estimate: MemoryEstimate | None = None,
        capacity_bytes: int | None = None,
        remedies: Sequence[Remedy] = (),
    ) -> None:
        super().__init__(message)
        self.estimate = estimate
        self.capacity_bytes = capacity_bytes
        self.remedies = tuple(remedies)

    def __reduce__(self) -> tuple[Any, ...]:
        # Spawned ranks send the error home by pickle; the default would drop all but the message.
        return type(self), (self.args[0], self.estimate, self.capacity_bytes, self.remedies)
