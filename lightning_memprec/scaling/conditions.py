"""Conditions that switch on at one threshold and off at another, so that nothing is told twice."""

from __future__ import annotations

from typing import Any

__all__ = ["Conditions"]


class Conditions:
    """The conditions of a run that hold at the moment.

    Example:
        >>> hot = Conditions()
        >>> [hot.switch("hot", on=value > 30, off=value < 20) for value in (25, 31, 25, 31, 19, 31)]
        [False, True, False, False, False, True]
    """

    def __init__(self) -> None:
        self._active: set[str] = set()

    def switch(self, name: str, *, on: bool, off: bool) -> bool:
        """Update a condition and tell whether it has just begun.

        Args:
            name: The condition.
            on: Whether its threshold is passed.
            off: Whether it has ended; between the two it stays as it was.
        """
        if name in self._active:
            if off and not on:
                self._active.discard(name)
            return False
        if on:
            self._active.add(name)
        return on

    def once(self, name: str) -> bool:
        """Tell whether this is the first call for ``name``."""
        return self.switch(name, on=True, off=False)

    def holds(self, name: str) -> bool:
        """Tell whether a condition holds."""
        return name in self._active

    def state_dict(self) -> list[str]:
        """Return the names of the conditions that hold."""
        return sorted(self._active)

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._active = {str(name) for name in state}
