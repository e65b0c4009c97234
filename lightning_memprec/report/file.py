"""Reports as files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memprec._files.atomic import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprec.memory.result import MemoryEstimate, Remedy
    from lightning_memprec.report.verdict import Verdict

__all__ = ["report_as_dict", "write_report"]


def report_as_dict(
    estimate: MemoryEstimate | None,
    verdict: Verdict,
    remedies: Sequence[Remedy] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a report as plain values, ready for JSON; sizes are integers in bytes."""
    return {
        "version": 1,
        "verdict": {**asdict(verdict), "headroom_bytes": verdict.headroom_bytes},
        "estimate": None if estimate is None else estimate.to_dict(),
        "remedies": [asdict(remedy) for remedy in remedies],
        "notes": list(notes),
    }


def write_report(path: str | Path, report: dict[str, Any]) -> None:
    """Write a report as JSON, whole or not at all.

    Args:
        path: File to write; its folder is made if it is missing.
        report: What :func:`report_as_dict` returned.

    Raises:
        OSError: If the folder cannot be written.
    """
    write_json(Path(path), report, default=None)
