"""Lost updates against optimizers that really run in half precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprec.master_weights.stagnation import count_lost_updates, count_unchanged, sample

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lr", [1e-5, 1e-3, 1e-1])
def test_lost_updates_are_those_that_a_run_in_half_precision_loses(dtype, lr):
    torch.manual_seed(0)
    weight = torch.randn(2000).to(dtype)  # Values that both runs can start from.
    gradient = torch.randn(2000).to(dtype)
    gradient[::7] = 0
    half, wide = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.double())
    half.grad, wide.grad = gradient, gradient.double()
    for parameter in (half, wide):
        torch.optim.SGD([parameter], lr=lr).step()
    lost, intended = count_lost_updates(weight.double(), wide.detach(), dtype)
    unchanged, with_gradient = count_unchanged(weight, half.detach(), gradient != 0)
    assert int(intended) == int(with_gradient) == int((gradient != 0).sum())
    # SGD adds in FP32 before it rounds, which can turn what lies next to a tie.
    assert abs(int(lost) - int(unchanged)) <= 2


@pytest.mark.parametrize(
    ("dtype", "update", "lost"),
    [
        (torch.bfloat16, 2**-8, True),
        (torch.bfloat16, 2**-8 + 2**-20, False),
        (torch.bfloat16, -(2**-9), True),
        (torch.bfloat16, -(2**-9) - 2**-20, False),
        (torch.float16, 2**-11, True),
        (torch.float16, 2**-11 + 2**-20, False),
    ],
)
def test_half_a_unit_in_the_last_place_is_the_border(dtype, update, lost):
    before = torch.ones(1)
    counts = count_lost_updates(before, before + update, dtype)
    assert [int(count) for count in counts] == [lost, 1]


def test_an_update_of_a_weight_between_two_half_values_is_measured_from_the_rounded_weight():
    before = torch.tensor([1.0 + 2**-8 - 2**-12])  # Rounds down to 1; a small step crosses the border.
    after = before + 2**-10
    assert before.bfloat16() != after.bfloat16()
    assert [int(c) for c in count_lost_updates(before, after, torch.bfloat16)] == [1, 1]


@given(st.integers(0, 300), st.integers(1, 50))
def test_a_sample_is_a_bounded_copy_spread_over_the_tensor(length, limit):
    tensor = torch.arange(length)
    found = sample(tensor, limit)
    assert len(found) <= limit
    assert set(found.tolist()) <= set(tensor.tolist())
    assert length == 0 or found[-1] >= length - 1 - (-(-length // limit) | 1)
    if length <= limit:
        assert torch.equal(found, tensor)
    found.fill_(-1)
    assert (tensor >= 0).all()


def test_a_sample_of_a_matrix_meets_every_column():
    columns = torch.arange(64).expand(1024, 64)
    assert set(sample(columns, 1024).tolist()) == set(range(64))
