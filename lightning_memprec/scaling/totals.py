"""Counts over a whole run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_memprec.scaling.record import StepRecord

__all__ = ["Totals"]


class Totals:
    """Counts over a whole run, which go on after a resume.

    Attributes:
        steps: Optimizer steps by optimizer, skipped ones included.
        skipped: Skipped steps by optimizer.
        growths: How often the scale was seen to rise.
        backoffs: How often it was seen to fall.
        lowest_scale: Lowest scale so far.
        last_scale: Scale that was seen last.
        non_finite_losses: Steps whose loss was not finite.
        largest_norm: Largest finite gradient norm, unscaled and before clipping.
    """

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        self.skipped: dict[int, int] = {}
        self.growths = 0
        self.backoffs = 0
        self.lowest_scale: float | None = None
        self.last_scale: float | None = None
        self.non_finite_losses = 0
        self.largest_norm = 0.0

    def add(self, record: StepRecord) -> None:
        """Count a step."""
        index = record.optimizer
        self.steps[index] = self.steps.get(index, 0) + 1
        self.skipped[index] = self.skipped.get(index, 0) + bool(record.skipped)
        self.non_finite_losses += record.loss is not None and not math.isfinite(record.loss)
        if record.grad_norm is not None and math.isfinite(record.grad_norm):
            self.largest_norm = max(self.largest_norm, record.grad_norm)
        self.see_scale(record.scale)

    def see_scale(self, scale: float | None) -> None:
        """Follow the scale; also called with the scale after the last step."""
        if scale is None:
            return
        if self.last_scale is not None:
            self.growths += scale > self.last_scale
            self.backoffs += scale < self.last_scale
        self.lowest_scale = scale if self.lowest_scale is None else min(scale, self.lowest_scale)
        self.last_scale = scale

    def in_words(self) -> str:
        """Return the counts as one line."""
        steps, skipped = sum(self.steps.values()), sum(self.skipped.values())
        text = f"{steps} optimizer steps"
        if self.last_scale is not None or skipped:  # Nothing skips a step without a scaler.
            text += f", {skipped} skipped ({skipped / max(steps, 1):.1%})"
        if len(self.steps) > 1 and skipped:
            each = ", ".join(f"optimizer {index}: {count}" for index, count in sorted(self.skipped.items()))
            text += f" ({each})"
        if self.last_scale is not None:
            text += (
                f"; loss scale {self.last_scale:g} at the end, {self.lowest_scale:g} at its lowest, "
                f"{self.growths} times grown, {self.backoffs} times reduced"
            )
        if self.largest_norm:
            text += f"; largest measured gradient norm {self.largest_norm:.4g}, overflows left out"
        if self.non_finite_losses:
            text += f"; {self.non_finite_losses} losses were not finite"
        return text

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain values; keys are text, as in JSON."""
        return {
            **vars(self),
            "steps": {str(index): count for index, count in self.steps.items()},
            "skipped": {str(index): count for index, count in self.skipped.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name in ("growths", "backoffs", "non_finite_losses"):
            setattr(self, name, int(state[name]))
        for name in ("lowest_scale", "last_scale"):
            setattr(self, name, None if state[name] is None else float(state[name]))
        self.largest_norm = float(state["largest_norm"])
        self.steps = {int(index): int(count) for index, count in state["steps"].items()}
        self.skipped = {int(index): int(count) for index, count in state["skipped"].items()}
