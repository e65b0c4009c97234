"""What is known of the memory of one run: readings over steps, events, and the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lightning_memprec._units import format_bytes
from lightning_memprec.memory.observe.comparison import Comparison
from lightning_memprec.memory.observe.event import MemoryEvent, event_from_dict, make_event
from lightning_memprec.memory.observe.reading import Reading

__all__ = ["MemoryRecord"]

# Twice the pixels across a wide figure: nothing visible is lost by thinning.
_MAX_HISTORY = 4096


class MemoryRecord:
    """Collects what is seen of a run, in bounded memory.

    Attributes:
        events: What was told, oldest first.
        history: Readings with their steps; when there are too many, every second one goes. The last is always kept.
        comparison: Predicted against measured; ``None`` until it was made.
    """

    def __init__(self) -> None:
        self.events: list[MemoryEvent] = []
        self.history: list[tuple[int, Reading]] = []
        self.comparison: Comparison | None = None
        self._stride = 1
        self._readings = 0

    def tell(self, kind: str, step: int, figures: Mapping[str, Any]) -> MemoryEvent:
        """Make an event and keep it."""
        event = make_event(kind, step, figures)
        self.events.append(event)
        return event

    def keep(self, step: int, reading: Reading) -> None:
        """Keep a reading."""
        if self._readings % self._stride == 0:
            self.history.append((step, reading))
        else:
            self.history[-1] = (step, reading)
        self._readings += 1
        if len(self.history) > _MAX_HISTORY:
            self.history, self._stride = self.history[::2], 2 * self._stride

    def summary(self) -> str:
        """Put the run so far into words."""
        if not self.history:
            return "No optimizer step was observed."
        last = self.history[-1][1]
        figures = (
            ("peak of live tensors", last.peak_allocated_bytes),
            ("peak reserved by the allocator", last.peak_reserved_bytes),
            ("in use on the device", last.device_used_bytes),
            ("by other processes", last.other_processes_bytes),
            ("resident on the host", last.host_rss_bytes),
        )
        text = ", ".join(f"{name} {format_bytes(size)}" for name, size in figures if size is not None)
        text = f"{text[:1].upper()}{text[1:]}. " if text else ""
        if self.comparison is not None:
            text += f"The predicted peak was off by {self.comparison.error:+.1%}. "
        kinds = dict.fromkeys(event.kind for event in self.events if event.severity == "warning")
        return text + (f"Warnings: {', '.join(kinds)}." if kinds else "Nothing to warn about.")

    def state_dict(self) -> dict[str, Any]:
        """Return the events as plain values."""
        return {"events": [asdict(event) for event in self.events]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: If it is no such state.
            KeyError: If a part is missing.
            TypeError: If a part is of another type.
        """
        self.events = [event_from_dict(values) for values in state["events"]]
