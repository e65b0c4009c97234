from __future__ import annotations

import pytest
import torch

from lightning_memprec.scaling.pending import PendingStep
from lightning_memprec.scaling.saved_state import find_scaler_states
from lightning_memprec.scaling.scaler_access import clamp_scale, found_infs, is_unscaled, scale_tensor

STATE = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()


class Foreign:
    """A scaler with torch's public methods and none of its private parts."""

    def __init__(self, scale):
        self.scale_now = scale

    def get_scale(self):
        return self.scale_now

    def update(self, new_scale):
        self.scale_now = new_scale


def stepped(value):
    """Return a scaler and an optimizer between `unscale_` and `step`."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((parameter * value).sum()).backward()
    return scaler, optimizer


@pytest.mark.parametrize(("value", "found"), [(1.0, 0.0), (float("inf"), 1.0)])
def test_torch_scaler(value, found):
    scaler, optimizer = stepped(value)
    assert not is_unscaled(scaler, optimizer)
    assert found_infs(scaler, optimizer) == []
    # Looking makes no entry in the scaler.
    assert not scaler._per_optimizer_states
    scaler.unscale_(optimizer)
    assert is_unscaled(scaler, optimizer)
    assert [tensor.item() for tensor in found_infs(scaler, optimizer)] == [found]
    assert scale_tensor(scaler).item() == 8.0


def test_scaler_without_private_names():
    scaler, optimizer = Foreign(4.0), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert scale_tensor(scaler).item() == 4.0
    assert is_unscaled(scaler, optimizer)
    assert found_infs(scaler, optimizer) == []
    clamp_scale(scaler, 16.0)
    assert scaler.scale_now == 16.0


@pytest.mark.parametrize(("floor", "expected"), [(16.0, 16.0), (2.0, 8.0)])
def test_floor(floor, expected):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    clamp_scale(scaler, floor)  # There is no scale yet.
    scaler.scale(torch.ones(()))
    clamp_scale(scaler, floor)
    assert scaler.get_scale() == expected


@pytest.mark.parametrize(("after", "skipped"), [(8.0, False), (4.0, True), (16.0, False)])
def test_a_falling_scale_tells_a_skip_where_nothing_else_does(after, skipped):
    pending = PendingStep(0, 0, has_hooks=False)
    pending.send(torch.tensor(8.0), [])
    assert pending.is_skipped() is None
    pending.follow_scale(torch.tensor(after))
    assert pending.is_skipped() is skipped
    assert pending.resolve(lambda _: "").skipped is skipped


@pytest.mark.parametrize("key", ["MixedPrecision", "FSDPPrecision", "native_amp_scaling_state", "Any"])
def test_states_are_found_by_their_form(key):
    assert find_scaler_states({"state_dict": {}, "epoch": 3, key: dict(STATE)}) == {key: STATE}


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.0}, {"scale": float("nan")}, {"scale": float("inf")}, {"scale": "8"}, {"scale": True},
        {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"backoff_factor": 0.0}, {"growth_interval": 0},
        {"growth_interval": 1.5}, {"_growth_tracker": -1}, {"scale": 10**400}, {"scale": 1e39},
        {"growth_interval": 2**31}, {"_growth_tracker": 2**70},
    ],
    ids=lambda change: str(change)[:40],
)  # fmt: skip
def test_states_that_no_scaler_can_have_are_passed_over(change):
    assert find_scaler_states({"MixedPrecision": {**STATE, **change}}) == {}


def test_incomplete_states_are_passed_over():
    assert find_scaler_states({"MixedPrecision": {"scale": 8.0}, "Empty": {}, "Text": "scale"}) == {}
