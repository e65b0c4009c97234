from __future__ import annotations

import ast
import functools
from dataclasses import replace

import pytest
import torch
import yaml
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_memprec.memory.allocator import minimum_capacity
from lightning_memprec.memory.allocator_config import AllocatorConfig
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.plan import TrainingPlan, ValidationLoader, ValidationPlan
from lightning_memprec.memory.remedies import suggest_remedies
from lightning_memprec.memory.remedies.change import need_of, skeleton, together
from lightning_memprec.memory.remedies.checkpointing import checkpointing
from lightning_memprec.memory.remedies.precisions import precisions
from lightning_memprec.memory.remedies.strategies import strategies
from lightning_memprec.memory.sharding.strategies import DDP, resolve_strategy


class Deep(nn.Module):
    """Blocks that can be checkpointed as timm's models can."""

    def __init__(self, width=1024, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
            for _ in range(depth)
        )
        self.checkpointing = False

    def set_grad_checkpointing(self, enable=True):
        self.checkpointing = enable

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x.sum()


def plan_of(module=None, batch=4096, optimizer=torch.optim.AdamW, **arguments):
    return TrainingPlan(
        # Large enough that a saving is more than the rest of a segment; built without storage.
        module=module or Deep,
        batch=torch.empty(batch, 1024, device="meta"),
        optimizer=optimizer,
        device="cuda",
        **arguments,
    )


def remedies_of(plan, capacity_bytes=1, **arguments):
    estimate = estimate_plan(plan)
    return estimate, {r.name: r for r in suggest_remedies(plan, estimate, capacity_bytes, **arguments)}


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        # Where activations make the peak, and where the optimizer's step does.
        (4096, {"micro_batch", "activation_checkpointing", "mixed_precision", "master_weights"}),
        (8, {"fused_optimizer", "eight_bit_optimizer"}),
    ],
)
def test_every_known_remedy_is_tried_and_saves(batch, names):
    estimate, remedies = remedies_of(plan_of(batch=batch))
    assert set(remedies) >= names
    for remedy in remedies.values():
        assert remedy.saving_bytes == estimate.minimum_device_bytes - remedy.need_bytes > 0
        assert remedy.basis == ("modelled" if remedy.name == "expandable_segments" else "traced")
        assert remedy.how
        assert remedy.description


def test_a_remedys_need_is_that_of_the_changed_run():
    plan = plan_of()

    def checkpointed():
        module = Deep()
        module.set_grad_checkpointing()
        return module

    small = replace(plan, batch=plan.batch[:8])
    for changed_plan, name, changed in [
        (plan, "mixed_precision", {"precision": "bf16-mixed"}),
        (plan, "activation_checkpointing", {"module": checkpointed}),
        (plan, "master_weights", {"precision": "bf16-master"}),
        (small, "fused_optimizer", {"optimizer": lambda params: torch.optim.AdamW(params, fused=True)}),
    ]:
        expected = estimate_plan(replace(changed_plan, **changed)).minimum_device_bytes
        assert remedies_of(changed_plan)[1][name].need_bytes == expected


def test_the_largest_micro_batch_that_fits_is_found():
    plan = plan_of(batch=4096, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    need = {
        size: estimate_plan(
            replace(plan, batch=plan.batch[:size], accumulate_grad_batches=2)
        ).minimum_device_bytes
        for size in (2048, 1024)
    }
    _, remedies = remedies_of(plan, capacity_bytes=(need[1024] + need[2048]) // 2)
    remedy = remedies["micro_batch"]
    assert remedy.fits
    assert remedy.need_bytes == need[1024]
    assert remedy.how == "batch_size=1024, Trainer(accumulate_grad_batches=4)"


def test_the_safety_margin_counts():
    plan = plan_of()
    need = estimate_plan(replace(plan, precision="bf16-mixed")).minimum_device_bytes
    assert remedies_of(plan, need)[1]["mixed_precision"].fits
    assert not remedies_of(plan, need, safety_margin=0.1)[1]["mixed_precision"].fits


def test_remedies_are_combined_when_none_is_enough():
    plan = plan_of()
    _, alone = remedies_of(plan)
    best = min(r.need_bytes for r in alone.values() if r.name != "combined")
    combined = alone["combined"]
    assert combined.need_bytes < best
    assert " and " in combined.description
    assert not combined.fits  # One byte of capacity.
    _, enough = remedies_of(plan, combined.need_bytes)
    assert enough["combined"].fits
    _, single = remedies_of(plan, best)
    assert "combined" not in single


def test_what_cannot_apply_is_left_out():
    plan = plan_of(
        nn.Sequential(nn.Linear(1024, 1024)), batch=1, optimizer=torch.optim.RMSprop, precision="bf16-true"
    )
    _, remedies = remedies_of(replace(plan, loss=lambda module, batch: module(batch).sum()))
    assert not {"micro_batch", "activation_checkpointing", "eight_bit_optimizer", "mixed_precision"} & set(
        remedies
    )


def test_remedies_leave_module_and_batch_alone():
    plan = replace(plan_of(Deep(width=64)), batch=torch.randn(4096, 64))
    batch, weights = plan.batch.clone(), [p.clone() for p in plan.module.parameters()]
    remedies_of(plan)
    assert torch.equal(plan.batch, batch)
    assert all(torch.equal(a, b) for a, b in zip(weights, plan.module.parameters(), strict=True))
    assert not plan.module.checkpointing


LARGE = torch.empty(6, 1024, 1024, device="meta")


@pytest.mark.parametrize(
    ("batch", "read"),
    [
        (LARGE, lambda b: b),
        ((LARGE, "text", None), lambda b: b[0]),
        ({"x": LARGE, "weights": torch.ones(3), "labels": torch.ones(6)}, lambda b: b["x"]),
        (lambda: LARGE, lambda b: b),
    ],
)
def test_batches_are_cut_where_they_can_be(batch, read):
    seen = set()

    def loss(module, batch):
        if isinstance(batch, dict):
            assert batch["weights"].shape == (3,)
            assert len(batch["labels"]) == len(batch["x"])
        seen.add(len(read(batch)))
        return module(read(batch))

    _, remedies = remedies_of(replace(plan_of(loss=loss), batch=batch), capacity_bytes=1)
    assert remedies["micro_batch"].how == "batch_size=1, Trainer(accumulate_grad_batches=6)"
    assert seen == {6, 3, 1}


def test_expandable_segments_are_a_replay_of_the_same_trace():
    # Weights of 6.5 MiB fill segments of 20 MiB badly.
    plan = plan_of(lambda: nn.Sequential(*[nn.Linear(1300, 1300) for _ in range(8)]))
    plan = replace(plan, batch=torch.empty(64, 1300, device="meta"))
    estimate, remedies = remedies_of(plan)
    config = AllocatorConfig(expandable_segments=True)
    assert remedies["expandable_segments"].need_bytes == minimum_capacity(estimate.events, config)
    assert "expandable_segments:True" in remedies["expandable_segments"].how


@pytest.mark.parametrize(("device", "half"), [("T4", "16"), ("A100-40GB", "bf16")])
def test_half_precision_is_one_that_the_device_has(device, half):
    _, remedies = remedies_of(replace(plan_of(), device=device))
    assert f'"{half}-mixed"' in remedies["mixed_precision"].how


def test_batch_norm_is_named_as_a_cost_of_smaller_batches():
    module = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024))
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    _, remedies = remedies_of(plan_of(module, optimizer=sgd, loss=lambda module, batch: module(batch).sum()))
    assert "batch norm" in remedies["micro_batch"].cost


def test_the_plugin_is_named_as_it_is_written():
    _, remedies = remedies_of(plan_of())
    assert 'plugins=[MasterWeightPrecision("bf16-master")]' in remedies["master_weights"].how


def test_steps_in_chunks_are_offered_where_they_are_what_fits():
    # The optimizer's step is the peak: 18 bytes a parameter, or about 16 in chunks.
    plan = plan_of(batch=8, optimizer=lambda params: torch.optim.AdamW(params, foreach=False))
    plan = replace(plan, precision="bf16-master")
    whole = estimate_plan(plan)
    remedies = {r.name: r for r in suggest_remedies(plan, whole, int(0.95 * whole.minimum_device_bytes))}
    remedy = remedies["master_weights_low_memory"]
    assert remedy.fits
    assert 'MasterWeightPrecision("bf16-master", low_memory=True)' in remedy.how
    accumulating = replace(plan, accumulate_grad_batches=2)
    names = {r.name for r in suggest_remedies(accumulating, estimate_plan(accumulating), 1)}
    assert "master_weights_low_memory" not in names  # The plugin refuses the two together.


def test_a_smaller_validation_batch_is_offered_where_validation_is_the_peak():
    large = torch.empty(16384, 1024, device="meta")
    validation = ValidationPlan(loaders=(ValidationLoader(large, 3), ValidationLoader(large[:8], 1)))
    plan = plan_of(batch=64, optimizer=torch.optim.SGD)
    estimate = estimate_plan(replace(plan, validation=validation))
    assert estimate.peak_phase.name == "validation"
    budget = (estimate.minimum_device_bytes + estimate_plan(plan).minimum_device_bytes) // 2
    remedy = suggest_remedies(replace(plan, validation=validation), estimate, budget)[0]
    assert (remedy.name, remedy.fits, remedy.basis) == ("validation_batch", True, "traced")
    size = int(remedy.description.rpartition(" ")[2])
    assert remedy.how == f"batch_size={size} in `val_dataloader`"

    def need(size):
        loaders = (ValidationLoader(torch.empty(size, 1024, device="meta"), 3 * 16384 // size),)
        return estimate_plan(replace(plan, validation=ValidationPlan(loaders=loaders))).minimum_device_bytes

    assert need(size) <= budget < need(2 * size)


def test_validation_is_left_alone_where_training_is_the_peak():
    validation = ValidationPlan(loaders=(ValidationLoader(torch.empty(8, 1024, device="meta"), 3),))
    _, remedies = remedies_of(plan_of(validation=validation))
    assert "validation_batch" not in remedies


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """A model that offers no switch for checkpointing."""

    def __init__(self, width=256, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x, first=0):
        for number, block in enumerate(self.layers):
            x = checkpoint(block, x, use_reentrant=False) if number < first else block(x)
        return x.sum()


def stack_plan(**arguments):
    options = {
        "batch": torch.empty(16384, 256, device="meta"),
        "optimizer": torch.optim.SGD,
        "device": "A100-40GB",
    }
    return TrainingPlan(module=Stack(), **{**options, **arguments})


@pytest.mark.parametrize("module", [Stack(), Stack], ids=["built", "to be built"])
def test_as_few_blocks_are_checkpointed_as_are_enough(module):
    plan = replace(stack_plan(), module=module)

    def need(first):
        changed = replace(plan, loss=lambda module, batch: module(batch, first))
        return estimate_plan(changed).minimum_device_bytes

    needs = [need(first) for first in range(7)]
    budget = (needs[2] + needs[3]) // 2
    assert sorted(needs, reverse=True) == needs
    _, remedies = remedies_of(plan, budget)
    whole, partial = remedies["activation_checkpointing"], remedies["partial_checkpointing"]
    assert whole.need_bytes == needs[6]
    assert partial.need_bytes == needs[3]
    assert "self.layers[:3]" in partial.how


def test_the_line_that_checkpoints_blocks_can_be_run():
    _, remedies = remedies_of(stack_plan())
    model = Stack()
    exec(remedies["activation_checkpointing"].how, {"self": model, "functools": functools, "torch": torch})
    x = torch.randn(4, 256)
    model(x).backward()
    found = [p.grad for p in model.parameters()]
    model.load_state_dict((plain := Stack()).state_dict())
    model.zero_grad()
    model(x).backward()
    plain(x).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert all(grad is not None for grad in found)


def test_extra_compute_is_counted_as_torch_counts_it():
    model, x = Stack(), torch.randn(32, 256)

    def flops(run):
        with FlopCounterMode(display=False) as counter:
            run().backward()
        return counter.get_total_flops()

    plain = flops(lambda: model(x))
    extra = flops(lambda: model(x, first=6)) / plain - 1
    plan = stack_plan(batch=x)
    estimate = estimate_plan(plan)
    assert estimate.events.flops == plan.steps * plain
    _, remedies = remedies_of(stack_plan())
    assert f"{extra:.0%} more compute" in remedies["activation_checkpointing"].cost


def test_what_computes_the_same_comes_first():
    plan = stack_plan()
    need = estimate_plan(plan).minimum_device_bytes
    remedies = suggest_remedies(plan, estimate_plan(plan), int(0.7 * need))
    kinds = [(not remedy.fits, not remedy.exact) for remedy in remedies]
    assert kinds == sorted(kinds)
    assert len(set(kinds)) > 1


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 128), nn.Linear(128, 4096)

    def forward(self, ids, mask):
        scores = self.head(self.embed(ids)) + mask.unsqueeze(-1)
        return scores.logsumexp(-1).mean()


def test_sequences_are_halved_until_they_fit():
    ids = torch.zeros(8, 1024, dtype=torch.int64)
    plan = TrainingPlan(module=Text(), batch=(ids, torch.zeros(8, 1024)), optimizer=torch.optim.SGD)
    short = replace(plan, batch=(ids[:, :256], torch.zeros(8, 256)))
    need = estimate_plan(short).minimum_device_bytes
    _, remedies = remedies_of(plan, need, thorough=True)
    assert remedies["shorter_sequences"].need_bytes == need
    assert not remedies["shorter_sequences"].exact
    assert "shorter_sequences" not in remedies_of(plan, need)[1]


def test_adapters_freeze_what_they_stand_beside():
    peft = pytest.importorskip("peft")
    plan = stack_plan(batch=torch.empty(64, 256, device="meta"), optimizer=torch.optim.AdamW)
    _, remedies = remedies_of(plan, thorough=True)

    def adapted():
        model = Stack()
        names = [name for name, child in model.named_modules() if isinstance(child, nn.Linear)]
        return peft.inject_adapter_in_model(peft.LoraConfig(r=16, target_modules=names), model)

    expected = estimate_plan(replace(plan, module=adapted())).minimum_device_bytes
    assert remedies["low_rank_adapters"].need_bytes == expected


def test_pairs_are_tried_where_neither_is_enough():
    plan = stack_plan(optimizer=torch.optim.AdamW)
    estimate, alone = remedies_of(plan)
    singles = [r for r in alone.values() if r.name != "combined"]
    capacity = min(r.need_bytes for r in singles) - 1
    remedies = suggest_remedies(plan, estimate, capacity, thorough=True)
    pairs = [r for r in remedies if "_and_" in r.name]
    assert pairs
    assert all(r.fits and " and " in r.description for r in pairs)


def test_runs_on_several_devices_are_offered_to_share_more():
    plan = stack_plan(
        batch=torch.empty(64, 256, device="meta"), optimizer=torch.optim.AdamW, num_devices=4, device="cuda"
    )
    _, remedies = remedies_of(plan)
    for name, strategy in [
        ("gradient_as_bucket_view", DDP(gradient_as_bucket_view=True)),
        ("fully_sharded", "fsdp"),
    ]:
        assert remedies[name].exact
        expected = estimate_plan(replace(plan, strategy=strategy)).minimum_device_bytes
        assert remedies[name].need_bytes == expected
    assert "fully_sharded" not in remedies_of(replace(plan, precision="bf16-master"))[1]
    assert "fully_sharded" not in remedies_of(replace(plan, num_devices=1))[1]


WIDE = {"batch": torch.empty(8, 4096, device="meta"), "optimizer": torch.optim.AdamW, "device": "A100-80GB"}


def wide():
    return Stack(width=4096, depth=3)  # So large that DeepSpeed's buckets of 2e8 elements are worth it.


def test_deepspeed_and_offload_are_offered_as_lightning_names_them():
    from lightning.pytorch.strategies import StrategyRegistry

    plan = TrainingPlan(module=wide, num_devices=4, **WIDE)
    model = skeleton(plan)
    changes = {change.name: change for change in strategies(plan, model, thorough=True)}
    assert set(changes) >= {"zero_1", "zero_2", "zero_3", "zero_2_offload", "zero_3_offload"}
    for name, change in changes.items():
        if name.startswith("zero"):
            registered = name.replace("zero", "deepspeed_stage")
            assert registered in StrategyRegistry.available_strategies()
            assert change.how.startswith(f'Trainer(strategy="{registered}")')
            assert change.apply(plan).strategy == resolve_strategy(registered, 4)
    need = need_of(changes["zero_2_offload"].apply(plan))
    by_hand = estimate_plan(replace(plan, strategy="deepspeed_stage_2_offload"))
    assert need.device_bytes == by_hand.minimum_device_bytes
    assert need.offloaded_bytes == 4 * by_hand.host.offloaded_bytes > 0


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"num_devices": 4, "gradient_clip_val": 1.0}, "fully_sharded"),
        ({"num_devices": 4, "gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "zero_2"),
        ({"num_devices": 4, "precision": "64-true"}, "zero_2"),
        ({"num_devices": 1}, "zero_2"),
    ],
    ids=["norm", "value", "double", "alone"],
)
def test_what_lightning_refuses_under_a_strategy_is_not_offered(options, missing):
    plan = TrainingPlan(module=wide, **{**WIDE, **options})
    names = {change.name for change in strategies(plan, skeleton(plan), thorough=True)}
    assert missing not in names
    assert ("zero_2_offload" in names) == (missing != "zero_2" or options["num_devices"] == 1)


def test_lines_to_paste_are_python_and_yaml():
    plan = stack_plan(num_devices=2, precision="bf16-mixed")
    changes = [*strategies(plan, Stack(), thorough=True), *precisions(plan), *checkpointing(Stack())]
    both = together([next(c for c in changes if c.name == "fully_sharded"), changes[-1]])
    for change in [*changes, both]:
        ast.parse(change.code.python())
        yaml.safe_load(change.code.yaml())
    config = yaml.safe_load(both.code.yaml())["trainer"]["strategy"]
    assert config["class_path"] == "lightning.pytorch.strategies.FSDPStrategy"
    assert config["init_args"] == {"auto_wrap_policy": [f"{Block.__module__}.Block"]}
    assert "auto_wrap_policy={Block}" in both.code.python()
    assert "for block in model.layers:" in both.code.python()
