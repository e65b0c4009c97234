from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memprec import DataDependentError, TraceError
from lightning_memprec.memory.modules import track_modules
from lightning_memprec.memory.trace import Recorder


def meta(*shape, **kwargs):
    return torch.empty(*shape, device="meta", **kwargs)


def live_bytes(recorder):
    return sum(s.size_bytes for s in recorder.events.storages if s.death == -1)


def births(recorder):
    return [s.size_bytes for s in recorder.events.storages]


def test_every_new_storage_is_one_birth_and_views_are_none():
    with Recorder() as recorder:
        x = meta(4, 8)
        views = x.t(), x[1:], x.view(-1), x.detach(), x.expand(2, 4, 8)
        y = x + 1
    assert births(recorder) == [128, 128]
    assert live_bytes(recorder) == 256
    del y, views
    assert live_bytes(recorder) == 128


def test_a_death_is_recorded_when_the_last_reference_goes():
    with Recorder() as recorder:
        x = meta(4)
        y = x * 2
        del x
        z = y * 2
        del y, z
    assert recorder.events.order == [0, 1, ~0, 2, ~1, ~2]


def test_what_backward_needs_lives_until_backward():
    with Recorder() as recorder:
        x = meta(16, requires_grad=True)
        out = x.exp().sum()  # `exp` saves its result for backward
        assert live_bytes(recorder) == 64 + 64 + 4
        out.backward()
        del out
    gc.collect()
    assert live_bytes(recorder) == 128  # x and its gradient


def test_resizing_a_storage_is_a_death_and_a_birth():
    with Recorder() as recorder:
        x = meta(4)
        x.resize_(16)
    assert births(recorder) == [16, 64]
    assert live_bytes(recorder) == 64


def test_out_argument_grows_its_storage():
    with Recorder() as recorder:
        out = meta(0)
        torch.add(meta(8), 1, out=out)
    assert live_bytes(recorder) == 32


@pytest.mark.parametrize("change", ["squeeze_", "unsqueeze_", "t_", "transpose_", "swapdims_", "as_strided_"])
def test_operators_that_reshape_in_place_do_so_every_time(change):
    arguments = {"unsqueeze_": (0,), "transpose_": (0, 1), "swapdims_": (0, 1), "as_strided_": ((3,), (1,))}
    real = torch.zeros(1, 4)
    getattr(real, change)(*arguments.get(change, ()))
    with Recorder():
        for _ in range(3):
            x = meta(1, 4)
            getattr(x, change)(*arguments.get(change, ()))
            assert (x.shape, x.stride()) == (real.shape, real.stride())


def test_a_layout_seen_before_gives_the_same_outputs_as_the_first_time():
    def step():
        x = meta(2, 3, 5, requires_grad=True)
        y = nn.functional.layer_norm(x.transpose(1, 2), (3,))
        y = torch.stack([y, y.clone(memory_format=torch.contiguous_format)]).add_(1).topk(2).values
        y.sum().backward()
        return y.shape, y.stride(), y.dtype, x.grad.stride()

    with Recorder() as recorder:
        first, first_births = step(), births(recorder)
        second = step()
    assert first == second
    assert births(recorder)[len(first_births) :] == first_births


def test_tensors_on_the_host_are_computed_and_not_counted():
    with Recorder() as recorder:
        assert (torch.ones(3) + 1).tolist() == [2.0, 2.0, 2.0]
    assert births(recorder) == []


def test_transient_memory_is_born_and_gone_within_the_operator():
    sizes = {"aten::mm": [1000]}
    with Recorder(lambda func, args, kwargs: sizes.get(func._schema.name, ())) as recorder:
        meta(2, 3) @ meta(3, 4)
    storage = recorder.events.storages[2]
    assert (storage.size_bytes, storage.death) == (1000, storage.birth + 1)


def test_excluded_tensor_is_not_counted():
    with Recorder() as recorder:
        x = meta(4)
        recorder.exclude(copy := meta(4) + 1)
        copy.add_(x)
    excluded = Recorder()
    with excluded:
        y = excluded.exclude(torch.empty_strided((4,), (1,), device="meta"))
        y.view(2, 2)
    assert len(births(excluded)) == 1  # counted when born, before it was left out


def test_sparse_tensors_count_their_indices_and_values():
    with Recorder() as recorder:
        weight = meta(100, 8, requires_grad=True)
        index = meta(5, dtype=torch.long)
        (nn.functional.embedding(index, weight, sparse=True) * 2).sum().backward()
        before = live_bytes(recorder)
        weight.grad = None
    # Five entries of one index of 8 bytes and a row of 8 values.
    assert before - live_bytes(recorder) == 5 * (8 + 8 * 4)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_layouts_that_have_no_parts_are_refused_by_name():
    recorder = Recorder()
    csr = torch.eye(3).to_sparse_csr().to("meta")
    with pytest.raises(TraceError, match=r"sparse_csr cannot be traced\. Use dense or COO"):
        recorder.mark(csr, "buffers")


def test_operator_without_meta_kernel_is_named_with_the_users_line():
    library = torch.library.Library("memprec_test", "DEF")
    library.define("no_kernel(Tensor x) -> Tensor")
    with (
        pytest.raises(TraceError, match=r"memprec_test\.no_kernel.*test_trace\.py:\d+.*register_fake"),
        Recorder(),
    ):
        torch.ops.memprec_test.no_kernel(meta(3))


def test_values_that_are_not_known_are_reported_with_the_users_line():
    with pytest.raises(DataDependentError, match="depends on weights or on data") as caught, Recorder():
        meta(3).sum().item()
    file, line = caught.value.location.rsplit(":", 1)
    assert file == __file__
    assert "sum().item()" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_storages_belong_to_the_module_whose_forward_or_backward_makes_them():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2))).to("meta")
    recorder = Recorder()
    with recorder, track_modules(model, recorder) as names:
        out = model(meta(3, 4)).sum()
        forward = len(recorder.events.storages)
        out.backward()
    made = {(names[s.module], s.size_bytes) for s in recorder.events.storages[1:forward]}
    assert {("0", 96), ("1.0", 96), ("1.1", 24)} <= made
    gradients = {
        names[s.module] for s in recorder.events.storages[forward:] if s.size_bytes in (4 * 8 * 4, 8 * 2 * 4)
    }
    assert gradients == {"0", "1.1"}


def test_hooks_of_the_tracker_are_gone_afterwards():
    from torch.nn.modules import module

    before = len(module._global_forward_hooks), len(module._global_forward_pre_hooks)
    with pytest.raises(ZeroDivisionError), track_modules(nn.Linear(1, 1), Recorder()):
        raise ZeroDivisionError
    assert (len(module._global_forward_hooks), len(module._global_forward_pre_hooks)) == before


def test_a_module_that_raises_and_is_caught_does_not_keep_owning_storages():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails = Fails()

        def forward(self, x):
            try:
                self.fails(x)
            except KeyError:
                pass
            return x + 1

    root, recorder = Root(), Recorder()
    with recorder, track_modules(root, recorder) as names:
        root(meta(3))
    assert names[recorder.events.storages[-1].module] == ""


def test_restart_forgets_births_and_keeps_what_is_known():
    recorder = Recorder()
    with recorder:
        x = torch.full((3,), 7, device="meta")
        recorder.restart()
        assert births(recorder) == []
        assert x.max().item() == 7
    del x  # A death from before the restart.
    assert all(event >= 0 or ~event < len(births(recorder)) for event in recorder.events.order)
