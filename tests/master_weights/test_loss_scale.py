from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.master_weights.loss_scale import HalfLossScaler


def overflow(scaler, optimizer):
    """Take a step whose gradient is infinite."""
    scaler.scale(torch.zeros(()))
    optimizer.param_groups[0]["params"][0].grad = torch.tensor([float("inf")])
    scaler.step(optimizer)
    scaler.update()


def made():
    return HalfLossScaler("cpu"), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize("scale", [2.0**15, 2.0**16])
def test_the_gradient_of_a_half_loss_is_finite_up_to_2_to_the_15(scale):
    # Autograd casts the scale to the dtype of the loss.
    weight = nn.Parameter(torch.ones((), dtype=torch.float16))
    torch.amp.GradScaler("cpu", init_scale=scale).scale(weight * 1).backward()
    assert weight.grad.isfinite() == (scale == 2.0**15)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 2.0**15), (torch.float32, 2.0**18)], ids=str)
def test_the_scale_grows_as_far_as_the_loss_can_carry(dtype, limit):
    scaler, optimizer = made()
    scaler.set_growth_interval(1)
    for _ in range(3):
        loss = scaler.scale(torch.ones((), dtype=dtype))
        optimizer.param_groups[0]["params"][0].grad = torch.zeros(1)
        scaler.step(optimizer)
        scaler.update()
    assert loss.item() == limit / (1 if dtype == torch.float16 else 2)
    scaler.scale(torch.ones((), dtype=dtype))
    assert scaler.get_scale() == limit


@pytest.mark.parametrize(("dtype", "starts"), [(torch.float16, 2.0**15), (torch.float32, 2.0**18)], ids=str)
def test_a_loaded_scale_starts_as_high_as_the_loss_can_carry(dtype, starts):
    saved, (scaler, _) = torch.amp.GradScaler("cpu", init_scale=2.0**18).state_dict(), made()
    scaler.load_state_dict(saved)
    scaler.scale(torch.ones((), dtype=dtype))
    assert scaler.get_scale() == starts


@pytest.mark.parametrize(("saved", "taken"), [(2.0**18, 2.0**15), (64.0, 64.0), (0.25, 1.0)])
def test_another_scalers_state_is_taken_over_within_the_bounds(saved, taken):
    other, (scaler, _) = torch.amp.GradScaler("cpu", init_scale=saved, growth_interval=7), made()
    scaler.take_over({**other.state_dict(), "_growth_tracker": 3})
    assert scaler.state_dict() == {**other.state_dict(), "scale": taken, "_growth_tracker": 3}


def test_the_scale_stays_at_or_above_1():
    scaler, optimizer = made()
    for _ in range(160):  # torch's scaler reaches 0 from 2 after 151 overflows.
        overflow(scaler, optimizer)
    assert scaler.scale(torch.ones(())) == 1.0
    assert optimizer.param_groups[0]["params"][0] == 0
