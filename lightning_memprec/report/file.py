"""Reports as files: written whole or not at all, and read with every value checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memprec._files.atomic import replacing, write_json
from lightning_memprec._plain import read_json, read_plain
from lightning_memprec.memory.result import MemoryEstimate, Remedy
from lightning_memprec.report.html import format_html
from lightning_memprec.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "PAGE_ENDINGS",
    "Report",
    "read_report",
    "report_as_dict",
    "save_report",
    "write_report",
    "write_text",
]

VERSION = 1
PAGE_ENDINGS = (".html", ".htm")
# A report has some hundred KiB; no model makes one a hundred times as large.
_MOST_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class Report:
    """What a report file holds.

    Args:
        estimate: What the run needs; ``None`` if it could not be estimated.
        verdict: Whether it fits; ``None`` if the file holds an estimate alone.
        remedies: Changes that would help.
        notes: Remarks for the reader.
    """

    estimate: MemoryEstimate | None
    verdict: Verdict | None
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()


def report_as_dict(
    estimate: MemoryEstimate | None,
    verdict: Verdict,
    remedies: Sequence[Remedy] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a report as plain values, ready for JSON; sizes are integers in bytes."""
    return {
        "version": VERSION,
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


def write_text(path: str | Path, text: str) -> None:
    """Write text, whole or not at all; what UTF-8 does not know is written as an escape sequence.

    Args:
        path: File to write; its folder is made if it is missing.
        text: Its content.

    Raises:
        OSError: If the folder cannot be written.
    """
    with replacing(Path(path)) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def save_report(
    path: str | Path,
    estimate: MemoryEstimate | None,
    verdict: Verdict,
    remedies: Sequence[Remedy] = (),
    notes: Sequence[str] = (),
) -> None:
    """Write a report in the form that the file's ending names.

    Args:
        path: ``.html`` or ``.htm``: a page. ``.pickle``: a PyTorch memory snapshot of the predicted run; nothing is
            written where there is no estimate. Any other ending: JSON.
        estimate: What the run needs; ``None`` if it could not be estimated.
        verdict: The verdict.
        remedies: Changes that would help.
        notes: Remarks for the reader.

    Raises:
        OSError: If the folder cannot be written.
        ValueError: If the estimate cannot be written as a snapshot.
    """
    form = Path(path).suffix.lower()
    if form in PAGE_ENDINGS:
        write_text(path, format_html(estimate, verdict, remedies, notes))
    elif form != ".pickle":
        write_report(path, report_as_dict(estimate, verdict, remedies, notes))
    elif estimate is not None:
        estimate.save_snapshot(path)


def read_report(path: str | Path) -> Report:
    """Read a report, or an estimate alone (``MemoryEstimate.to_dict``), from a JSON file.

    Args:
        path: The file; it may come from anywhere.

    Raises:
        ValueError: If the file is too large, is no JSON, has another version, or holds a value that is missing, of
            another type or out of bounds.
        OSError: If it cannot be read.
    """
    path = Path(path)
    values = read_json(path, _MOST_BYTES)
    if isinstance(values, dict) and "schema_version" in values:
        return Report(MemoryEstimate.from_dict(values), None)
    if not isinstance(values, dict) or "verdict" not in values:
        raise ValueError(
            f"{str(path)!r} holds no report. Name a file that `estimate --json` or `MemoryPreflight(report_path=...)` "
            "wrote."
        )
    return _report_from(values)


def _report_from(values: dict[str, Any]) -> Report:
    if type(values.get("version")) is not int or values["version"] != VERSION:
        raise ValueError(
            f"The report has version {str(values.get('version'))[:20]!r}, and this version of lightning-memprec reads "
            f"{VERSION}. Use the version that wrote it, or write it anew."
        )
    estimate = values.get("estimate")
    return Report(
        None if estimate is None else MemoryEstimate.from_dict(estimate),
        read_plain(Verdict, values["verdict"], "verdict"),
        read_plain(tuple[Remedy, ...], values.get("remedies", ()), "remedies"),
        read_plain(tuple[str, ...], values.get("notes", ()), "notes"),
    )
