"""Which of many steps is being worked on, on a terminal."""

from __future__ import annotations

from lightning_memprec._progress import Progress as Line

__all__ = ["Progress"]


class Progress(Line):
    """A line that names the current step and counts them, from two seconds on.

    Args:
        total: How many steps there are.

    Example:
        >>> with Progress(2) as progress:  # no terminal
        ...     progress.step("encoder.layers.0")
    """

    def __init__(self, total: int) -> None:
        super().__init__("quantizing")
        self.total, self.done = total, 0

    def __enter__(self) -> Progress:
        super().__enter__()
        return self

    def step(self, name: str) -> None:
        """Begin the next step.

        Args:
            name: Of a layer, or another short text.
        """
        self.done += 1
        self.say(f"{self.done}/{self.total} {name}")
