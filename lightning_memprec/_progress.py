"""One line on a terminal that says what a long analysis is doing; nothing anywhere else."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

__all__ = ["Progress"]

# Whoever waits no longer needs no word.
_DELAY_S = 2.0
_EVERY_S = 0.5
_CLEAR = "\r\x1b[K"


class Progress:
    """Says on standard error what is being done and for how long, from two seconds on, and wipes it away at the end.

    As a context manager it speaks by itself, from a thread that holds no lock of Python's streams. Around a loop of
    your own, call :meth:`tick` now and then, and :meth:`clear` at the end.

    Args:
        text: What is being done.
        stream: Where to write; nothing is written unless it is a terminal. Default: standard error.
        delay_s: Seconds of silence at the beginning.

    Example:
        >>> import io
        >>> with Progress("tracing", stream=io.StringIO()) as progress:  # no terminal
        ...     progress.say("looking for the largest batch")
    """

    def __init__(self, text: str, *, stream: TextIO | None = None, delay_s: float = _DELAY_S) -> None:
        self._text = text
        self._descriptor = _terminal(sys.stderr if stream is None else stream)
        self._start = time.monotonic()
        self._delay_s = delay_s
        self._shown = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Say something else from now on."""
        self._text = text

    def tick(self) -> None:
        """Write the line, if it is time to."""
        elapsed_s = time.monotonic() - self._start
        if self._descriptor is not None and elapsed_s >= self._delay_s:
            self._shown = True
            self._write(f"{_CLEAR}{self._text} ... {elapsed_s:.0f} s")

    def clear(self) -> None:
        """Wipe the line away."""
        if self._shown:
            self._shown = False
            self._write(_CLEAR)

    def __enter__(self) -> Progress:
        if self._descriptor is not None:
            self._thread = threading.Thread(
                target=self._speak, name="lightning-memprec progress", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.clear()

    def _speak(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self.tick()

    def _write(self, text: str) -> None:
        # Not through the stream: a fork in this moment would copy its lock held.
        try:
            if self._descriptor is not None:
                os.write(self._descriptor, text.encode())
        except OSError:
            self._descriptor = None  # The terminal is gone.


def _terminal(stream: TextIO | None) -> int | None:
    """Return the descriptor of a stream that is a terminal, else ``None``."""
    try:
        return stream.fileno() if stream is not None and stream.isatty() else None
    except (OSError, ValueError):  # Closed, or an object that only looks like a file.
        return None
