"""Every feature in one run on two ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .runs import exported, same

pytestmark = pytest.mark.slow


def start(part, folder):
    """Run a part on both ranks; return how they ended and what they said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    script = str(Path(__file__).with_name("ddp_run.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, part, str(folder), rank],
            env={**shared, "LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": "2"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(errors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What both ranks wrote before they were killed, and after; one start of each serves all."""
    folder = tmp_path_factory.mktemp("ranks")
    codes, errors = start("first", folder)
    # Gloo may notice that the other rank is gone before this one's turn comes.
    assert -signal.SIGKILL in codes, errors
    assert 0 not in codes
    codes, errors = start("second", folder)
    assert codes == [0, 0], errors
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def resumed(folder):
    return [torch.load(folder / f"resumed{rank}.pt", weights_only=True) for rank in range(2)]


def test_a_watched_run_is_bit_for_bit_the_run_without(ranks):
    for rank in ranks:
        assert same(rank["plain"], rank["watched"])


def test_a_killed_and_resumed_run_is_bit_for_bit_the_uninterrupted_one(ranks, resumed, folder):
    for whole, rest in zip(ranks, resumed, strict=True):
        assert rest["from"] == "step=4"  # A batch of the epoch was trained twice.
        assert same(whole["watched"], rest["resumed"])
        assert same(whole["counted"], rest["counted"])
    assert exported(folder / "watched") == exported(folder / "broken")


def test_both_ranks_come_to_the_same(ranks, folder):
    for key in ("counted", "peak", "path"):
        assert ranks[0][key] == ranks[1][key]
    for key in ("weights", "average", "optimizers", "scaler", "step"):
        assert same(ranks[0]["watched"][key], ranks[1]["watched"][key])
    assert ranks[0]["path"] == str(folder / "watched" / "out" / "int8")


def test_a_step_that_overflows_on_one_rank_is_counted_on_both(ranks):
    for rank in ranks:
        assert rank["counted"]["totals"]["steps"] == {"0": 6}
        assert rank["counted"]["totals"]["skipped"] == {"0": 2}
