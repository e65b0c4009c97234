"""Text for a terminal."""

from __future__ import annotations

import textwrap

__all__ = ["WIDTH", "wrap"]

WIDTH = 88  # Of a line; a terminal of 80 to 100 columns shows it whole.


def wrap(text: str, lead: str = "") -> list[str]:
    """Break a paragraph into lines; those after the first are indented by as much as ``lead`` takes.

    Names and options stay whole: no break inside a word or at a hyphen.

    Example:
        >>> wrap("word " * 20, "  - ")[1]
        '    word word word'
    """
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )
