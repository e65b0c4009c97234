"""Speak to the user as Lightning does: through the logger of its namespace, on rank zero.

Python's warnings would drop a text that was shown before in the process, and print a path of ours before it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning_memprec._lightning import namespace_of
from lightning_memprec._text import wrap

if TYPE_CHECKING:
    from lightning_memprec._lightning import Trainer

__all__ = ["say"]


def say(trainer: Trainer, head: str, text: str, *, warns: bool = False, every_rank: bool = False) -> None:
    """Print a head line and below it a text, wrapped and indented.

    Args:
        trainer: The Trainer.
        head: Who speaks, and of what.
        text: One paragraph.
        warns: Whether it is a warning; else it is information.
        every_rank: Whether ranks other than zero speak, too.
    """
    if not (trainer.is_global_zero or every_rank):
        return
    level, name = (logging.WARNING, "warning") if warns else (logging.INFO, "info")
    rank = f"[rank {trainer.global_rank}] " if trainer.global_rank > 0 else ""
    body = "\n".join(wrap(text, "  "))
    logger = logging.getLogger(f"{namespace_of(trainer).__name__}.utilities.rank_zero")
    logger.log(level, "%s", f"{rank}[{name}] {head}\n{body}")
