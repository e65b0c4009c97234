"""The report as one HTML file that needs nothing else: no network, no library, no second file.

Whatever comes from outside, such as names of modules, is escaped. A content security policy names the only style sheet
and the only script by their hashes, so that nothing else could run even if it were not.
"""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from lightning_memprec.__about__ import __version__
from lightning_memprec.report.content import (
    capacity_rows,
    host_lines,
    largest_batch_sentence,
    peak_sentence,
    remark_lines,
    title,
    verdict_sentence,
)
from lightning_memprec.report.html_sections import (
    modules_section,
    parts_section,
    phases_section,
    remedies_section,
    timeline_section,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_memprec.memory.result import MemoryEstimate, Remedy
    from lightning_memprec.report.verdict import Verdict

__all__ = ["format_html"]

_SIGNS = {"fits": "✓", "tight": "!", "overflow": "✕", "undetermined": "?"}


def format_html(
    estimate: MemoryEstimate | None,
    verdict: Verdict | None = None,
    remedies: Sequence[Remedy] = (),
    notes: Sequence[str] = (),
) -> str:
    """Write an estimate as one self-contained HTML page.

    Args:
        estimate: What the run needs; ``None`` leaves only the verdict and the notes.
        verdict: Whether it fits; ``None`` leaves capacity and verdict out.
        remedies: Changes that would help.
        notes: Remarks to put above the assumptions.

    Returns:
        The page, in English, for light and dark screens and for print.
    """
    style, script = _file("page.css"), _file("page.js")
    heading = title(estimate) if estimate is not None else "Memory preflight"
    if estimate is None:
        sections = [_section("Notes", _list(notes))] if notes else []
    else:
        sections = _sections(estimate, verdict, remedies, notes)
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(heading)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            f"<header>{_header(heading, estimate, verdict)}</header>",
            "<main>",
            *sections,
            "</main>",
            f"<footer>lightning_memprec {escape(__version__)}. Sizes are of one device; 1 GiB is 1024³ bytes.</footer>",
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _file(name: str) -> str:
    return files("lightning_memprec.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _section(heading: str, *content: str) -> str:
    return "\n".join([f"<section><h2>{heading}</h2>", *content, "</section>"])


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _header(heading: str, estimate: MemoryEstimate | None, verdict: Verdict | None) -> str:
    lines = [f"<h1>{escape(heading)}</h1>"]
    if verdict is not None:
        sign = f'<span aria-hidden="true">{_SIGNS[verdict.status]}</span>'
        lines.append(f'<p class="verdict {verdict.status}">{sign}{escape(verdict_sentence(verdict))}</p>')
    if estimate is not None:
        terms = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
            for name, value in capacity_rows(estimate, verdict)
        )
        lines.append(f"<dl>{terms}</dl>")
        lines.append(f"<p>{escape(peak_sentence(estimate))}</p>")
    largest = largest_batch_sentence(verdict) if verdict is not None else ""
    if largest:
        lines.append(f"<p>{escape(largest)}</p>")
    return "\n".join(lines)


def _sections(
    estimate: MemoryEstimate, verdict: Verdict | None, remedies: Sequence[Remedy], notes: Sequence[str]
) -> list[str]:
    capacity = verdict.capacity_bytes if verdict is not None else None
    sections = [_section("What fills the memory", parts_section(estimate, capacity))]
    if remedies:
        sections.append(_section("What would help", remedies_section(remedies)))
    if estimate.timeline:
        sections.append(_section("Over time", timeline_section(estimate, capacity)))
    sections.append(_section("Phases", phases_section(estimate)))
    if any(module.breakdown.total_bytes for module in estimate.by_module):
        sections.append(_section("Modules at the peak", modules_section(estimate)))
    if estimate.host is not None:
        sections.append(_section("Beside the device", _list(host_lines(estimate.host))))
    remarks = remark_lines(estimate, verdict, notes)
    if remarks:
        sections.append(_section("Assumed", _list(remarks)))
    return sections
