from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_memprec.memory import _processes
from lightning_memprec.memory._processes import run_tasks
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.planning import PlanAxes, PlanCell, fewest_devices, plan_cells, with_recipe
from lightning_memprec.memory.sequences import resequenced, sequence_length_of

EVERYTHING = 2**60


class Text(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.embed = nn.Embedding(500, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, 500)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).logsumexp(-1).mean()


def plan_of(batch=2, sequence=64, **arguments):
    ids = torch.zeros(batch, sequence, dtype=torch.int64)
    return TrainingPlan(module=Text, batch=ids, optimizer=torch.optim.AdamW, device="cuda", **arguments)


def need(**arguments):
    return estimate_plan(plan_of(**arguments)).minimum_device_bytes


def test_every_cell_is_the_estimate_of_that_very_run():
    axes = PlanAxes(batches=(4, 64), sequences=(64, 256), recipes=("as-is", "bf16-mixed"))
    cells = plan_cells(plan_of(), axes, largest_bytes=EVERYTHING)
    assert len(cells) == 8
    assert {cell.basis for cell in cells} == {"traced"}
    for cell in cells:
        precision = "32-true" if cell.recipe == "as-is" else cell.recipe
        assert cell.need_bytes == need(batch=cell.batch, sequence=cell.sequence, precision=precision)
    assert [cell.batch for cell in cells] == [4, 64] * 4


@pytest.mark.parametrize("processes", [1, 2])
def test_several_devices_share_the_run(processes):
    axes = PlanAxes(device_counts=(1, 2), strategy="ddp")
    one, two = plan_cells(plan_of(), axes, largest_bytes=EVERYTHING, processes=processes)
    assert one.need_bytes == need()
    assert two.need_bytes == need(strategy="ddp", num_devices=2)


def test_checkpointed_blocks_of_a_shared_run_are_traced():
    axes = PlanAxes(recipes=("as-is", "as-is+checkpointing"), device_counts=(2,), strategy="fsdp")
    plan = replace(plan_of(batch=512), module=lambda: Text(width=512))
    plain, checkpointed = plan_cells(plan, axes, largest_bytes=EVERYTHING)
    assert checkpointed.need_bytes < plain.need_bytes


def test_larger_batches_than_one_that_fits_nowhere_are_not_traced():
    largest = need(batch=64) - 1
    cells = plan_cells(plan_of(), PlanAxes(batches=(2, 64, 128)), largest_bytes=largest)
    assert [cell.basis for cell in cells] == ["traced", "traced", "implied"]
    assert cells[2].need_bytes == need(batch=64) < need(batch=128)
    assert [cell.fits(largest) for cell in cells] == [True, False, False]


def test_what_does_not_apply_is_refused_with_the_reason():
    plan = replace(plan_of(), optimizer=torch.optim.Adagrad)
    (cell,) = plan_cells(plan, PlanAxes(recipes=("as-is+8bit",)), largest_bytes=EVERYTHING)
    assert (cell.basis, cell.need_bytes) == ("refused", None)
    assert "Adagrad" in cell.reason
    assert not cell.fits(EVERYTHING)


def test_the_fewest_devices_are_those_that_fit():
    def cell(count, size):
        return PlanCell(batch=1, sequence=None, recipe="as-is", num_devices=count, need_bytes=size)

    cells = [cell(4, 40), cell(1, 100), cell(2, 60)]
    assert fewest_devices(cells, 60) == {("as-is", 1, None): 2}
    assert fewest_devices(cells, 60, safety_margin=0.1) == {("as-is", 1, None): 4}
    assert fewest_devices(cells, 30) == {("as-is", 1, None): None}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"batches": (0,)}, "`batches` must be at least 1 and below 2.63, got 0"),
        ({"recipes": ("32-true+magic",)}, "Unknown option 'magic'.*checkpointing, 8bit, fused, lora"),
        ({"strategy": "fdsp"}, "Unknown strategy 'fdsp'"),
    ],
)
def test_wrong_axes_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        PlanAxes(**arguments)


def test_axes_that_the_batch_does_not_have_are_refused():
    images = replace(plan_of(), batch=torch.empty(2, 3, 8, 8))
    with pytest.raises(ValueError, match="no sequence length to vary"):
        plan_cells(images, PlanAxes(sequences=(64,)), largest_bytes=EVERYTHING)
    with pytest.raises(ValueError, match="no batch size to vary"):
        plan_cells(replace(plan_of(), batch={}), PlanAxes(batches=(64,)), largest_bytes=EVERYTHING)


def test_a_recipe_changes_what_it_names():
    plan = with_recipe(plan_of(), "bf16-mixed+fused")
    assert plan.precision == "bf16-mixed"
    assert plan.adapt_optimizer(torch.optim.AdamW([torch.ones(1)])).param_groups[0]["fused"]


@pytest.mark.parametrize("wanted", [3, 6, 14])
def test_sequences_are_cut_or_repeated(wanted):
    batch = {"ids": torch.arange(12).view(2, 6), "mask": torch.ones(2, 6, 6), "weights": torch.ones(6)}
    assert sequence_length_of(batch) == 6
    changed = resequenced(batch, 6, wanted)
    assert {name: list(tensor.shape) for name, tensor in changed.items()} == {
        "ids": [2, wanted],
        "mask": [2, wanted, wanted],
        "weights": [6],
    }
    assert torch.equal(changed["ids"][:, : min(6, wanted)], batch["ids"][:, : min(6, wanted)])


def test_tasks_run_in_processes_of_their_own_and_in_order(monkeypatch):
    # Another test may have started autograd's threads in this process.
    monkeypatch.setattr(_processes, "autograd_runs", lambda: True)
    results = list(run_tasks([lambda k=k: (k, os.getpid()) for k in range(4)], processes=2))
    assert [k for k, _ in results] == [0, 1, 2, 3]
    assert os.getpid() not in {pid for _, pid in results}
    assert [pid for _, pid in run_tasks([lambda: (0, os.getpid())])] == [os.getpid()]


def test_tasks_run_here_where_autograd_works_in_no_other_process(monkeypatch):
    monkeypatch.setattr(_processes, "autograd_runs", lambda: False)
    assert list(run_tasks([os.getpid] * 2, processes=2)) == [os.getpid()] * 2


def test_an_error_of_a_task_comes_back():
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        list(run_tasks([fail, fail], processes=2))
