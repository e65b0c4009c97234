"""The validation of a run, as its loaders give it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memprec._batch import BatchUnavailableError
from lightning_memprec._validation import plan_validation

TEN = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2)
THREE = DataLoader([torch.zeros(length) for length in (1, 5, 3)], batch_size=1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(2)] * 4)


@pytest.mark.parametrize(
    ("limit", "batches"), [(None, 5), (1.0, 5), (0.5, 2), (3, 3), (99, 5), (1, 1)], ids=str
)
def test_batches_are_counted_as_the_trainer_counts_them(limit, batches):
    (loader,) = plan_validation(TEN, sample_batches=8, limit=limit).loaders
    assert loader.num_batches == batches
    assert loader.batch[0].shape == (2,)


def test_list_of_loaders_is_validated_in_sequence():
    plan = plan_validation([TEN, THREE], sample_batches=8)
    assert [loader.num_batches for loader in plan.loaders] == [5, 3]
    assert plan.loaders[1].batch.shape == (1, 5)


# Lightning 2.6 on torch 2.14.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize(("mode", "parts"), [("sequential", 2), ("max_size", 1)])
def test_combined_loader(mode, parts):
    from lightning.pytorch.utilities import CombinedLoader

    plan = plan_validation(CombinedLoader({"a": TEN, "b": THREE}, mode), sample_batches=8)
    assert len(plan.loaders) == parts
    if mode == "max_size":
        assert set(plan.loaders[0].batch) == {"a", "b"}


def test_stream_is_read_only_on_request_and_has_no_length():
    with pytest.raises(BatchUnavailableError, match="IterableDataset"):
        plan_validation(DataLoader(Stream()), sample_batches=8)
    (loader,) = plan_validation(DataLoader(Stream()), sample_batches=8, streams=True).loaders
    assert loader.num_batches is None
    (loader,) = plan_validation(DataLoader(Stream()), sample_batches=8, streams=True, limit=7).loaders
    assert loader.num_batches == 7


@pytest.mark.parametrize("loaders", [None, [], [None]])
def test_nothing_to_validate(loaders):
    with pytest.raises(BatchUnavailableError, match="no validation loader"):
        plan_validation(loaders, sample_batches=8)
