"""What follows from the batch is known: shapes and values are compared with a real run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_memprec import DataDependentError
from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.known import KnownValues
from lightning_memprec.memory.trace import Recorder

DEVICES = ["cpu", "cuda"]

X = torch.arange(24.0).reshape(4, 6) - 10
LENGTHS = torch.tensor([3, 1, 2, 3])
MASK = torch.tensor([True, False, True, True])


def pad(x, lengths):
    packed = pack_padded_sequence(
        x[..., None].expand(4, 6, 2), lengths.cpu(), batch_first=True, enforce_sorted=False
    )
    return pad_packed_sequence(packed, batch_first=True)[0]


def in_place_everywhere(x):
    x[0] = 100
    x[:, 1] += 1
    x.clamp_(min=0).masked_fill_(x > 50, -1)
    x.index_add_(0, torch.tensor([1, 1], device=x.device), torch.ones(2, 6, device=x.device))
    x.scatter_(1, x.long().remainder(6), 3.0)
    x[MASK.to(x.device)] = 0
    return x.t()[1:3]


# Each reads values and gives a tensor; the trace has to reach the same shape, and where it is known the same value.
STEPS = {
    "boolean_index": lambda x: x[x > 0],
    "boolean_row_index": lambda x: x[MASK.to(x.device)],
    "boolean_and_integer_index": lambda x: x[MASK.to(x.device), torch.tensor([0, 1, 2], device=x.device)],
    "index_in_the_middle": lambda x: x.reshape(2, 2, 6)[:, torch.tensor([True, False], device=x.device)],
    "nonzero": lambda x: x.clamp(min=0).nonzero(),
    "nonzero_tuple": lambda x: torch.stack(torch.where(x > 3)),
    "argwhere": lambda x: torch.argwhere(x > 3),
    "masked_select": lambda x: x.masked_select(x.long() % 3 == 0),
    "masked_select_broadcast": lambda x: x.masked_select(x[:1] > -8),
    "unique": lambda x: (x.long() % 5).unique(),
    "unique_inverse_counts": lambda x: torch.cat(
        torch.unique(x.long() % 5, return_inverse=True, return_counts=True)[::2]
    ),
    "unique_rows": lambda x: (x.long() % 2).unique(dim=0),
    "unique_consecutive": lambda x: torch.div(x, 7, rounding_mode="floor").flatten().unique_consecutive(),
    "bincount": lambda x: x.clamp(min=0).long().flatten().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(LENGTHS.to(x.device), dim=0),
    "split_by_values": lambda x: x.split([*LENGTHS.tolist()[1:3], 1], dim=0)[1],
    "slice_by_value": lambda x: x[:, : int(x.max()) // 3],
    "loop_to_length": lambda x: torch.stack([x[i] for i in range(int(LENGTHS.to(x.device).max()))]),
    "branch": lambda x: x[1:] if x.sum() > 0 else x[2:],
    "range_of_value": lambda x: torch.arange(int(x.max()), device=x.device),
    "full_of_value": lambda x: torch.full((int(x[-1, -1].item()),), x.min().item(), device=x.device),
    "one_hot": lambda x: nn.functional.one_hot((x.long() % 5).clamp(min=0)),
    "attention_mask": lambda x: (
        torch.arange(6, device=x.device)[None] < LENGTHS.to(x.device)[:, None]
    ).nonzero(),
    "pack_padded_sequence": lambda x: pad(x, LENGTHS),
    "in_place": in_place_everywhere,
    "tolist": lambda x: torch.tensor(x.tolist(), device=x.device)[:2],
    "numpy": lambda x: torch.from_numpy(x.cpu().numpy() * 2).to(x.device),
    "comparison": lambda x: x[:3] if torch.equal(x, x.clone()) else x,
    "allclose": lambda x: x[:3] if torch.allclose(x, x + 1e-9) else x,
    "host_and_back": lambda x: x.cpu().add(1).to(x.device)[x.cpu() > 0],
    "ragged_rows": lambda x: nn.utils.rnn.pad_sequence([x[i, : int(n)] for i, n in enumerate(LENGTHS)]),
    "new_tensor": lambda x: x.new_tensor([1.0, 0.0, 1.0]).nonzero(),
    "cumsum_and_search": lambda x: torch.searchsorted(x.flatten().cumsum(0).cummax(0).values, x[0]).unique(),
    "histc": lambda x: x[: int((x.histc(4).max() - 4).item())],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_shapes_that_follow_from_the_batch_equal_a_real_run(step, device):
    expected = step(X.clone())
    shapes, values = [], []

    def loss(module, batch):
        out = step(batch)
        shapes.append((out.shape, out.dtype))
        # Where rows were packed the trace knows the shape alone.
        values.append(expected.tolist() if step is STEPS["pack_padded_sequence"] else out.tolist())
        return module(torch.ones(1, 1, device=batch.device)).sum() * out.sum()

    before = X.clone()
    estimate_memory(nn.Linear(1, 1), X, loss=loss, device=device, steps=2)
    assert shapes == [(expected.shape, expected.dtype)] * 2
    assert values == [expected.tolist()] * 2
    assert torch.equal(before, X), "the user's batch was written to"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.__setitem__(0, 5),
        lambda x: x.view(-1)[3:].zero_(),
        lambda x: x.t().copy_(torch.ones(6, 4, device=x.device)),
        lambda x: x.resize_(2, 2).fill_(1),
        lambda x: torch.nn.functional.relu_(x),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch._foreach_mul_([x, x[0]], 3.0),
        lambda x: x.uniform_(),
        lambda x: x.index_put_((torch.tensor([0], device=x.device),), torch.tensor(9.0, device=x.device)),
        lambda x: x.detach().cpu().add_(1) if x.is_cuda else x.detach().add_(1),
    ],
)
def test_writes_never_reach_the_users_tensors(write, device):
    batch = {"x": X.clone(), "view": X.clone()[1:]}
    before = {k: v.clone() for k, v in batch.items()}

    def loss(module, batch):
        write(batch["x"])
        batch["view"].zero_()
        return module.weight.sum()

    estimate_memory(nn.Linear(1, 1), batch, loss=loss, device=device)
    assert all(torch.equal(batch[k], before[k]) for k in before)


def test_writes_to_known_buffers_are_seen_by_the_copy_alone():
    seen = []

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.count += 1
            seen.append(self.count.item())
            return (x * self.weight).sum()

    module = Counts()
    estimate_memory(module, torch.ones(3), device="cpu", steps=3)
    assert seen == [1, 2, 3]
    assert module.count.item() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("read", "word"),
    [
        (lambda y: y.item() > 0, "asks for the value"),
        (lambda y: float(y), "asks for the value"),
        (lambda y: int(y > 0), "asks for the value"),
        (lambda y: 1 if y else 2, "asks for the value"),
        (lambda y: y.tolist(), "tolist"),
        (lambda y: y.detach().cpu().numpy(), "numpy"),
        (lambda y: y[None][y[None] > 0], "`index` makes a shape"),
        (lambda y: (y > 0).nonzero(), "`nonzero` makes a shape"),
        (lambda y: y[None].unique(), "_unique2` makes a shape"),
        (lambda y: torch.masked_select(y, y > 0), "`masked_select` makes a shape"),
        (lambda y: torch.equal(y, y.clone()), "`equal` makes a shape"),
        (lambda y: torch.allclose(y, y.clone()), "`allclose` makes a shape"),
    ],
)
def test_values_that_depend_on_weights_are_reported_with_file_and_line(read, word, device):
    with pytest.raises(DataDependentError, match=word) as caught:
        estimate_memory(
            nn.Linear(6, 1),
            X,
            loss=lambda module, batch: [y := module(batch).sum(), read(y)][0],
            device=device,
        )
    assert caught.value.location.startswith(__file__)
    assert caught.value.location in str(caught.value)
    assert "`probe_memory`" in str(caught.value)


def test_meta_batches_have_shapes_and_no_values():
    batch = torch.empty(4, 6, device="meta")
    estimate_memory(nn.Linear(6, 1), batch, device="cpu")
    with pytest.raises(DataDependentError):
        estimate_memory(nn.Linear(6, 1), batch, loss=lambda m, b: m(b[b > 0][:6]).sum(), device="cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_weights_touched_is_unknown_even_in_place(device):
    def loss(module, batch):
        assert batch.sum().item() == X.sum().item()
        batch[0] = module(batch[0])[0].detach()
        assert batch.sum().item()

    with pytest.raises(DataDependentError):
        estimate_memory(nn.Linear(6, 1), X, loss=loss, device=device)


def test_running_statistics_are_unknown_after_training_wrote_them():
    def loss(module, batch):
        out = module(batch)
        assert module.num_batches_tracked.item() == 1
        float(module.running_mean.sum())
        return out.sum()

    norm = nn.BatchNorm1d(6)
    with pytest.raises(DataDependentError):
        estimate_memory(norm, X, loss=loss, device="cpu")
    assert norm.running_mean.abs().sum() == 0


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_known_batch_goes_through_a_normalization_without_weights(device, training):
    norm = nn.BatchNorm1d(6, affine=False).train(training)
    model = nn.ModuleList([norm, nn.Linear(6, 1)])

    def loss(module, batch):
        normalized = module[0](batch)
        if not training:
            assert torch.allclose(normalized, batch, atol=1e-3)
        return module[1](normalized).sum()

    estimate_memory(model, X, loss=loss, device=device)
    assert norm.running_mean.abs().sum() == 0
    assert norm.num_batches_tracked == 0


def test_contents_go_with_their_storage_and_are_bounded():
    known = KnownValues()
    for _ in range(20):
        kept = [torch.empty(1024, 1024, device="meta") for _ in range(4)]
        for tensor in kept:
            known.remember(tensor, torch.zeros(1024, 1024))
        assert known._owned_bytes <= 64 * 1024**2
    del kept, tensor
    assert known._owned_bytes == 0
    assert not known._twins

    large = torch.empty(3 * 1024 * 1024, device="meta")
    known.remember(large, torch.zeros(3 * 1024 * 1024))
    assert known.value(large) is None


def test_every_view_of_a_known_tensor_is_known():
    known = KnownValues()
    real = torch.arange(12.0).reshape(3, 4)
    twin = torch.empty(3, 4, device="meta")
    known.remember(twin, real, borrow=True)
    assert known.value(twin.t()[1:, ::2]).equal(real.t()[1:, ::2])
    known.own(twin)
    known.value(twin).zero_()
    assert real.sum() == 66


def test_large_random_tensors_are_made_without_being_computed():
    with Recorder() as recorder:
        x = torch.rand(64, 1024, 1024, device="meta")
    assert x not in recorder.known
