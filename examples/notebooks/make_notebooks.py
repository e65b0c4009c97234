"""Make the notebooks of this folder from the scripts beside them: ``python examples/notebooks/make_notebooks.py``.

A script is the source. Cells begin with ``# %%``, text cells with ``# %% [markdown]``, the form that Jupytext, VS Code
and PyCharm read too. Outputs are left out: run the cells to see them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["cells", "notebook"]

_MARKER = re.compile(r"^# %%(?P<markdown> \[markdown\])?$", re.MULTILINE)


def cells(script: str) -> list[tuple[str, str]]:
    """Split a script into ``(kind, text)`` pairs; the kind is ``"markdown"`` or ``"code"``.

    Raises:
        ValueError: If there is text before the first marker, which no cell would hold.
    """
    head, *parts = _MARKER.split(script)
    if head.strip():
        raise ValueError(f"The script begins with {head.strip()[:40]!r}. Put `# %%` before it.")
    found = []
    for is_markdown, text in zip(parts[::2], parts[1::2], strict=True):
        if is_markdown:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        found.append(("markdown" if is_markdown else "code", text.strip("\n")))
    return found


def notebook(script: str) -> dict[str, Any]:
    """Return the notebook of a script as plain values, in format 4.5."""
    return {
        "cells": [_cell(number, kind, text) for number, (kind, text) in enumerate(cells(script))],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    cell = {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
        "source": text.splitlines(keepends=True),
    }
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell


def main() -> None:
    """Write a notebook beside each script."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name != Path(__file__).name:
            text = json.dumps(notebook(path.read_text(encoding="utf-8")), indent=1, ensure_ascii=False)
            path.with_suffix(".ipynb").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
