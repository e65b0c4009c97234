from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memprec.callbacks._ranks import Finding, gather, merge

HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_batch_start")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("one", "refused 1024 overflow 0"),
        ("fault", "trained undetermined 2"),
    ],
)
def test_two_processes_decide_alike(case, expected, tmp_path):
    script = Path(__file__).with_name("ddp_run.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", str(script), case, str(tmp_path)]
    done = subprocess.run(command, env=environment, timeout=150, capture_output=True, text=True)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"rank0": expected, "rank1": expected}, done.stderr


def test_rank_with_least_headroom_decides():
    findings = [Finding(10, 100), Finding(30, 90), Finding(10, None)]
    assert merge(findings, HOOKS) == Finding(30, 90)


def test_problem_of_one_rank_is_a_problem_of_all():
    findings = [
        Finding(10, 100),
        Finding(problem="a", next_hook="on_fit_start"),
        Finding(problem="b", next_hook="on_train_batch_start"),
    ]
    assert merge(findings, HOOKS).next_hook == "on_train_batch_start"
    assert merge([*findings, Finding(problem="c")], HOOKS).next_hook is None


def test_single_process_gathers_itself():
    assert gather("x") == ["x"]
