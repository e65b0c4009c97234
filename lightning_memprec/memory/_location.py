"""Find the line of user code that a trace stopped at."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

__all__ = ["error_location", "user_location"]

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_SITE = tuple(
    {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], sysconfig.get_paths()["stdlib"]}
)


def _is_installed(file: str) -> bool:
    # Packages lie outside the environment's own folder too: in the system's, the user's, or on PYTHONPATH.
    return file.startswith(_SITE) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def user_location() -> str | None:
    """Return ``"file.py:12"`` of the innermost frame that is the user's own.

    Frames of this package, the standard library and installed packages are passed over; if all frames are of
    those kinds, the innermost one outside torch and this package is named.
    """
    frame: FrameType | None = sys._getframe(1)
    installed: str | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and not name.startswith("<"):
            where = f"{name}:{frame.f_lineno}"
            if not _is_installed(name):
                return where
            if installed is None and "/torch/" not in name.replace("\\", "/"):
                installed = where
        frame = frame.f_back
    return installed


def error_location(error: BaseException) -> str | None:
    """Return ``"file.py:12"`` of the user's innermost line in an error's traceback."""
    found: str | None = None
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((_PACKAGE, "<")) and not _is_installed(name):
            found = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
