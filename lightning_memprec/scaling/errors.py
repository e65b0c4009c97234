"""The error with which a run ends when its loss scale has collapsed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_memprec._errors import MemPrecError

if TYPE_CHECKING:
    from lightning_memprec.scaling.record import Event

__all__ = ["ScalerCollapseError"]


class ScalerCollapseError(MemPrecError, RuntimeError):
    """The loss scale fell so low that gradients can no longer be trusted.

    Args:
        message: What was seen and what to do.
        event: The event that ended the run.
    """

    def __init__(self, message: str, event: Event | None = None) -> None:
        super().__init__(message)
        self.event = event

    def __reduce__(self) -> tuple[Any, ...]:
        # Spawned ranks send the error home by pickle; the default would drop all but the message.
        return type(self), (self.args[0], self.event)
