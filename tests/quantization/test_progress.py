"""Steps that are counted and named; that the line is wiped away, and silent elsewhere, its own tests show."""

from __future__ import annotations

import os
import pty
import sys

import pytest
import torch
from torch import nn

from lightning_memprec.quantization import progress as counting
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.progress import Progress


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_the_current_step_is_on_the_terminal(monkeypatch):
    leader, follower = pty.openpty()
    with open(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = Progress(2)
        progress._start -= 60
        progress.step("encoder.0")
        progress.step("encoder.1")
        progress.tick()
        progress.clear()
        shown = os.read(leader, 1000).decode()
    os.close(leader)
    assert shown.startswith("\r\x1b[K2/2 encoder.1 ... 6")


def test_every_layer_that_learns_is_named(monkeypatch):
    said = []
    monkeypatch.setattr(counting.Progress, "say", lambda self, text: said.append(text))
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    quantize_(net, "gptq", calibration=[torch.randn(8, 4)])
    assert said == ["1/2 0", "2/2 2", "1/1 calibration batches measured"]
