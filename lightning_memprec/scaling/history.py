"""Scale, skips and norms over a run, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lightning_memprec.scaling.record import StepRecord

__all__ = ["History", "Point"]

# Twice the pixels across a wide figure: nothing visible is lost by thinning.
_MAX_POINTS = 4096


class Point(NamedTuple):
    """One optimizer step of the history.

    Args:
        step: Optimizer step.
        scale: Loss scale, ``None`` without a scaler.
        skipped: Whether the step was skipped.
        grad_norm: Unscaled gradient norm before clipping, ``None`` if it was not taken.
    """

    step: int
    scale: float | None
    skipped: bool
    grad_norm: float | None


class History:
    """Points of a run. When there are too many, quiet ones are thinned evenly over the whole run.

    Args:
        limit: Largest number of points kept.
    """

    def __init__(self, limit: int = _MAX_POINTS) -> None:
        self._limit = limit
        self._stride = 1
        self.points: list[Point] = []

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        point = Point(record.step, record.scale, bool(record.skipped), record.grad_norm)
        if self._tells(point) or point.step % self._stride == 0:
            self.points.append(point)
        if len(self.points) > self._limit:
            self._thin()

    def _thin(self) -> None:
        self._stride *= 2
        kept = [point for point in self.points if self._tells(point) or point.step % self._stride == 0]
        if len(kept) > self._limit * 3 // 4:
            kept = [point for point in self.points if point.step % self._stride == 0]
        self.points = kept

    @staticmethod
    def _tells(point: Point) -> bool:
        # Skips and sampled norms are rare and are what a reader looks for; quiet steps are alike.
        return point.skipped or point.grad_norm is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the points as plain values."""
        points = [[point.step, point.scale, point.skipped, point.grad_norm] for point in self.points]
        return {"stride": self._stride, "points": points}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._stride = max(1, int(state["stride"]))
        self.points = [
            Point(int(step), _number(scale), bool(skipped), _number(norm))
            for step, scale, skipped, norm in state["points"][-self._limit :]
        ]


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
