"""Parts that are measured by walking tensors, against sums over tensors that are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.memory.observe.parts import measure_parts

CPU = torch.device("cpu")


def trained(module, optimizer):
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return measure_parts(module, [optimizer], CPU)


def nbytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_each_part_of_a_trained_module():
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.Adam(module.parameters())
    parts = trained(module, optimizer)
    assert parts == {
        "parameters": nbytes(module.parameters()),
        "buffers": nbytes(module.buffers()),
        "gradients": nbytes(p.grad for p in module.parameters()),
        "optimizer states": nbytes(t for state in optimizer.state.values() for t in state.values()),
    }


def test_tied_weights_count_once_and_views_as_their_storage():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    module.register_buffer("part", torch.ones(100)[:10])
    parts = measure_parts(module, [], CPU)
    assert (parts["parameters"], parts["buffers"]) == (36, 400)


def test_masters_count_as_optimizer_states():
    module = nn.Linear(3, 5).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in module.parameters()]
    for master in masters:
        master.grad = torch.ones_like(master)
    parts = measure_parts(module, [torch.optim.SGD(masters)], CPU)
    assert parts == {"parameters": 40, "buffers": 0, "gradients": 80, "optimizer states": 80}


@pytest.mark.parametrize(("granularity", "expected"), [(1, 8), (512, 512), (8, 8)])
def test_storages_are_rounded_up(granularity, expected):
    parts = measure_parts(nn.Linear(1, 2, bias=False), [], CPU, granularity)
    assert parts["parameters"] == expected


def test_what_lies_elsewhere_is_left_out():
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(3, 5, device="meta"))
    assert measure_parts(module, [], CPU)["parameters"] == 80
    assert measure_parts(module, [], torch.device("cuda"))["parameters"] == 0


def test_lists_in_optimizer_states():
    module = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (module(torch.ones(1, 3)) - 2).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state[module.weight]
    kept = nbytes([state["d"], state["prev_flat_grad"], *state["old_dirs"], *state["old_stps"]])
    assert measure_parts(module, [optimizer], CPU)["optimizer states"] >= kept > 0


def test_parameters_without_a_shape_yet_count_nothing():
    module = nn.Sequential(nn.Linear(3, 5), nn.LazyLinear(2))
    assert measure_parts(module, [], CPU)["parameters"] == 80


def test_tensors_made_of_tensors_count_as_these():
    values, offsets = torch.ones(10), torch.tensor([0, 4, 10])
    module = nn.Module()
    module.register_buffer("ragged", torch.nested.nested_tensor_from_jagged(values, offsets))
    assert measure_parts(module, [], CPU)["buffers"] == nbytes([values, offsets])
