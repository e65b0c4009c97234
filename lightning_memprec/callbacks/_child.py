"""Run the analysis in a forked child, so that whatever the user's code does there cannot reach the run.

A trace runs `setup`, `training_step` and the dataset's code one time more. Caches outside the module, counters on
classes, open files and teachers in global variables would keep what it left in them; a `sys.exit()` or an endless
loop would end the run. A forked child starts with everything the process holds and takes all changes with it.
Data loaders fork their workers from training processes in the same way.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from lightning_memprec._errors import TraceError
from lightning_memprec._forks import autograd_runs
from lightning_memprec._progress import Progress
from lightning_memprec._user_state import unchanged_globals

__all__ = ["isolated"]

T = TypeVar("T")

# A trace takes seconds; what takes longer than this hangs.
_TIME_LIMIT_S = 300.0
_TICK_S = 0.5  # Between two words to whoever waits.
# What a child answers in which autograd refuses to work, because the parent's has started its threads: it does so in
# the first backward pass of a process that can see an accelerator, or that compiled a model.
_NO_AUTOGRAD = "no autograd after a fork"


def isolated(
    function: Callable[[], T], *, time_limit_s: float = _TIME_LIMIT_S, progress: Progress | None = None
) -> T:
    """Call a function in a forked child and return what it returned.

    Elsewhere than on Linux, or where autograd cannot run after a fork, it is called here, and what it changes in the
    user's globals and classes is put back.

    Args:
        function: What to call; its result must pickle. What it prints is dropped.
        time_limit_s: Seconds after which the child is ended.
        progress: Told while the child is waited for, whose own streams lead nowhere.

    Returns:
        The function's result.

    Raises:
        Exception: What the function raised. What does not pickle, and ``SystemExit`` and the like, become a
            :class:`TraceError` that names it.
        TraceError: If the child took too long or died.
    """
    if sys.platform != "linux":  # Windows cannot fork; system libraries of macOS do not survive it.
        return _call_here(function, progress)
    try:
        succeeded, value = _call_in_child(function, time_limit_s, progress)
    except OSError:  # No process or pipe to be had.
        return _call_here(function, progress)
    if not succeeded and value == _NO_AUTOGRAD:
        return _call_here(function, progress)
    if not succeeded:
        raise value
    return value  # type: ignore[no-any-return]


def _call_here(function: Callable[[], T], progress: Progress | None = None) -> T:
    try:
        with unchanged_globals(), progress or nullcontext():
            return function()
    except SystemExit as error:
        raise _told(error) from error


def _call_in_child(
    function: Callable[[], Any], time_limit_s: float, progress: Progress | None = None
) -> tuple[bool, Any]:
    reader, writer = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads. The child runs on this one alone.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        _run_as_child(function, writer)
    os.close(writer)
    try:
        payload = _read_all(reader, time.monotonic() + time_limit_s, progress)
    finally:
        if progress is not None:
            progress.clear()
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if payload is None:
        return False, TraceError(
            f"the step ran for more than {time_limit_s:g} seconds. Give a smaller batch."
        )
    if not payload:
        return False, TraceError("the process that traced the step died. It may have run out of host memory.")
    return pickle.loads(payload)  # type: ignore[no-any-return]


def _read_all(reader: int, deadline: float, progress: Progress | None = None) -> bytes | None:
    """Read until the other end closes; ``None`` if that takes too long."""
    parts: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([reader], [], [], min(left, _TICK_S))
        if progress is not None:
            progress.tick()
        if not ready:
            continue
        part = os.read(reader, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def _run_as_child(function: Callable[[], Any], writer: int) -> NoReturn:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        _settle_threads()
        result = _outcome(function) if autograd_runs() else pickle.dumps((False, _NO_AUTOGRAD))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(result)
    finally:
        os._exit(0)  # No clean-up of what belongs to the parent.


def _settle_threads() -> None:
    # Thread pools do not survive a fork; the count still decides what CPU kernels allocate.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.get_num_threads = lambda: threads
    if dist.is_available():
        dist.GroupMember.WORLD = (
            None  # The group belongs to the parent: a collective here would wait for ever.
        )


def _outcome(function: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((True, function()))
    except BaseException as error:
        try:
            if not isinstance(error, Exception):
                raise TypeError from error
            payload = pickle.dumps((False, error))
            pickle.loads(payload)
        except Exception:
            return pickle.dumps((False, _told(error)))
        return payload


def _told(error: BaseException) -> TraceError:
    return TraceError(f"it raised {type(error).__name__}: {error}")
