"""A batch in words, as an argument of a command."""

from __future__ import annotations

import re
from typing import Any

from lightning_memprec._batch import parse_batch_spec

__all__ = ["read_batch_spec"]

_LEAF = r"\w+\[[\d\s,]*\](?:\s*=\s*-?\d+(?:\.\d+)?)?"


def read_batch_spec(text: str) -> Any:
    """Read ``--batch-spec``.

    Args:
        text: YAML, such as ``"[float32[8, 3, 224, 224], int64[8]]"``.

    Raises:
        ValueError: If it cannot be read.
    """
    import yaml

    try:
        # Shapes hold brackets and commas, which YAML would read as lists: quote them for the user.
        spec = yaml.safe_load(text if re.search("[\"']", text) else re.sub(_LEAF, r'"\g<0>"', text))
    except yaml.YAMLError as error:
        raise ValueError(f"Cannot read `--batch-spec` {text!r} as YAML: {error}") from error
    parse_batch_spec(spec)
    return spec
