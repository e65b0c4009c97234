from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_ranks_see_the_same_scale_and_stop_together(tmp_path):
    script = Path(__file__).with_name("scaler_ddp_run.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, timeout=150, capture_output=True, text=True)
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(found) == {"rank0", "rank1"}, done.stderr
    first, second = found["rank0"], found["rank1"]
    assert first["points"] == second["points"]
    # Two good steps, then 2^-18, 2^-19 and 2^-20 are skipped. A fused optimizer's flags are read a batch later.
    assert first["steps"] == second["steps"] == 6
    assert ["collapse", 4] in first["events"]
    assert ["collapse", 4] in second["events"]
    # Rank 1 alone has seen its losses, and says so itself.
    assert ["non_finite_loss", 2] in second["events"]
    assert "non_finite_loss" not in dict(first["events"])
    assert any(text.startswith("[rank 1]") and "at batch 2" in text for text in second["printed"])
    assert all(text.startswith("[rank 1]") for text in second["printed"])
    # A sharded norm is that of all parts: 3 and 4; nothing and 4.
    assert first["norms"] == second["norms"] == [5.0, 4.0]
