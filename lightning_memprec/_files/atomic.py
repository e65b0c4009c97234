"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = ["replacing", "write_json"]


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``path`` at the end, whole, or is removed on an error.

    Args:
        path: The file to make or to replace; its folder is made. A link is replaced, not what it points to.

    Yields:
        An open binary file beside it.

    Raises:
        OSError: If the folder cannot be written, or is full.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "new", "file.txt")
        ...     with replacing(path) as file:
        ...         _ = file.write(b"whole")
        ...     path.read_text()
        'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any], default: Callable[[Any], Any] | None = str) -> None:
    """Write a JSON file, whole or not at all.

    Args:
        path: The file.
        content: What to write.
        default: Turns values that JSON does not know into some that it does; ``None`` raises a ``TypeError``.
    """
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2, default=default) + "\n").encode())
