"""``lightning-memprec report``: make a page or a text of a report that was written as JSON."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memprec.cli._messages import refuse

if TYPE_CHECKING:
    from lightning_memprec.report.file import Report

__all__ = ["add_parser", "run"]

FORMATS = ("text", "html")
# Endings of what is made elsewhere: a text under such a name would mislead.
_NOT_MADE = {
    ".pickle": "A memory snapshot needs the events of the trace, which a report does not hold. "
    "Use `estimate --snapshot`.",
    ".json": "This makes a page or a text, and no JSON. End the name in .html or .txt, or give `format`.",
}


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "report",
        help="make a page or a text of a report in JSON",
        description="Show a report that `estimate --json` or `MemoryPreflight(report_path=...)` wrote.",
        epilog="exit codes: 0 written; 2 the file is missing, damaged or of another version",
    )
    add = parser.add_argument
    add("file", metavar="FILE.json", help="the report, or an estimate alone")
    add("-o", "--out", metavar="FILE", help="file to write; default: standard output")
    add("--format", choices=FORMATS, help="default: html where --out ends in .html or .htm, else text")


def run(args: argparse.Namespace) -> int:
    """Write the report.

    Args:
        args: Parsed arguments.

    Returns:
        Exit code: 0, or 2 after a message on standard error if the report cannot be read or written.
    """
    from lightning_memprec.report.file import read_report, write_text

    try:
        form = _format(args)
        text = _text(read_report(args.file), form)
        if args.out is not None:
            write_text(args.out, f"{text.rstrip()}\n")
    except (ValueError, OSError) as error:
        return refuse("report", error, args)
    if args.out is None:
        print(text.rstrip().encode("utf-8", "backslashreplace").decode())
    return 0


def _format(args: argparse.Namespace) -> str:
    from lightning_memprec.report.file import PAGE_ENDINGS

    if args.out is not None and Path(args.out).resolve() == Path(args.file).resolve():
        raise ValueError(
            f"{args.out!r} is the report itself, which would be lost. Name another file in `out`."
        )
    if args.format is not None:
        return str(args.format)
    ending = Path(args.out or "").suffix.lower()
    if ending in _NOT_MADE:
        raise ValueError(_NOT_MADE[ending])
    return "html" if ending in PAGE_ENDINGS else "text"


def _text(report: Report, form: str) -> str:
    from lightning_memprec.report.content import verdict_sentence
    from lightning_memprec.report.html import format_html
    from lightning_memprec.report.text import format_estimate

    estimate, verdict = report.estimate, report.verdict
    if form == "html":
        return format_html(estimate, verdict, report.remedies, report.notes)
    if estimate is None:
        return _printable(verdict_sentence(verdict) if verdict is not None else "")
    return _printable(format_estimate(estimate, verdict, report.remedies, report.notes))


def _printable(text: str) -> str:
    """Write control characters out: on a terminal they would act."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
