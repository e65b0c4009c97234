"""Turns the docstrings' reStructuredText into what the site's Markdown knows; an extension of griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Docstrings", "to_markdown"]

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([^`<]+)`")
_MATH = re.compile(r":math:`([^`]+)`")
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)  # Griffe calls this section "Examples".
_CODE = re.compile(r"^Example::$", re.MULTILINE)


def to_markdown(text: str) -> str:
    """Return a docstring in which roles are code and examples are sections that griffe knows.

    Example:
        >>> to_markdown("See :func:`~package.module.function`.")
        'See `function`.'
    """
    text = _ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)
    return _EXAMPLE.sub("Examples:", _CODE.sub("**Example**\n", _MATH.sub(r"`\1`", text)))


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
