"""What people read: verdicts, plain text, colour, pages and files."""

from __future__ import annotations

from lightning_memprec.report.file import Report, read_report, save_report
from lightning_memprec.report.html import format_html
from lightning_memprec.report.text import format_estimate
from lightning_memprec.report.verdict import Verdict, judge

__all__ = ["Report", "Verdict", "format_estimate", "format_html", "judge", "read_report", "save_report"]
