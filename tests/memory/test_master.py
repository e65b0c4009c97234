from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec._errors import TraceError
from lightning_memprec._partial_step import is_separable
from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.master import MasterWeights, _check_separable, cast_to_half
from lightning_memprec.memory.plan import MasterOptions
from lightning_memprec.memory.trace import Recorder
from lightning_memprec.memory.workspaces import cublas_workspace_bytes


def half_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)).to("meta", torch.bfloat16)
    model[1].float()  # A part kept in FP32 needs no master.
    return model


def masters_of(model, recorder, optimizer=torch.optim.Adam):
    made = optimizer(model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    return made, MasterWeights([made], recorder, names, MasterOptions())


def test_half_parameters_get_fp32_masters_and_others_stay():
    model = half_model()
    with Recorder() as recorder:
        optimizer, _ = masters_of(model, recorder)
    parameters = optimizer.param_groups[0]["params"]
    assert [p.dtype for p in parameters] == [torch.float32] * 4
    assert parameters[2] is model[1].weight
    assert parameters[0] is not model[0].weight
    assert [p.shape for p in parameters] == [p.shape for p in model.parameters()]
    masters = [(s.category, s.owner, s.size_bytes) for s in recorder.events.storages]
    assert masters == [("optimizer states", "0.weight", 4 * 32), ("optimizer states", "0.bias", 4 * 8)]


def test_frozen_half_parameters_keep_their_flag():
    model = half_model()
    model[0].bias.requires_grad_(False)
    with Recorder() as recorder:
        optimizer, _ = masters_of(model, recorder)
    assert [p.requires_grad for p in optimizer.param_groups[0]["params"]] == [True, False, True, True]


def test_gradients_move_to_the_masters_and_back_come_the_weights():
    model = half_model()
    with Recorder() as recorder:
        for name, parameter in model.named_parameters():
            recorder.mark(parameter, "parameters", name)
        optimizer, masters = masters_of(model, recorder)
        model[0](torch.empty(2, 4, dtype=torch.bfloat16, device="meta")).sum().backward()
        masters.after_backward()
        master = optimizer.param_groups[0]["params"][0]
        assert (master.grad.dtype, master.grad.shape) == (torch.float32, (8, 4))
        assert model[0].weight.grad is master.grad
        masters.prepare(optimizer)
        optimizer.step()
        assert optimizer.state[master]["exp_avg"].dtype is torch.float32
        births = len(recorder.events.storages)
        masters.write_back(optimizer)
        assert len(recorder.events.storages) == births  # A copy in place makes nothing.
        optimizer.zero_grad()
        masters.before_backward()
    assert model[0].weight.grad is None


def test_states_made_by_a_constructor_go_to_the_masters_in_fp32():
    model = half_model()
    with Recorder() as recorder:
        optimizer, _ = masters_of(model, recorder, torch.optim.Adagrad)
    master = optimizer.param_groups[0]["params"][0]
    assert optimizer.state[master]["sum"].dtype is torch.float32


def test_modules_with_running_statistics_stay_in_fp32():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False))
    cast_to_half(model, torch.bfloat16)
    half, fp32 = torch.bfloat16, torch.float32
    assert [p.dtype for p in model.parameters()] == [half, half, fp32, fp32, half, half]
    assert model[1].running_mean.dtype is fp32


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_optimizers_that_step_in_chunks_are_those_of_the_plugin(kind):
    optimizer = object.__new__(kind)
    if is_separable(optimizer):
        _check_separable(optimizer)
    else:
        with pytest.raises(TraceError, match="every parameter on its own"):
            _check_separable(optimizer)


@pytest.mark.parametrize("precision", ["bf16-master", "16-master"])
def test_masters_cost_what_the_recipe_says(precision):
    # 2 (half) + 4 (gradient) + 12 (master and two moments) bytes a parameter.
    model, batch = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)]), torch.randn(1, 256)
    numel = 8 * 256 * 256
    estimate = estimate_memory(
        model, batch, loss=lambda m, b: m(b).sum(), optimizer=lambda p: torch.optim.Adam(p, fused=True),
        precision=precision, device="cuda",
    )  # fmt: skip
    # cuBLAS' workspaces are there from the first products on, one for the forward and one for the backward thread.
    workspaces = 2 * cublas_workspace_bytes((8, 0))
    peaks = {(p.name, p.step): p.peak_allocated_bytes - workspaces for p in estimate.phases}
    small = 64 * 1024
    largest = 256 * 256
    # What is there when backward ends and the gradients have become FP32 ones, each half one going as its FP32 twin
    # comes; in the second step with two moments.
    assert 0 <= peaks["backward", 0] - (2 + 4 + 4) * numel <= 2 * largest + small
    assert 0 <= peaks["backward", 1] - (2 + 4 + 12) * numel <= 2 * largest + small
    # Comparing a parameter with its master takes 5 bytes for each of its elements, for a moment.
    assert 0 <= peaks["optimizer_step", 1] - (2 + 4 + 12) * numel <= 5 * largest + small
