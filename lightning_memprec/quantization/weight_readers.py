"""Models that read a layer's weight themselves instead of calling the layer."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

from torch import nn

__all__ = ["read_by_parents"]

_READ = re.compile(r"\bself\.([\w.]+)\.weight\b(?!\.(?:shape|size|device)\b)")


def read_by_parents(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Name the layers whose weight is read in the ``forward`` of a module around them, and say so.

    Vision transformers cast images to ``self.projection.weight.dtype``, which would be int8. This reads source text:
    what is not written as ``self.some.layer.weight`` is not found, and code that knows int8 (as T5's) is trusted.

    Args:
        modules: Modules of a model by name.

    Returns:
        Reasons by the name of the layer.
    """
    reasons = {}
    for name, parent in modules.items():
        for path in _read_in(inspect.getattr_static(type(parent), "forward", None)):
            reasons[f"{name}.{path}" if name else path] = (
                f"`{type(parent).__name__}.forward` reads its weight, which would be int8"
            )
    return reasons


@cache
def _read_in(forward: Any) -> frozenset[str]:
    # PyTorch's own read weights for their fast path, which is left, or are replaced as a whole.
    if getattr(forward, "__module__", "").startswith("torch.nn."):
        return frozenset()
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):  # Made at run time, or compiled.
        return frozenset()
    return frozenset() if "int8" in source else frozenset(_READ.findall(source))
