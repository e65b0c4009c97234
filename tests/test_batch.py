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

from lightning_memprec._batch import BatchUnavailableError, first_batch, parse_batch_spec

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
