"""How much a run with master weights takes, counted by the profiler: 50 equal layers, 3.3 million parameters.

Margins: 0.1 bytes a parameter for activations, data and the layer at hand, 4 bytes of which are 0.08.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.master_weights.pair import Pair, merge, merged
from tests.memory.zoo.reference import peak_of

from .memory_run import bytes_per_parameter

LAYERS, WIDTH = 50, 256
MARGIN = 0.1


def taken(*args, **kwargs):
    return bytes_per_parameter(LAYERS, WIDTH, *args, **kwargs)


@pytest.fixture(scope="module", params=[False, True], ids=["loop", "foreach"])
def foreach(request):
    return request.param


@pytest.fixture(scope="module")
def temporaries(foreach):
    """What AdamW itself takes for a moment, from a run in FP32: 4 + 4 + 8 bytes last."""
    return taken({"foreach": foreach})["step"] - 16


def test_the_default(foreach, temporaries):
    phases = taken({"foreach": foreach}, {}, gradient_clip_val=1.0)
    assert phases["backward"] <= 16 + MARGIN
    assert phases["step"] - temporaries == pytest.approx(18, abs=MARGIN)


def test_accumulating(foreach, temporaries):
    phases = taken({"foreach": foreach}, {}, accumulate_grad_batches=2)
    assert 18 <= phases["backward"] <= 18 + 2 * MARGIN  # A layer's gradient is half and FP32 for a moment.
    assert phases["step"] - temporaries == pytest.approx(18, abs=MARGIN)


@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clipped"])
def test_low_memory(foreach, clip):
    phases = taken({"foreach": foreach}, {"low_memory": True}, gradient_clip_val=clip)
    assert phases["forward"] <= 14 + MARGIN
    assert phases["backward"] <= 16 + MARGIN
    assert phases["step"] <= 16.5  # The optimizer's temporaries included.


def test_step_in_backward(foreach):
    phases = taken({"foreach": foreach}, {"step_in_backward": True})
    layer = (2 + 4 + 8) / LAYERS  # Its half gradient, its FP32 one, and AdamW's temporaries.
    assert max(phases.values()) <= 14 + layer + MARGIN


@pytest.mark.parametrize("written", [False, True], ids=["untouched", "written"])
def test_the_look_takes_no_temporary_of_full_size(written):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        master = torch.randn(2**21)
        pair = Pair(nn.Parameter(master.bfloat16()), master)
        if written:
            pair.parameter.data[::1000] = 3.0
        # A piece rounded, its differences, and the half values that `torch.where` brings to FP32.
        assert peak_of(lambda: merge(pair)) <= (2 + 1 + 4) * 2**16
        assert peak_of(lambda: merged(pair.parameter, pair.master)) <= (2 + 1 + 4) * 2**16
    finally:
        torch.set_num_threads(threads)
