"""What a comparison of precisions found: figures, table, figure, recommendation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_memprec._optional import require
from lightning_memprec._text import wrap
from lightning_memprec._units import format_bytes

__all__ = ["REFERENCE", "ModeResult", "PrecisionComparison"]

REFERENCE = "32-true"


@dataclass(frozen=True)
class ModeResult:
    """How one precision fared.

    Args:
        precision: Its name.
        losses: Training loss of each step, as the precision itself computes it.
        final_loss: Mean loss over the batches of the run after its last step, computed in FP32.
        final_gap: ``final_loss`` less that of FP32, relative to it; positive is worse.
        mean_gap: Mean training loss less that of FP32, relative to it: the gap between the curves.
        skipped_steps: Attempts that the loss scale rejected; the step was repeated at a lower scale.
        stalled_share: Share of the weight updates that weights of the half dtype would have lost; ``None`` in
            FP32.
        seconds_per_step: Median time of a step on the device that ran it.
        fast: Whether matrix units of the device compute this precision's products; ``False`` for FP32.
        within_tolerance: Whether ``final_gap`` is at most the tolerance.
    """

    precision: str
    losses: tuple[float, ...]
    final_loss: float
    final_gap: float
    mean_gap: float
    skipped_steps: int
    stalled_share: float | None
    seconds_per_step: float
    fast: bool
    within_tolerance: bool


@dataclass(frozen=True)
class PrecisionComparison:
    """The comparison and what follows from it.

    Args:
        results: One entry a precision, FP32 first.
        recommended: The precision that the rule gives.
        rule: The rule, in words and with its figures.
        tolerance: Largest final gap that counts as none, relative to the loss of FP32.
        reference_spread: Largest relative change of FP32's own final loss under another order of the batches
            and another seed.
        steps: Steps of each run.
        ran_on: Device that ran the steps.
        judged_for: Device whose capabilities count.
    """

    results: tuple[ModeResult, ...]
    recommended: str
    rule: str
    tolerance: float
    reference_spread: float
    steps: int
    ran_on: str
    judged_for: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, ready for JSON; figures that are not finite become ``None``."""
        return _json_safe(asdict(self))  # type: ignore[no-any-return]

    def table(self, memory_bytes: Mapping[str, int] | None = None) -> str:
        """Write the comparison as plain text.

        Args:
            memory_bytes: Memory that each precision needs, by name, for a column of its own.

        Returns:
            Lines without a newline at the end.
        """
        head = f"{'precision':<13}{'final loss':>12}{'gap':>10}{'mean gap':>10}{'skips':>7}{'stalled':>9}"
        head += f"{'ms/step':>10}" + (f"{'memory':>13}" if memory_bytes else "")
        lines = [f"{self.steps} steps on {self.ran_on}, judged for {self.judged_for}", "", head]
        for r in self.results:
            stalled = "-" if r.stalled_share is None else f"{r.stalled_share:.1%}"
            line = f"{r.precision:<13}{r.final_loss:>12.6g}{r.final_gap:>+10.3%}{r.mean_gap:>+10.3%}"
            line += f"{r.skipped_steps:>7}{stalled:>9}{r.seconds_per_step * 1e3:>10.2f}"
            if memory_bytes:
                known = memory_bytes.get(r.precision)
                line += f"{'-' if known is None else format_bytes(known):>13}"
            lines.append(line)
        verdict = wrap(f"Recommended: {self.recommended}. {self.rule}")
        return "\n".join([*lines, "", *verdict])

    def __str__(self) -> str:
        return self.table()

    def plot(self, ax: Any = None) -> Any:
        """Draw the training loss of each precision over the steps.

        Args:
            ax: Matplotlib axes to draw on; a new figure is made if ``None``.

        Returns:
            ``(figure, axes)``.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed (extra ``plot``).
        """
        pyplot = require("matplotlib.pyplot", extra="plot", purpose="drawing a comparison")
        if ax is None:
            _, ax = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for r in self.results:
            style = {"color": "black", "linewidth": 2.5} if r.precision == REFERENCE else {"linewidth": 1.2}
            ax.plot(range(1, len(r.losses) + 1), r.losses, label=r.precision, **style)
        ax.set_xlabel("step")
        ax.set_ylabel("training loss")
        ax.legend()
        return ax.figure, ax


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
