"""Run independent traces at the same time, in forked processes, which need not pickle what they work on."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch

from lightning_memprec._forks import autograd_runs

__all__ = ["run_tasks"]

T = TypeVar("T")

_tasks: Sequence[Callable[[], object]] = ()  # Inherited by the processes.


def run_tasks(tasks: Sequence[Callable[[], T]], processes: int | None = None) -> Iterator[T]:
    """Yield the results of tasks, in order.

    Args:
        tasks: What to call; results must pickle.
        processes: How many to run at the same time; ``None`` takes the cores of this process. Elsewhere than on Linux,
            and where autograd does not work after a fork, all run here, one after the other.

    Raises:
        BrokenProcessPool: If a process was ended from outside.
    """
    global _tasks
    if processes is None:
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    processes = min(processes, len(tasks))
    if processes < 2 or sys.platform != "linux":
        yield from (task() for task in tasks)
        return
    _tasks = tasks
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(processes, context, initializer=_settle) as pool:
            if not pool.submit(_works).result():
                yield from (task() for task in tasks)
                return
            yield from pool.map(_run, range(len(tasks)))  # type: ignore[arg-type, misc]
    finally:
        _tasks = ()


def _settle() -> None:
    torch.set_num_threads(1)  # Pools of threads do not survive a fork.


def _works() -> bool:
    return autograd_runs()


def _run(number: int) -> object:
    return _tasks[number]()
