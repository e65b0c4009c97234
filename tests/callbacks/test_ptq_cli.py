from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .runs import NAMESPACES


# One process: neither name may get in the way of the other.
@pytest.mark.slow
def test_a_lightning_cli_builds_runs_and_documents_the_callback(tmp_path):
    script = Path(__file__).with_name("ptq_cli_run.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path), *NAMESPACES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == list(NAMESPACES)
