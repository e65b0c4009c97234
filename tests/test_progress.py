"""Progress on a real terminal, and silence everywhere else."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
import threading
import time

import pytest

from lightning_memprec._progress import Progress

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")


WIPED = "\r\x1b[K"


@pytest.fixture
def terminal():
    """A pseudo-terminal: what is written to it, and a function that reads up to a text, or what there is."""
    leader, follower = pty.openpty()

    def shown(until=None):
        text, deadline = "", time.monotonic() + (30 if until else 0.1)
        # What was written may take a moment to arrive.
        while not (until and text.endswith(until)) and (left := deadline - time.monotonic()) > 0:
            if select.select([leader], [], [], left)[0]:
                text += os.read(leader, 1 << 16).decode()
        return text

    stream = os.fdopen(follower, "w")
    yield stream, shown
    stream.close()
    os.close(leader)


def test_it_speaks_after_a_while_and_wipes_its_line(terminal):
    stream, shown = terminal
    progress = Progress("tracing", stream=stream, delay_s=0)
    progress.tick()
    assert shown("s") == f"{WIPED}tracing ... 0 s"
    progress.say("looking")
    progress.tick()
    assert shown("s") == f"{WIPED}looking ... 0 s"
    progress.clear()
    assert shown("K") == WIPED


def test_the_thread_speaks_by_itself(terminal):
    stream, shown = terminal
    with Progress("tracing", stream=stream, delay_s=0):
        assert "tracing ... " in shown("s")
    assert shown("K").endswith(WIPED)
    assert not [t for t in threading.enumerate() if t.name == "lightning-memprec progress"]


def test_a_short_wait_shows_nothing(terminal):
    stream, shown = terminal
    with Progress("tracing", stream=stream, delay_s=1000) as progress:
        progress.tick()
    assert shown() == ""


def test_an_error_passes_and_the_line_is_wiped(terminal):
    stream, shown = terminal
    progress = Progress("tracing", stream=stream, delay_s=0)

    def fail():
        with progress:
            progress.tick()
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert shown("s" + WIPED).startswith(f"{WIPED}tracing")


@pytest.mark.parametrize("make", [io.StringIO, lambda: None], ids=["text", "none"])
def test_no_terminal_hears_anything(make, monkeypatch):
    stream = make()
    monkeypatch.setattr(sys, "stderr", stream)
    before = threading.active_count()
    with Progress("tracing", delay_s=0) as progress:
        progress.tick()
        assert threading.active_count() == before
    if isinstance(stream, io.StringIO):
        assert stream.getvalue() == ""


def test_a_terminal_that_goes_away_is_no_error(terminal):
    stream, _ = terminal
    progress = Progress("tracing", stream=stream, delay_s=0)
    saved = os.dup(stream.fileno())
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, stream.fileno())  # Whatever is written now finds no reader.
    progress.tick()
    progress.clear()
    os.dup2(saved, stream.fileno())
    for descriptor in (saved, writer):
        os.close(descriptor)
