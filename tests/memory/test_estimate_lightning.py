"""LightningModules: hooks, loops and what user code reads from its Trainer."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_memprec import TraceError, estimate_memory
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.plan import TrainingPlan
from tests.memory.small_lightning import BATCH, DEVICES, IN, OUT, Module, X, module_with, run_for_real

# -- the order of the loop ----------------------------------------------------------------------------

HOOKS = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start",
    "training_step", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward",
    "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step",
    "on_train_batch_end",
)  # fmt: skip


def recording(calls):
    """A module that notes each hook on entry, and the optimizer's update."""

    def note(name):
        def hook(self, *args, **kwargs):
            calls.append(name)
            return getattr(super(type(self), self), name)(*args, **kwargs)

        return hook

    def configure_optimizers(self):
        class Adam(torch.optim.Adam):
            def step(self, closure=None):
                calls.append("step begins")
                out = super().step(closure)
                calls.append("step ends")
                return out

        return Adam(self.parameters())

    return module_with(configure_optimizers=configure_optimizers, **{name: note(name) for name in HOOKS})


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_hooks_run_in_the_order_of_the_real_trainer(accumulate, device):
    traced, real = [], []
    estimate_memory(
        recording(traced),
        X,
        device=device,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        steps=2,
    )
    run_for_real(
        recording(real), X, steps=2 * accumulate, accumulate_grad_batches=accumulate, gradient_clip_val=1.0
    )
    assert traced == real


def test_transfer_hooks_shape_the_batch():
    def on_before_batch_transfer(self, batch, dataloader_idx):
        assert batch.device.type == "cpu"
        return {"image": batch, "extra": torch.zeros(3)}

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        assert device == torch.device("cuda", 0)
        return {k: v.to(device) for k, v in batch.items()}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return torch.cat([batch["image"], batch["image"] + 1])

    def training_step(self, batch, batch_idx):
        assert batch.shape == (2 * BATCH, IN)
        assert batch.is_cuda
        return self.net(batch).sum()

    module = module_with(**{f.__name__: f for f in (
        on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer, training_step
    )})  # fmt: skip
    estimate = estimate_memory(module, X, device="cuda")
    assert max(s.size_bytes for s in estimate.events.storages if s.category == "inputs") == 2 * X.nbytes


def test_writes_before_the_transfer_may_not_reach_the_users_batch():
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch.mul_(2).clamp_(0)

    before = X.clone()
    for device in DEVICES:
        estimate_memory(module_with(on_after_batch_transfer=on_after_batch_transfer), X, device=device)
    assert torch.equal(before, X)


def test_an_overridden_optimizer_step_decides():
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    skipping = estimate_memory(module_with(optimizer_step=optimizer_step), X, device="cpu", steps=1)
    assert skipping.breakdown.optimizer_states_bytes == 0
    stepping = estimate_memory(module_with(optimizer_step=optimizer_step), X, device="cpu", steps=3)
    assert stepping.breakdown.optimizer_states_bytes > 0


def test_overridden_clipping_gets_the_trainers_values():
    seen = []

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        seen.append((gradient_clip_val, gradient_clip_algorithm))
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")

    module = module_with(configure_gradient_clipping=configure_gradient_clipping)
    estimate_memory(module, X, device="cpu", gradient_clip_val=0.5, gradient_clip_algorithm="value", steps=1)
    assert seen == [(0.5, "value")]


def test_what_training_step_may_return():
    outputs = {
        "tensor": lambda loss: loss,
        "dict": lambda loss: {"loss": loss},
        "dict with more": lambda loss: {"loss": loss, "predictions": loss.detach()[None].expand(4)},
        "none": lambda loss: None,
    }
    peaks = {}
    for name, wrap in outputs.items():
        module = module_with(training_step=lambda self, batch, batch_idx, w=wrap: w(self.net(batch).sum()))
        peaks[name] = estimate_memory(module, X, device="cpu").peak_allocated_bytes
    assert peaks["tensor"] == peaks["dict"]
    assert peaks["none"] < peaks["tensor"]


@pytest.mark.parametrize(
    "training_step",
    [
        lambda self, batch: self.net(batch).sum(),
        lambda self, batch, batch_idx: self.net(batch).sum() * (batch_idx + 1),
        lambda self, *args: self.net(args[0]).sum() * (args[1] + 1),
        lambda self, batch, index, **kwargs: self.net(batch).sum() * (index + 1),
    ],
)
def test_training_step_takes_what_its_signature_says(training_step):
    estimate_memory(module_with(training_step=training_step), X, device="cpu")


# -- what user code reads and logs ---------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_attributes_of_the_trainer_and_of_the_module(device):
    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        assert self.device.type == trainer.strategy.root_device.type == device
        assert (self.global_step, self.current_epoch, self.global_rank, self.local_rank) == (0, 0, 0, 0)
        assert trainer.accumulate_grad_batches == 2
        assert trainer.gradient_clip_val == 0.5
        assert (trainer.world_size, trainer.num_devices, trainer.num_nodes) == (8, 4, 2)
        assert trainer.training
        assert not trainer.sanity_checking
        assert trainer.optimizers[0] is self.optimizers().optimizer
        assert self.all_gather(batch[:1]).shape == (8, 1, IN)
        trainer.strategy.barrier()
        self.logger.experiment.add_histogram("weights", self.net[0].weight, self.global_step)
        self.logger.log_metrics({"a": 1.0})
        self.print("nothing")
        return self.net(batch).sum()

    estimate_memory(
        module_with(training_step=training_step), X, device=device, accumulate_grad_batches=2, gradient_clip_val=0.5,
        num_devices=4, num_nodes=2,
    )  # fmt: skip


def test_what_a_trainer_lacks_is_reported_with_the_users_line():
    module = module_with(training_step=lambda self, batch, batch_idx: self.trainer.invented)
    with pytest.raises(TraceError, match=r"AttributeError at .*test_estimate_lightning\.py:\d+: .*invented"):
        estimate_memory(module, X, device="cpu")


def test_logging_keeps_one_value_a_name():
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).sum()
        if self.logs:
            self.log("loss", loss, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=len(batch))
            self.log("number", 1.0)
            self.log_dict({"a": loss * 2, "b": batch.sum()}, on_step=True)
        return loss

    peaks = []
    for logs in (False, True):
        module = module_with(training_step=training_step)
        module.logs = logs
        peaks.append(estimate_memory(module, X, device="cpu").peak_allocated_bytes)
    assert 0 <= peaks[1] - peaks[0] <= 4 * 4


@pytest.mark.parametrize("device", DEVICES)
def test_metrics_that_need_values_are_left_out_and_named(device):
    class Threshold(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("total", torch.tensor(0.0))

        def update(self, value):
            if value > 0:
                self.total += value

        def compute(self):
            return self.total

    def build(self):
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(OUT)
        self.mean = torchmetrics.MeanMetric()
        self.threshold = Threshold()

    def training_step(self, batch, batch_idx):
        logits = self.net(batch)
        labels = torch.zeros(len(batch), dtype=torch.long, device=batch.device)
        self.log("acc", self.accuracy(logits, labels))
        self.log("mean", self.mean)
        self.mean(logits.mean().detach())
        self.threshold(logits.sum().detach())
        return F.cross_entropy(logits, labels)

    module = module_with(build=build, training_step=training_step)
    estimate = estimate_memory(module, X, device=device)
    notes = {a.name for a in estimate.assumptions}
    assert "metric_left_out:threshold" in notes
    assert any("`threshold` (Threshold) depends on values" in a.text for a in estimate.assumptions)
    assert module.threshold.total == 0
    assert module.mean.weight == 0


# -- the user's module ----------------------------------------------------------------------------------


def test_a_module_that_was_trained_is_untouched():
    module = Module()
    trainer = run_for_real(module, X)
    weights = {k: v.clone() for k, v in module.state_dict().items()}
    attributes = dict(vars(module))
    estimate_memory(module, X, device="cuda", precision="bf16-mixed")
    assert module.trainer is trainer
    assert vars(module).keys() == attributes.keys()
    assert all(vars(module)[k] is v for k, v in attributes.items() if not isinstance(v, (int, float)))
    assert all(torch.equal(weights[k], v) for k, v in module.state_dict().items())
    assert module.device.type == "cpu"
    assert type(module.log).__name__ == "method"
    copy.deepcopy(module)
    run_for_real(module, X)


def test_configure_model_runs_through_prepare():
    def configure_model(self):
        self.head = nn.Linear(OUT, 100)

    module = module_with(
        configure_model=configure_model,
        training_step=lambda self, batch, batch_idx: self.head(self.net(batch)).sum(),
    )
    plan = TrainingPlan(module=module, batch=X, device="cpu", prepare=lambda copy: copy.configure_model())
    estimate = estimate_plan(plan)
    assert estimate.total_parameters == sum(p.numel() for p in module.parameters()) + OUT * 100 + 100
    assert not hasattr(module, "head")


def test_the_trainer_of_the_plan_is_what_the_copy_sees():
    trainer = types.SimpleNamespace(flag=3, optimizers=[])
    module = module_with(
        training_step=lambda self, batch, batch_idx: self.net(batch).sum() * self.trainer.flag
    )
    estimate_plan(TrainingPlan(module=module, batch=X, device="cpu", trainer=trainer))
    assert len(trainer.optimizers) == 1
    assert module._trainer is None


def test_a_module_inside_the_module_shares_trainer_and_device():
    def build(self):
        self.child = Module()
        self.child.grandchild = Module()

    def training_step(self, batch, batch_idx):
        for child in (self.child, self.child.grandchild):
            assert child.trainer is self.trainer
            assert child.device == self.device
            child.log("loss", batch.sum())
        return self.child.training_step(batch, batch_idx)

    module = module_with(build=build, training_step=training_step)
    estimate_memory(module, X, device="cuda")
    assert module.child._trainer is None


def test_lightnings_own_demo_module():
    estimate = estimate_memory(BoringModel(), torch.randn(4, 32), device="cpu")
    assert estimate.breakdown.parameters_bytes == 4 * (32 * 2 + 2)
