"""The monitor on real runs: what it counts, what it says, and that it changes nothing."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader

from lightning_memprec.callbacks.stagnation_monitor import StagnationMonitor

from .scaler_runs import hearing, one_line


class Recorder(Logger):
    name = version = "x"

    def __init__(self):
        super().__init__()
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs): ...


class Model(LightningModule):
    def __init__(self, optimizer=torch.optim.SGD, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)
        self.unused = nn.Linear(2, 2)
        self.make = lambda parameters: optimizer(parameters, **options)
        self.weights = []

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return self.make(self.parameters())

    def on_train_batch_start(self, batch, batch_idx):
        self.weights.append(self.layer.weight.detach().clone())


def fit(model, *callbacks, precision="32-true", steps=4, **options):
    logger = Recorder()
    generator = torch.Generator().manual_seed(1)
    batches = DataLoader(torch.randn(4 * steps, 64, generator=generator), batch_size=4)
    trainer = Trainer(
        accelerator="cpu", precision=precision, max_steps=steps, callbacks=list(callbacks), logger=logger,
        log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    trainer.fit(model, batches)
    model.weights.append(model.layer.weight.detach().clone())
    return logger


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.AdamW, {"lr": 1e-3}), (torch.optim.LBFGS, {"lr": 1e-2, "max_iter": 3})],
    ids=["AdamW", "LBFGS"],
)
def test_a_run_is_bit_for_bit_the_run_without_it(precision, optimizer, options):
    if precision == "bf16-true" and optimizer is torch.optim.LBFGS:
        options = {**options, "max_iter": 1}
    without, watched = Model(optimizer, **options), Model(optimizer, **options)
    torch.manual_seed(2)
    fit(without, precision=precision)
    random_state = torch.get_rng_state()
    torch.manual_seed(2)
    fit(watched, StagnationMonitor(every_n_steps=1), precision=precision)
    for a, b in zip(without.weights, watched.weights, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_half_weights_that_did_not_move_are_counted_on_every_nth_step():
    model, monitor = Model(lr=1e-3), StagnationMonitor(every_n_steps=2)
    logger = fit(model, monitor, precision="bf16-true")
    key = "memprec/stagnation/lost_update_ratio"
    logged = {step: metrics[key] for step, metrics in logger.metrics if key in metrics}
    assert set(logged) == {2, 4}
    for step, ratio in logged.items():
        before, after = model.weights[step - 1], model.weights[step]
        # The bias has 64 of 4160 elements; every weight has a gradient with this loss.
        assert ratio == pytest.approx(float((before == after).float().mean()), abs=64 / 4160)
        assert ratio > 0.5
    assert monitor.history["lost_update_ratio"] == list(logged.items())
    assert "FP32 master weights keep them" in monitor.in_words()
    assert "measured on 2 steps" in monitor.in_words()


def test_fp32_weights_are_held_against_half_precision():
    model, monitor = Model(lr=1e-3), StagnationMonitor(every_n_steps=1)
    logger = fit(model, monitor)
    measured = [m for _, m in logger.metrics if any("stagnation" in name for name in m)]
    assert all(set(m) == {"memprec/stagnation/avoided_loss_ratio"} for m in measured)
    assert len(measured) == 4
    assert "would have been lost with weights in bfloat16" in monitor.in_words()
    finer = StagnationMonitor(every_n_steps=1, dtype="float16")
    fit(Model(lr=1e-3), finer)
    for (_, coarse), (_, fine) in zip(
        *(m.history["avoided_loss_ratio"] for m in (monitor, finer)), strict=True
    ):
        assert fine < coarse


class Adversaries(Model):
    """Manual optimization with two optimizers in one batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([p], lr=0.1) for p in self.layer.parameters()]


def test_two_optimizers_in_manual_optimization():
    model, monitor = Adversaries(), StagnationMonitor(every_n_steps=1)
    fit(model, monitor, precision="bf16-true", steps=4)
    assert [step for step, _ in monitor.history["lost_update_ratio"]] == [2, 4]


def test_other_namespace():
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        training_step, configure_optimizers = Model.training_step, Model.configure_optimizers

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.make = lambda parameters: torch.optim.SGD(parameters, lr=1e-3)

    monitor = StagnationMonitor(every_n_steps=1)
    pl.Trainer(
        accelerator="cpu", precision="bf16-true", max_steps=1, callbacks=[monitor], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), DataLoader(torch.randn(4, 64), batch_size=4))  # fmt: skip
    assert len(monitor.history["lost_update_ratio"]) == 1


def test_master_weights_are_measured_as_the_fp32_weights_they_are():
    from lightning_memprec.plugins.master_weights import MasterWeightPrecision

    monitor, model = StagnationMonitor(every_n_steps=1), Model(torch.optim.AdamW, lr=1e-5)
    logger = Recorder()
    Trainer(
        accelerator="cpu", plugins=[MasterWeightPrecision("bf16-master")], max_steps=2, callbacks=[monitor],
        logger=logger, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=1,
    ).fit(model, DataLoader(torch.randn(8, 64), batch_size=4))  # fmt: skip
    assert set(monitor.history) == {"avoided_loss_ratio"}
    assert min(ratio for _, ratio in monitor.history["avoided_loss_ratio"]) > 0.5


def test_large_updates_are_not_lost():
    monitor = StagnationMonitor(every_n_steps=1)
    fit(Model(torch.optim.Adam, lr=1.0), monitor, precision="bf16-true")
    assert max(ratio for _, ratio in monitor.history["lost_update_ratio"]) < 0.01


def test_a_step_with_learning_rate_zero_intends_nothing():
    monitor = StagnationMonitor(every_n_steps=1)
    fit(Model(lr=0.0), monitor, precision="bf16-true")
    assert monitor.history == {}
    assert "No update was measured" in monitor.in_words()


def test_accumulation_measures_whole_steps():
    monitor = StagnationMonitor(every_n_steps=1)
    fit(Model(lr=1e-3), monitor, precision="bf16-true", steps=2, accumulate_grad_batches=2)
    assert [step for step, _ in monitor.history["lost_update_ratio"]] == [1, 2]


def test_the_result_is_said_at_the_end_of_every_fit():
    for _ in range(2):
        monitor = StagnationMonitor(every_n_steps=1)
        with hearing() as said:
            fit(Model(lr=1e-3), monitor)
        (text,) = [text for level, text in said if "StagnationMonitor" in text]
        assert one_line(text) == f"[info] StagnationMonitor {monitor.in_words()}"
        assert max(map(len, text.splitlines())) <= 88


def test_shares_are_in_callback_metrics():
    monitor, key = StagnationMonitor(every_n_steps=2), "memprec/stagnation/lost_update_ratio"
    model, seen = Model(lr=1e-3), []

    class Look(Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append(trainer.callback_metrics.get(key))

    fit(model, monitor, Look(), precision="bf16-true", steps=4)
    (_, first), (_, second) = monitor.history["lost_update_ratio"]
    assert seen[0] is None
    assert [float(seen[1]), float(seen[3])] == pytest.approx([first, second])
    assert float(model.trainer.callback_metrics[key]) == pytest.approx(second)


def test_a_fault_of_the_measurement_warns_once_and_the_run_goes_on(monkeypatch):
    def broken(*args):
        raise RuntimeError("no sample")

    monkeypatch.setattr("lightning_memprec.callbacks.stagnation_monitor.sample", broken)
    model = Model(lr=1e-3)
    with pytest.warns(UserWarning, match="could not measure: RuntimeError: no sample") as caught:
        fit(model, StagnationMonitor(every_n_steps=1))
    assert sum("could not measure" in str(w.message) for w in caught) == 1
    assert len(model.weights) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"every_n_steps": 0}, "at least 1, got 0"), ({"dtype": "int8"}, "got 'int8'")],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        StagnationMonitor(**arguments)
