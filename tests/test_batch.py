from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_memprec._batch import BatchUnavailableError, first_batch, largest_batch, parse_batch_spec

Pair = namedtuple("Pair", "a b")
DATA = TensorDataset(torch.arange(20.0), torch.arange(20))


class Listed(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        raise AssertionError("`__getitems__` is there")

    def __getitems__(self, indices):
        return [torch.tensor(index) for index in indices]


def loaders():
    seeded = torch.Generator().manual_seed(3)
    yield "plain", DataLoader(DATA, batch_size=4)
    yield "shuffled", DataLoader(DATA, batch_size=4, shuffle=True)
    yield "own generator", DataLoader(DATA, batch_size=4, shuffle=True, generator=seeded)
    yield "unbatched", DataLoader(DATA, batch_size=None)
    yield "short", DataLoader(DATA, batch_size=64)
    yield "getitems", DataLoader(Listed(), batch_size=4, shuffle=True)
    yield "weighted", DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler(torch.ones(20), 20))
    yield (
        "batch sampler",
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, drop_last=True)),
    )
    yield (
        "collated",
        DataLoader(DATA, batch_size=4, collate_fn=lambda samples: {"n": torch.tensor(len(samples))}),
    )


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b)


@pytest.mark.parametrize("name", ["plain", "unbatched", "short", "collated"])
def test_first_batch_is_what_the_loader_yields(name):
    loader = dict(loaders())[name]
    assert equal(first_batch(loader), next(iter(loader)))


def test_shuffled_batch_has_the_samples_of_the_dataset():
    values, labels = first_batch(dict(loaders())["shuffled"])
    assert values.shape == labels.shape == (4,)
    assert torch.equal(values, labels.float())


@pytest.mark.parametrize("loader", [pytest.param(loader, id=name) for name, loader in loaders()])
def test_reading_changes_nothing_that_comes_later(loader):
    state = torch.get_rng_state()
    own = loader.generator.get_state() if loader.generator is not None else None
    plain = list(loader)
    torch.set_rng_state(state)
    if own is not None:
        loader.generator.set_state(own)
    first_batch(loader)
    assert equal(list(loader), plain)


def test_no_worker_is_started():
    loader = DataLoader(DATA, batch_size=4, num_workers=2, persistent_workers=True)
    first_batch(loader)
    assert loader._iterator is None


@pytest.mark.parametrize(
    "tree",
    [
        lambda loader: {"a": loader, "b": loader},
        lambda loader: [loader, loader],
        lambda loader: Pair(loader, loader),
    ],
)
def test_tree_of_loaders_gives_a_tree_of_batches(tree):
    batch = first_batch(tree(DataLoader(DATA, batch_size=4)))
    assert type(batch) is type(tree(None))
    values = batch.values() if isinstance(batch, dict) else batch
    assert all(equal(value, [DATA.tensors[0][:4], DATA.tensors[1][:4]]) for value in values)


# Lightning 2.6 on torch 2.14.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("mode", ["min_size", "sequential"])
def test_combined_loader(mode):
    from lightning.pytorch.utilities import CombinedLoader

    combined = CombinedLoader(
        {"a": DataLoader(DATA, batch_size=4), "b": DataLoader(DATA, batch_size=2)}, mode
    )
    batch = first_batch(combined)
    assert set(batch) == {"a", "b"} if mode == "min_size" else len(batch[0]) == 4


class Stream(IterableDataset):
    opened = 0

    def __iter__(self):
        self.opened += 1
        return iter([torch.tensor(i) for i in range(6)])


class OwnLoader(DataLoader):
    def __iter__(self):
        return super().__iter__()


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Stream(), batch_size=2), "IterableDataset"),
        (OwnLoader(DATA), "OwnLoader"),
        ([iter([1])], "iterator"),
        (DataLoader(DATA, batch_size=2, sampler=iter(range(20))), "read only once"),
        (DataLoader(TensorDataset(torch.empty(0, 3)), batch_size=2), "empty"),
        (None, "no train loader"),
    ],
)
def test_what_may_be_opened_once_is_not_opened(loader, reason):
    with pytest.raises(BatchUnavailableError, match=reason):
        first_batch(loader)


def test_streams_are_read_only_on_request():
    stream = Stream()
    for loader in (DataLoader(stream, batch_size=2), DataLoader(stream, batch_size=None)):
        with pytest.raises(BatchUnavailableError):
            first_batch(loader)
    assert stream.opened == 0
    assert torch.equal(first_batch(DataLoader(stream, batch_size=2), streams=True), torch.tensor([0, 1]))
    assert torch.equal(first_batch(DataLoader(stream, batch_size=None), streams=True), torch.tensor(0))


def test_described_batch():
    batch = parse_batch_spec({"ids": "int64[2, 8]", "pair": ["float32[]", "bfloat16[3] = -1.5"]})
    assert batch["ids"].is_meta
    assert batch["ids"].dtype is torch.int64
    assert batch["ids"].shape == (2, 8)
    assert batch["pair"][0].shape == ()
    assert torch.equal(batch["pair"][1], torch.full((3,), -1.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("leaf", ["float33[2]", "float32", "float32[2x3]", "nn[2]", 3, None, "float32[-1]"])
def test_description_that_cannot_be_read_is_shown(leaf):
    with pytest.raises(ValueError, match="Cannot read") as caught:
        parse_batch_spec({"x": [leaf]})
    assert repr(leaf) in str(caught.value)


def texts(*lengths):
    """A loader of one text a batch."""
    return DataLoader([torch.full((length,), length) for length in lengths], batch_size=1)


@pytest.mark.parametrize(
    ("lengths", "count", "index", "looked_at", "words"),
    [
        ((3, 7, 5), 8, 1, 3, "the largest of the first 3 batches (index 1) of it"),
        ((3, 5, 7), 2, 1, 2, "the largest of the first 2 batches (index 1) of it"),
        ((3, 5, 7), 1, 0, 1, "the first batch of it"),
        ((7, 7, 7), 3, 0, 3, "the first batch of it (of 3, none is larger)"),
    ],
)
def test_largest_batch_is_found_and_named(lengths, count, index, looked_at, words):
    sample = largest_batch(texts(*lengths), count=count)
    assert sample.batch.shape == (1, lengths[index])
    assert (sample.index, sample.looked_at) == (index, looked_at)
    assert sample.describe("it") == words


@pytest.mark.parametrize("loader", [pytest.param(loader, id=name) for name, loader in loaders()])
def test_looking_at_many_batches_changes_nothing_that_comes_later(loader):
    state = torch.get_rng_state()
    own = loader.generator.get_state() if loader.generator is not None else None
    plain = list(loader)
    torch.set_rng_state(state)
    if own is not None:
        loader.generator.set_state(own)
    largest_batch(loader, count=100)
    assert equal(list(loader), plain)


def test_only_as_many_batches_are_read_as_asked_for():
    read = []

    class Watched(torch.utils.data.Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            read.append(index)
            return torch.zeros(1)

    largest_batch(DataLoader(Watched(), batch_size=2), count=3)
    assert read == [0, 1, 2, 3, 4, 5]
    read.clear()
    largest_batch(DataLoader(Watched(), batch_size=2), count=3, time_limit_s=0.0)
    assert read == [0, 1]


def test_loaders_of_a_tree_are_read_side_by_side():
    sample = largest_batch({"a": texts(9, 1, 1, 1), "b": texts(1, 20, 3)}, count=8)
    assert {key: value.numel() for key, value in sample.batch.items()} == {"a": 1, "b": 20}
    assert (sample.index, sample.looked_at) == (1, 3)


def test_stream_gives_its_largest_batch_on_request():
    class Texts(IterableDataset):
        def __iter__(self):
            return (torch.zeros(length) for length in (2, 4, 3))

    assert largest_batch(DataLoader(Texts(), batch_size=None), count=8, streams=True).index == 1
    assert largest_batch(DataLoader(Texts(), batch_size=1), count=8, streams=True).index == 1


def test_elements_inside_objects_count():
    class Graph:
        def __init__(self, nodes):
            self.store = {"x": torch.zeros(nodes, 4)}

    graphs = [Graph(2), Graph(9), Graph(5)]
    loader = DataLoader(graphs, batch_size=None, collate_fn=lambda graph: graph)
    assert largest_batch(loader, count=8).batch is graphs[1]
