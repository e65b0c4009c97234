"""Estimates for the tests of reports: one traced, one written by an enemy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from lightning_memprec import estimate_memory
from lightning_memprec.memory.result import (
    Assumption,
    Breakdown,
    ModuleMemory,
    PhasePeak,
    Remedy,
    TimelinePoint,
)

HOSTILE = (
    "</script><script>document.title='stolen'</script>",
    "<img src=x onerror=\"document.title='stolen'\">",
    "\"'><svg onload=document.title='stolen'>",
    "a&b<b>bold",
    "\x1b[31mred\x00\u202eright to left",
)


def small_estimate(device="T4-16GB"):
    """Trace two AdamW steps of four equal layers."""

    def build():
        return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)])

    return estimate_memory(build, torch.empty(64, 256), optimizer=torch.optim.AdamW, device=device)


def hostile_estimate():
    """Return an estimate in which every text is an attempt to break out."""
    parts = Breakdown(activations_bytes=4096)
    return replace(
        small_estimate(),
        device=HOSTILE[0],
        precision=HOSTILE[1],
        by_module=tuple(ModuleMemory(name, name, parts) for name in HOSTILE),
        phases=tuple(PhasePeak(name, 0, 4096) for name in HOSTILE),
        peak_phase=PhasePeak(HOSTILE[2], 1, 4096),
        timeline=tuple(TimelinePoint(i, name, i, parts) for i, name in enumerate(HOSTILE)),
        assumptions=tuple(Assumption(name, name, name) for name in HOSTILE),
    )


REMEDIES = (
    Remedy("batch", "a smaller batch", "batch_size=1", 2**29, 2**30, True, cost="more steps"),
    Remedy("masters", HOSTILE[0], HOSTILE[1], 2**30, -5, False, basis="modelled", cost=HOSTILE[2]),
)
