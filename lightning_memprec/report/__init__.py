"""What people read: verdicts, plain text, colour and files."""

from __future__ import annotations

from lightning_memprec.report.text import format_estimate
from lightning_memprec.report.verdict import Verdict, judge

__all__ = ["Verdict", "format_estimate", "judge"]
