"""Who holds tensors, on modules and objects that are known."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

from lightning_memprec.memory.observe.holders import Holding, grown, holdings


class Buffer:
    """A replay buffer of a user's own."""

    def __init__(self):
        self.items = []


def make_net():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def with_graph(net):
    return net(torch.ones(1, 2)).sum()


@pytest.mark.parametrize(
    "container",
    [
        lambda tensors: list(tensors),
        lambda tensors: deque(tensors),
        lambda tensors: dict(enumerate(tensors)),
        lambda tensors: {"train": {"loss": [tuple(tensors)]}},
        lambda tensors: set(tensors),
    ],
    ids=["list", "deque", "dict", "nested", "set"],
)
def test_containers(container):
    net = make_net()
    net[0].kept = container([with_graph(net) for _ in range(3)])
    (held,) = holdings({"Net": net}).items()
    assert held[0] == "Net.0.kept"
    assert (held[1].tensors, held[1].graphs, held[1].size_bytes) == (3, 3, 12)


def test_objects_of_a_users_own_are_looked_into():
    net = make_net()
    net.buffer = Buffer()
    net.buffer.items += [torch.ones(4), torch.ones(4)]
    assert holdings({"Net": net})["Net.buffer"] == Holding(entries=2, tensors=2, graphs=0, size_bytes=32)


def test_weights_and_registered_buffers_are_not_told():
    net = nn.Sequential(nn.BatchNorm1d(4))
    net.again = [net[0].weight, net[0]]
    assert holdings({"Net": net}) == {"Net.again": Holding(entries=2)}


def test_views_of_one_storage_count_once():
    net = make_net()
    whole = torch.ones(100)
    net.rows = [whole[:10], whole[10:]]
    assert holdings({"Net": net})["Net.rows"] == Holding(entries=2, tensors=2, size_bytes=400)


def test_what_is_to_be_skipped_and_what_has_a_name_of_its_own_is_not_reached_through_others():
    net, other = make_net(), Buffer()
    other.items.append(torch.ones(2))
    net.links = [other]
    held = holdings({"Net": net, "Buffer": other})
    assert (held["Net.links"].tensors, held["Buffer.items"].tensors) == (0, 1)
    assert holdings({"Net": net}, skip=[other])["Net.links"].tensors == 0


def test_names_of_a_file_of_code():
    assert holdings({"train": {"LOSSES": [torch.ones(1)], "torch": torch, "Buffer": Buffer, "n": 3}}) == {
        "train.LOSSES": Holding(entries=1, tensors=1, size_bytes=4)
    }


def test_a_ring_of_references_ends():
    net = make_net()
    net.ring = [Buffer()]
    net.ring[0].items = net.ring
    assert holdings({"Net": net})["Net.ring"].entries == 1


def test_the_one_that_has_grown_most_is_named():
    net = make_net()
    net.steady, net.losses, net.names = [torch.ones(1000)] * 2, [], ["a"]
    before = holdings({"Net": net})
    net.names.append("b")
    net.losses += [with_graph(net) for _ in range(2)]
    name, held = grown(before, holdings({"Net": net}))
    assert name == "Net.losses"
    assert held.in_words() == "2 tensors, all with their graphs"


def test_entries_tell_where_no_tensor_does():
    net = make_net()
    net.names = ["a"]
    before = holdings({"Net": net})
    net.names.append("b")
    name, held = grown(before, holdings({"Net": net}))
    assert (name, held.in_words()) == ("Net.names", "2 entries")


def test_nobody_is_named_where_nothing_has_grown():
    net = make_net()
    net.steady = [torch.ones(3)]
    before = holdings({"Net": net})
    assert grown(before, holdings({"Net": net})) is None
    assert grown({}, {}) is None


class Cunning(dict):
    def values(self):
        raise RuntimeError("asked for its values")


class Endless(list):
    def __iter__(self):
        raise RuntimeError("asked for its items")


class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("asked outside of a request")


def test_no_code_of_a_users_containers_is_run():
    root = Buffer()
    root.items = [Cunning(a=torch.ones(2)), Endless([torch.ones(3)]), Proxy()]
    (holding,) = holdings({"root": root}).values()
    assert (holding.entries, holding.tensors, holding.size_bytes) == (5, 2, 20)
