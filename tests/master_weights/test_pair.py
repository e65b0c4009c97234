from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.master_weights.pair import Pair, merge, merged

DTYPES = [torch.bfloat16, torch.float16]
# Several pieces and an uneven end; no piece at all; a scalar.
SHAPES = [(3 * 2**16 + 5,), (517, 391), (3, 0), ()]


@pytest.fixture(autouse=True)
def _one_thread():
    """Keep pieces, which hold so many elements for each thread, as small as they get."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pair_of(shape, dtype, seed=0):
    master = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return Pair(nn.Parameter(master.to(dtype)), master)


def expected(pair, before):
    """Merge element by element, in the plainest way."""
    half = pair.parameter.detach()
    same = before.to(half.dtype).view(torch.int16) == half.view(torch.int16)
    return torch.where(same, before, half.float())


def bits(tensor):
    return tensor.detach().contiguous().view(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_changes_where_nothing_was_written(shape, dtype):
    pair = pair_of(shape, dtype)
    before = pair.master.detach().clone()
    assert merged(pair.parameter, pair.master).data_ptr() == pair.master.data_ptr()
    merge(pair)
    assert torch.equal(pair.master, before)
    assert not pair.is_moved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("position", [0, 2**16 - 1, 2**16, 100_003, -1])
def test_one_written_value_is_taken_and_no_other(shape, dtype, position):
    pair = pair_of(shape, dtype)
    before = pair.master.detach().clone()
    pair.parameter.data.view(-1)[position] = 7.0
    wanted = expected(pair, before)
    assert torch.equal(merged(pair.parameter, pair.master), wanted)
    merge(pair)
    assert torch.equal(pair.master, wanted)
    assert pair.master.view(-1)[position] == 7.0
    assert (pair.master != before).sum() == 1
    assert not pair.is_moved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_of_another_sign_nans_and_infinities_are_writes(dtype):
    pair = pair_of((70_000,), dtype)
    with torch.no_grad():
        pair.master[:2] = 0.0
        pair.parameter[:2] = 0.0
        pair.version = pair.master._version
    before = pair.master.detach().clone()
    pair.parameter.data[1], pair.parameter.data[2], pair.parameter.data[-1] = -0.0, torch.nan, torch.inf
    merge(pair)
    assert torch.equal(bits(pair.master), bits(expected(pair, before)))
    merge(pair)  # A NaN that is there on both sides is no write.
    assert pair.master[3] == before[3]


@pytest.mark.parametrize(
    "strided",
    [
        lambda t: t.view(8, 4, 3, 4).to(memory_format=torch.channels_last),
        lambda t: t.view(24, 16).t(),
        lambda t: t.view(24, 16)[:, ::2],
    ],
    ids=["channels_last", "transposed", "gaps"],
)
def test_tensors_that_are_not_contiguous(strided):
    master = strided(torch.randn(384, generator=torch.Generator().manual_seed(0)))
    pair = Pair(nn.Parameter(strided(torch.zeros(384)).bfloat16().copy_(master)), master)
    before = pair.master.detach().clone()
    merge(pair)
    assert torch.equal(pair.master, before)
    pair.parameter.data[3, 2] = 5.0
    merge(pair)
    assert torch.equal(pair.master, expected(pair, before))


def test_a_parameter_within_a_larger_buffer():
    """As sharded and flattened parameters are: its start does not line up with whole words."""
    buffer = torch.zeros(4099, dtype=torch.bfloat16)
    master = torch.randn(4096)
    pair = Pair(nn.Parameter(buffer[3:].copy_(master)), master)
    before = pair.master.detach().clone()
    buffer[7] = 9.0
    merge(pair)
    assert torch.equal(pair.master, expected(pair, before))
    assert pair.master[4] == 9.0


def test_a_master_that_was_moved_wins():
    pair = pair_of((10,), torch.bfloat16)
    pair.parameter.data[0] = 7.0
    with torch.no_grad():
        pair.master.add_(1.0)
    merge(pair)
    assert torch.equal(pair.parameter, pair.master.bfloat16())
    assert pair.master[0] != 7.0
