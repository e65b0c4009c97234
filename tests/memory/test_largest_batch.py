from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.largest_batch import batch_size_of, find_largest_batch, has_room, resized
from lightning_memprec.memory.plan import TrainingPlan


def plan_of(batch, net=None, **options):
    net = net or nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    return TrainingPlan(
        module=net, batch=batch, loss=lambda module, b: module(b).sum(), device="cpu",
        optimizer=torch.optim.SGD, **options,
    )  # fmt: skip


def need_of(plan, size):
    return estimate_plan(replace(plan, batch=torch.empty(size, 256))).minimum_device_bytes


@pytest.mark.parametrize("given", [1501, 2000, 4096])
def test_the_largest_size_is_found_where_the_given_one_is_too_large(given):
    plan = plan_of(torch.randn(given, 256))
    budget = need_of(plan, 1500) + 100
    largest = find_largest_batch(plan, estimate_plan(plan), budget, time_limit_s=60.0)
    assert (largest.size, largest.too_large_size, largest.given_size) == (1500, 1501, given)
    assert largest.is_exact
    assert largest.need_bytes == need_of(plan, 1500) <= budget < need_of(plan, 1501)
    assert largest.traces <= 9


@pytest.mark.parametrize("given", [100, 300, 1000])
def test_a_larger_one_is_approached_in_a_few_traces(given):
    plan = plan_of(torch.randn(given, 256))
    budget = need_of(plan, 1500) + 100
    largest = find_largest_batch(plan, estimate_plan(plan), budget, time_limit_s=60.0)
    assert given < largest.size <= 1500
    assert largest.size > 1400  # The line through two sizes leads near it.
    assert largest.need_bytes == need_of(plan, largest.size)
    assert largest.traces <= 4


def test_without_time_the_given_batch_is_all_that_is_known():
    plan = plan_of(torch.randn(8, 256))
    largest = find_largest_batch(plan, estimate_plan(plan), 10**9, time_limit_s=0.0)
    assert (largest.size, largest.too_large_size, largest.traces) == (8, None, 1)
    assert not largest.is_exact


@pytest.mark.parametrize("given", [8, 1])
def test_nothing_is_found_where_no_sample_fits(given):
    plan = plan_of(torch.randn(given, 256))
    assert find_largest_batch(plan, estimate_plan(plan), 1000) is None


def test_a_batch_without_a_size_has_no_largest():
    plan = replace(plan_of(torch.tensor(1.0)), loss=lambda module, b: module(b.expand(2, 256)).sum())
    assert find_largest_batch(plan, estimate_plan(plan), 10**9) is None


def test_batch_norm_refuses_one_sample_and_two_are_found():
    net = nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 8))
    plan = plan_of(torch.randn(4096, 256), net)
    budget = need_of(plan, 1500)
    largest = find_largest_batch(plan, estimate_plan(plan), budget, time_limit_s=60.0)
    assert 2 <= largest.size <= 1500
    assert largest.need_bytes <= budget


def test_batches_are_cut_and_repeated_with_the_values_that_may_steer_a_step():
    batch = {"x": torch.randn(2, 3), "length": torch.tensor([5, 7]), "table": torch.randn(4)}
    larger = resized(batch, 2, 5)
    assert larger["x"].shape == (5, 3)
    assert larger["x"].is_meta
    assert larger["length"].tolist() == [5, 7, 5, 7, 5]
    assert larger["table"] is batch["table"]
    assert torch.equal(resized(batch, 2, 1)["x"], batch["x"][:1])
    assert batch_size_of(batch) == 2
    assert batch_size_of("text") is None


def test_room_is_a_quarter_of_the_budget():
    assert has_room(75, 100)
    assert not has_room(76, 100)
