from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .runs import NAMESPACES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMESPACES)
def test_one_yaml_holds_every_feature(name, tmp_path):
    script = Path(__file__).with_name("cli_run.py")
    command = [sys.executable, "-W", "ignore", str(script), name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("done")
