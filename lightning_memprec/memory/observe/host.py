"""Memory of the machine that this process has resident."""

from __future__ import annotations

import os
import sys
from typing import Any

from lightning_memprec._optional import is_installed

__all__ = ["host_rss_bytes"]


def host_rss_bytes() -> int | None:
    """Return the resident set size of this process in bytes.

    Linux tells it in ``/proc/self/statm`` (proc(5), second field, in pages); elsewhere psutil is asked.

    Returns:
        The size, or ``None`` where neither is there.
    """
    if sys.platform == "linux":
        try:
            with open("/proc/self/statm", "rb", buffering=0) as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):  # No /proc in some sandboxes.
            pass
    if not is_installed("psutil"):
        return None
    import psutil  # type: ignore[import-untyped,unused-ignore]

    memory: Any = psutil.Process().memory_info()
    return int(memory.rss)
