"""Time inside a callback's hooks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

__all__ = ["Timed"]


class Timed:
    """Adds up the time inside a callback's hooks, batch by batch.

    Args:
        callback: The callback, whose hooks are wrapped.
        hooks: Their names, ``on_train_batch_start`` among them.
    """

    def __init__(self, callback: Any, hooks: Iterable[str]) -> None:
        self.seconds: list[float] = []
        for name in hooks:
            setattr(callback, name, self._wrap(name, getattr(callback, name)))

    def _wrap(self, name: str, hook: Any) -> Any:
        def timed(*args: Any) -> None:
            if name == "on_train_batch_start":
                self.seconds.append(0.0)
            start = time.thread_time()
            hook(*args)
            self.seconds[-1] += time.thread_time() - start

        return timed
