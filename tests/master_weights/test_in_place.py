from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.master_weights.in_place import masters_in_place
from lightning_memprec.master_weights.store import MasterStore


def connected():
    """A half network whose first layer no optimizer steps, its store, its optimizer and its FP32 values."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    values = [p.detach().clone() for p in network.parameters()]
    store = MasterStore()
    for parameter in network.parameters():
        store.remember(parameter, torch.bfloat16)
    network.to(torch.bfloat16)
    store.attach(network)
    optimizer = torch.optim.SGD(network[1].parameters(), lr=0.1)
    store.connect([optimizer])
    return network, store, optimizer, values


def assert_holds(network, values):
    state = list(network.state_dict().values())
    assert all(torch.equal(saved, value) for saved, value in zip(state, values, strict=True))
    assert all(torch.equal(p, v.bfloat16()) for p, v in zip(network.parameters(), values, strict=True))


def test_all_parameters_are_shown_in_fp32_and_put_back():
    network, store, _, values = connected()
    before = list(network.parameters())
    with masters_in_place(network, store):
        shown = list(network.parameters())
        assert all(torch.equal(p, v) for p, v in zip(shown, values, strict=True))
        assert all(torch.equal(p, v) for p, v in zip(network.state_dict().values(), values, strict=True))
    assert all(p is q for p, q in zip(before, network.parameters(), strict=True))
    assert len(store.pairs) == 2
    assert_holds(network, values)


def add_and_fail(network, store):
    with masters_in_place(network, store):
        for parameter in network.parameters():
            parameter.data.add_(2.0**-20)
        raise KeyError


def test_what_is_written_stays_even_if_the_code_fails():
    network, store, _, values = connected()
    with pytest.raises(KeyError):
        add_and_fail(network, store)
    assert_holds(network, [value + 2.0**-20 for value in values])


def test_a_parameter_added_to_an_optimizer_keeps_its_master():
    network, store, optimizer, values = connected()
    with masters_in_place(network, store):
        network[0].requires_grad_(False)
        network[0].weight.requires_grad_(True)
        optimizer.add_param_group({"params": [network[0].weight]})
    assert [p.requires_grad for p in network[0].parameters()] == [True, False]
    assert optimizer.param_groups[1]["params"] == [store.pairs[network[0].weight].master]
    assert_holds(network, values)


def test_what_was_written_over_half_values_is_shown():
    network, store, _, values = connected()
    with torch.no_grad():
        network[1].weight.fill_(0.5)
    with masters_in_place(network, store):
        assert (network[1].weight == 0.5).all()
    values[2].fill_(0.5)
    assert_holds(network, values)
