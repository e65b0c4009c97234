"""Validation between the steps: the estimate beside real CPU runs, and what a fault leaves behind."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

from lightning_memprec.memory.estimate import estimate_memory, estimate_plan
from lightning_memprec.memory.plan import TrainingPlan, ValidationLoader, ValidationPlan
from tests.memory.small_lightning import DEVICES, IN, Module, X, module_with
from tests.memory.zoo.reference import peak_of, storage_bytes

LARGE = torch.randn(2048, IN)
SMALL = torch.randn(4, IN)


def validation_step(self, batch, batch_idx):
    self.log("val", self.net(batch).pow(2).mean(), batch_size=len(batch))


def plan_of(module, batch=X, validation=LARGE, count=2, device="cpu", **options):
    batches = validation if isinstance(validation, tuple) else (validation,)
    return TrainingPlan(
        module=module,
        batch=batch,
        device=device,
        validation=ValidationPlan(loaders=tuple(ValidationLoader(b, count) for b in batches), **options),
    )


def peaks(estimate):
    found = {}
    for phase in estimate.phases:
        found[phase.name] = max(found.get(phase.name, 0), phase.peak_allocated_bytes)
    return found


def real_peak(module, batch, validation, count, **options):
    """Fit for two steps with a validation after each, and return the largest sum of live tensors."""
    options = {"max_steps": 2, "val_check_interval": 1, "num_sanity_val_steps": 0, **options}
    train = DataLoader([batch] * 2, batch_size=None)
    data = DataLoader([validation] * count, batch_size=None)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    start = storage_bytes([*module.parameters(), *module.buffers(), batch, validation])
    # The loaders' batches exist before the run. The estimate counts the batch that is on the device.
    return (
        start
        - storage_bytes(_host_batch(batch, validation))
        + peak_of(lambda: trainer.fit(module, train, data))
    )


def _host_batch(batch, validation):
    return batch if storage_bytes(batch) < storage_bytes(validation) else validation


class Convolutional(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.LazyLinear(10)
        )
        self.net(torch.zeros(1, 3, 16, 16))

    validation_step = validation_step


class Keeping(Module):
    """Keeps its outputs until the epoch ends, as Lightning's guide for moving to 2.0 proposes."""

    def on_validation_epoch_start(self):
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        self.outputs.append(self.net(batch))

    def on_validation_epoch_end(self):
        self.outputs.clear()


class Counting(Module):
    """A metric whose states grow with the data."""

    def __init__(self):
        super().__init__()
        self.metric = torchmetrics.CatMetric(nan_strategy="disable")

    def validation_step(self, batch, batch_idx):
        self.metric.update(self.net(batch))

    def on_validation_epoch_end(self):
        self.metric.reset()


def plain():
    return module_with(validation_step=validation_step)


CASES = {
    "mlp": (plain, X, LARGE, 2),
    "mlp, small validation": (plain, LARGE, SMALL, 2),
    "convolution": (Convolutional, torch.randn(4, 3, 16, 16), torch.randn(64, 3, 16, 16), 2),
    "outputs kept": (Keeping, X, LARGE, 9),
    "metric that grows": (Counting, X, LARGE, 9),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_peak_of_a_run_with_validation_is_that_of_a_real_one(name):
    build, batch, validation, count = CASES[name]
    torch.manual_seed(0)
    real = real_peak(build(), batch, validation, count)
    estimate = estimate_plan(plan_of(build(), batch, validation, count))
    assert (estimate.peak_phase.name == "validation") == (name != "mlp, small validation")
    # Lightning keeps a few scalars: running means of what was logged, progress.
    assert estimate.peak_allocated_bytes == pytest.approx(real, rel=0.002)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_sanity_check_needs_what_a_real_one_needs(name):
    build, batch, validation, count = CASES[name]
    # Without training batches there is the sanity check alone.
    options = {"num_sanity_val_steps": count, "max_epochs": 1, "max_steps": -1, "limit_train_batches": 0}
    real = real_peak(build(), batch[:1].clone(), validation, count, **options)
    estimate = estimate_plan(plan_of(build(), batch, validation, count))
    # Lightning keeps the state of torch's generator, 5,056 bytes on the host, and a few scalars.
    assert 0 <= real - 5056 - peaks(estimate)["sanity_validation"] <= 256


HOOKS = (
    "on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_start", "on_validation_epoch_start",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_validation_batch_start",
    "validation_step", "on_validation_batch_end",
)  # fmt: skip


def noting(calls):
    def note(name):
        def hook(self, *args, **kwargs):
            if not self.trainer.training:
                calls.append(name)
            return getattr(super(type(self), self), name)(*args, **kwargs)

        return hook

    return module_with(**{name: note(name) for name in HOOKS})


@pytest.mark.filterwarnings("ignore")
def test_hooks_run_in_the_order_of_the_real_trainer():
    traced, real = [], []
    estimate_plan(plan_of(noting(traced), count=2))
    real_peak(noting(real), X, LARGE, 2, max_steps=1)
    # The zero-grad hook comes when the real Trainer already counts as validating.
    assert [name for name in traced if name != HOOKS[0]] == [name for name in real if name != HOOKS[0]]
    assert real[0] == HOOKS[0]


@pytest.mark.parametrize("device", DEVICES)
def test_validation_sees_what_a_real_one_sees(device):
    seen = {}

    def validation_step(self, batch, batch_idx):
        seen.update(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            module=self.training,
            network=self.net.training,
            trainer=(self.trainer.training, self.trainer.validating),
            device=batch.device.type,
            gradients=[p.grad for p in self.parameters() if p.grad is not None],
        )

    def build(self):
        self.net[1].eval()

    def on_validation_model_train(self):
        raise AssertionError("hooks at the end are not run")

    module = module_with(
        validation_step=validation_step, build=build, on_validation_model_train=on_validation_model_train
    )
    estimate_plan(plan_of(module, device=device))
    assert seen == {
        "grad": False,
        "inference": True,
        "module": False,
        "network": False,
        "trainer": (False, True),
        "device": device,
        "gradients": [],
    }
    assert module.training
    assert not module.net[1].training


@pytest.mark.parametrize("device", DEVICES)
def test_states_are_there_after_the_steps_and_not_in_the_sanity_check(device):
    plan = plan_of(module_with(validation_step=validation_step), device=device)
    found = peaks(estimate_plan(plan))
    states = 2 * sum(p.numel() * 4 for p in plan.module.parameters())
    difference = found["validation"] - found["sanity_validation"]
    # Step counts lie on the host under CUDA; there cuBLAS' second workspace is no part of the sanity check.
    assert difference >= states
    assert difference <= states + (16 if device == "cpu" else 9 * 2**20)
    assert "sanity_validation" not in peaks(
        estimate_plan(plan_of(plan.module, device=device, sanity_check=False))
    )


def test_each_loader_is_validated_on_its_own_batch():
    calls = []

    def validation_step(self, batch, batch_idx, dataloader_idx):
        calls.append((len(batch), batch_idx, dataloader_idx))

    estimate_plan(plan_of(module_with(validation_step=validation_step), validation=(SMALL, X), count=2))
    assert calls == [(4, 0, 0), (4, 1, 0), (64, 0, 1), (64, 1, 1)]


@pytest.mark.parametrize(("count", "traced"), [(0, 0), (1, 1), (2, 2), (3, 3), (500, 3), (None, 3)])
def test_few_batches_are_traced_and_none_that_the_run_has_not(count, traced):
    calls = []

    def validation_step(self, batch, batch_idx):
        calls.append(batch_idx)

    estimate_plan(plan_of(module_with(validation_step=validation_step), count=count))
    assert calls == list(range(traced))


def test_what_grows_is_counted_for_all_batches():
    estimates = {n: estimate_plan(plan_of(Keeping(), validation=LARGE, count=n)) for n in (10, 110)}
    outputs = 4 * 4 * len(LARGE)
    assert estimates[110].peak_allocated_bytes - estimates[10].peak_allocated_bytes == 100 * outputs
    (note,) = (a for a in estimates[110].assumptions if a.name == "validation_keeps")
    assert note.size_bytes == 107 * outputs
    unknown = estimate_plan(plan_of(Keeping(), validation=LARGE, count=None))
    assert any("unknown" in a.text for a in unknown.assumptions if a.name == "validation_keeps")


def reads_values(self, batch, batch_idx):
    loss = self.net(batch).pow(2).mean()
    return loss if loss.item() > 0 else None


def raises(self, batch, batch_idx):
    self.net(batch)
    raise KeyError("mine")


@pytest.mark.parametrize("step", [reads_values, raises])
def test_fault_in_validation_leaves_the_training_judged(step):
    plain = estimate_memory(Module(), X, device="cpu")
    estimate = estimate_plan(plan_of(module_with(validation_step=step), device="cpu"))
    (note,) = (a for a in estimate.assumptions if a.name == "validation")
    assert "test_evaluation.py" in note.text
    assert "may need more" in note.text
    for name in ("forward", "backward", "optimizer_step"):
        assert peaks(estimate)[name] == peaks(plain)[name]
    # What was recorded before the fault counts.
    assert peaks(estimate)["validation"] > 2048 * 512 * 4


def test_endless_validation_is_given_up(monkeypatch):
    from lightning_memprec.memory import evaluation

    def generate(self, batch, batch_idx):
        while True:
            batch = self.net[0](batch)[:, :IN]

    monkeypatch.setattr(evaluation.validate, "__kwdefaults__", {"time_limit_s": 0.2})
    estimate = estimate_plan(plan_of(module_with(validation_step=generate)))
    assert any("more than 0.2 seconds" in a.text for a in estimate.assumptions)


@pytest.mark.parametrize("device", DEVICES)
def test_plain_module_is_called_without_gradients(device):
    calls = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(IN, 4)

        def forward(self, x):
            calls.append((len(x), self.training, torch.is_grad_enabled()))
            return self.layer(x)

    estimate = estimate_memory(Net(), X, optimizer=torch.optim.SGD, device=device, validation_batch=LARGE)
    assert calls[:2] == [(64, True, True)] * 2
    assert set(calls[2:]) == {(2048, False, False)}
    assert peaks(estimate)["validation"] > 0


def test_without_validation_there_is_no_such_phase():
    assert not {"validation", "sanity_validation"} & set(peaks(estimate_memory(Module(), X, device="cpu")))
