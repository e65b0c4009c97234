"""Draws the layers that import-linter enforces: ``python docs/draw_layers.py`` writes ``docs/assets/layers.svg``."""

from __future__ import annotations

import ast
import re
from html import escape
from pathlib import Path

__all__ = ["draw", "layers_of"]

_ROOT = Path(__file__).parents[1]
_WIDTH, _ROW, _GAP, _MARGIN, _PER_LINE = 860, 34, 6, 14, 5
_STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #14213d; }
.note { font: 13px system-ui, sans-serif; fill: #4a5568; }
.page { fill: #ffffff; }
.above rect { fill: #e3e8fb; stroke: #5468c4; }
.below rect { fill: #e2f3ec; stroke: #2f855a; }
""".strip()


def layers_of(pyproject: str) -> list[list[str]]:
    """Return the layers of the contract from the highest to the lowest, each a list of names in the package."""
    found = re.search(r"^layers = (\[.*?^\])", pyproject, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError("There is no `layers = [...]` in the text. Give that of pyproject.toml.")
    return [
        [name.strip().removeprefix("lightning_memprec.") for name in layer.split("|")]
        for layer in ast.literal_eval(found[1])
    ]


def draw(layers: list[list[str]]) -> str:
    """Return the layers as an SVG picture, the highest on top; a line holds five boxes at most."""
    seam = next(number for number, layer in enumerate(layers) if "_lightning" in layer)
    parts, y = [], _MARGIN
    for number, layer in enumerate(layers):
        if number in (0, seam + 1):
            words = (
                "know Lightning"
                if number == 0
                else "know nothing of Lightning; each layer imports only those below it"
            )
            parts.append(f'<text class="note" x="{_MARGIN}" y="{y + 14}">{words}</text>')
            y += 24
        boxes = []
        for start in range(0, len(layer), _PER_LINE):
            boxes += _line(layer[start : start + _PER_LINE], y)
            y += _ROW + _GAP
        parts += [f'<g class="{"above" if number <= seam else "below"}">', *boxes, "</g>"]
        y += _GAP
    height = y + _MARGIN - 2 * _GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
    title = "<title>The layers of lightning_memprec</title>"
    page = f'<rect class="page" width="{_WIDTH}" height="{height}"/>'
    return "\n".join([head, title, f"<style>\n{_STYLE}\n</style>", page, *parts, "</svg>"]) + "\n"


def _line(names: list[str], y: int) -> list[str]:
    width = (_WIDTH - 2 * _MARGIN - (len(names) - 1) * _GAP) / len(names)
    parts = []
    for number, name in enumerate(names):
        x = _MARGIN + number * (width + _GAP)
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW}" rx="5"/>')
        parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 22}" text-anchor="middle">{escape(name)}</text>')
    return parts


def main() -> None:
    """Write the picture of this repository's contract."""
    text = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (_ROOT / "docs" / "assets" / "layers.svg").write_text(draw(layers_of(text)), encoding="utf-8")


if __name__ == "__main__":
    main()
