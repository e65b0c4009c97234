from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import lightning_memprec as lm


def round_trips(error):
    return [pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)]


def test_every_error_is_of_the_family_and_of_a_builtin():
    for error in (lm.TraceError, lm.DataDependentError, lm.MemoryOverflowError):
        assert issubclass(error, lm.MemPrecError)
        assert issubclass(error, RuntimeError)


def test_an_overflow_goes_home_with_all_it_carries():
    estimate = lm.estimate_memory(nn.Linear(2, 2), torch.ones(1, 2), device="cpu")
    remedy = lm.Remedy("micro_batch", "a smaller batch", "batch_size=1", 10, 5, True)
    error = lm.MemoryOverflowError("too much", estimate, 7, [remedy])
    for other in round_trips(error):
        assert str(other) == "too much"
        assert (other.capacity_bytes, other.remedies) == (7, (remedy,))
        assert other.estimate == estimate


@pytest.mark.parametrize("error", [lm.MemPrecError("a"), lm.TraceError("b"), lm.MemoryOverflowError("c")])
def test_errors_with_a_message_alone_survive_pickling(error):
    for other in round_trips(error):
        assert type(other) is type(error)
        assert other.args == error.args


def steered_by_its_value(model, batch):
    loss = model(batch).sum()
    return loss if loss.item() > 0 else -loss


def test_a_data_dependent_error_keeps_its_location():
    with pytest.raises(lm.DataDependentError) as caught:
        lm.estimate_memory(nn.Linear(2, 2), torch.ones(1, 2), loss=steered_by_its_value, device="cpu")
    for other in round_trips(caught.value):
        assert other.location == caught.value.location
        assert str(other) == str(caught.value)
