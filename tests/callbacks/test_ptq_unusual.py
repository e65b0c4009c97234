"""Modules and runs that are unlike the usual ones: what their copy sees, and that it is the copy that is measured."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torchmetrics
from torch import nn

from lightning_memprec.callbacks.post_training_quantization import PostTrainingQuantization
from lightning_memprec.quantization.checkpoint import load_quantized

from .ptq_runs import checkpoint, fit, loader, make_module
from .runs import namespace

Classifier = type(make_module())


def measured(module, tmp_path, **options):
    """Metrics of the float and of the int8 copy of the last weights, and those of the run itself."""
    callback = PostTrainingQuantization(dirpath=tmp_path / "out", source="last")
    trainer = fit(module, callback, **options)
    run = {name: float(trainer.callback_metrics[name]) for name in callback.metrics_before}
    return callback, run


class Closure(Classifier):
    def __init__(self):
        super().__init__()
        net = self.net
        self.run_net = lambda x: net(x)

    def forward(self, x):
        return self.run_net(x)


class HooksCount(Classifier):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.net[0].register_forward_hook(lambda *_: self.count())

    def count(self):
        self.calls += 1


class KeepsGraph(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses = [loss * 2]
        return loss


class HoldsLock(Classifier):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Collection(Classifier):
    def __init__(self):
        super().__init__()
        classification = torchmetrics.classification
        self.metrics = torchmetrics.MetricCollection(
            [classification.MulticlassF1Score(2), classification.MulticlassPrecision(2)], prefix="val_"
        )

    def validation_step(self, batch, batch_idx):
        self.metrics(self(batch[0]), batch[1])
        self.log_dict(self.metrics, on_step=True, on_epoch=True)


class Compiled(Classifier):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class Recurrent(Classifier):
    """Recurrent layers hold weak references to their weights."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.net[0] = nn.Linear(16, 16)

    def forward(self, x):
        return self.net(self.rnn(x[:, None])[0][:, -1])


@pytest.mark.parametrize(
    "kind",
    [Closure, HooksCount, KeepsGraph, HoldsLock, Collection, Compiled, Recurrent],
    ids=lambda kind: kind.__name__,
)
def test_the_copy_measures_what_the_run_measured(tmp_path, kind):
    module = kind()
    callback, run = measured(module, tmp_path)
    assert callback.metrics_before == pytest.approx(run, rel=1e-6)
    assert len(callback.report.quantized) == (3 if kind is Recurrent else 2)
    assert callback.path.exists()
    if kind is HooksCount:
        plain = kind()
        fit(plain)
        assert module.calls == plain.calls  # The copy counts by itself.


def test_layers_of_the_run_are_not_measured_in_place_of_those_of_the_copy(tmp_path):
    outside = {}

    class Global(Classifier):
        def forward(self, x):
            return outside["net"](x)

    module = Global()
    outside["net"] = module.net
    callback = PostTrainingQuantization(dirpath=tmp_path / "out")
    with pytest.warns(UserWarning, match="calls a `Sequential` of the run's own module"):
        fit(module, callback)
    assert callback.path is None
    assert not module.net._forward_pre_hooks


def test_an_attribute_that_cannot_be_copied_is_explained(tmp_path):
    module = make_module()
    module.stream = (value for value in range(3))
    callback = PostTrainingQuantization(dirpath=tmp_path / "out")
    with pytest.warns(UserWarning, match="cannot be copied .*generator.*Make that attribute in the hook"):
        fit(module, callback)
    assert callback.path is None


def test_a_module_without_a_layer_to_quantize_is_told_so(tmp_path):
    class Own(nn.Module):
        """A linear layer as another package writes it."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 6))

        def forward(self, x):
            return nn.functional.linear(x, self.weight)

    module = Classifier()
    module.net = Own()
    with pytest.warns(
        UserWarning, match="no layer of the `Classifier` was quantized. Layers of torch can be"
    ):
        callback, _ = measured(module, tmp_path)
    assert callback.path is None


def test_a_lazy_layer_that_never_ran_is_named(tmp_path):
    module = make_module(configure_optimizers=lambda self: torch.optim.SGD(self.net.parameters(), lr=0.1))
    module.unused = nn.LazyLinear(3)
    with pytest.warns(UserWarning, match=r"'unused\.weight' has no shape: its lazy layer never ran"):
        fit(module, PostTrainingQuantization(dirpath=tmp_path / "out"))


def test_the_copy_sees_the_trainer_of_the_run(tmp_path):
    seen = []

    def on_validation_epoch_end(self):
        trainer = self.trainer
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.param_groups[0]["seen"] = True
        seen.append(
            (self.global_step, trainer.max_epochs, trainer.num_training_batches, scheduler.last_epoch)
        )
        assert len(trainer.train_dataloader.dataset) == 48
        self.log("rate", optimizer.param_groups[0]["lr"])
        if type(self.net[0]) is not nn.Linear or len(seen) > 2:  # Neither may reach the run.
            scheduler.step()
            optimizer.step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    module = make_module(
        on_validation_epoch_end=on_validation_epoch_end, configure_optimizers=configure_optimizers
    )
    callback = PostTrainingQuantization(dirpath=tmp_path / "out")
    trainer = fit(module, callback, num_sanity_val_steps=0)
    assert [row[0] for row in seen] == [6, 12, 12, 12]
    assert [row[1:3] for row in seen] == [(2, 6)] * 4
    assert callback.metrics_before["rate"] == pytest.approx(0.025)  # Two epochs of halving.
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.parametrize("logs", [True, False])
def test_loggers_of_the_copy_drop_what_they_get(tmp_path, logs):
    folders = []

    def on_validation_epoch_end(self):
        assert (self.logger is not None) is logs
        folders.append(Path(self.trainer.log_dir))
        folders[-1].mkdir(exist_ok=True, parents=True)
        (folders[-1] / f"epoch{len(folders)}").touch()
        if logs:
            assert Path(self.logger.log_dir) == folders[-1]
            self.logger.log_metrics({"logged": 1.0})

    module = make_module(on_validation_epoch_end=on_validation_epoch_end)
    logger = namespace().loggers.CSVLogger(tmp_path) if logs else False
    callback = PostTrainingQuantization(dirpath=tmp_path / "out")
    fit(module, callback, logger=logger, num_sanity_val_steps=0, default_root_dir=tmp_path)
    assert callback.path.exists()
    assert len(folders) == 4
    assert sorted(path.name for path in folders[0].glob("epoch*")) == ["epoch1", "epoch2"]
    assert not folders[-1].exists()


def test_a_validation_that_was_never_due_is_held_for_the_copy(tmp_path):
    limit = {"monitor": "val_acc", "mode": "max", "max_degradation": 0.5}
    callback = PostTrainingQuantization(dirpath=tmp_path / "out", **limit)
    trainer = fit(make_module(), callback, check_val_every_n_epoch=10, num_sanity_val_steps=0)
    assert set(callback.metrics_before) == {"val_acc", "val_loss"}
    assert "val_loss" not in trainer.callback_metrics
    assert trainer.fit_loop.epoch_loop.val_loop._combined_loader is None


@pytest.mark.parametrize("frozen", [True, False])
def test_a_checkpoint_may_leave_out_frozen_weights_alone(tmp_path, frozen):
    def on_save_checkpoint(self, saved):
        del saved["state_dict"]["net.0.weight"]

    module = make_module(on_save_checkpoint=on_save_checkpoint)
    module.net[0].weight.requires_grad = not frozen
    callback = PostTrainingQuantization(dirpath=tmp_path / "out")
    if not frozen:
        with pytest.warns(UserWarning, match=r"lack 'net\.0\.weight': a hook of the module may save others"):
            fit(module, callback, checkpoint(tmp_path))
        return
    fit(module, callback, checkpoint(tmp_path))
    weight = load_quantized(callback.path, Classifier).net[0].dequantize()
    # Rounded to 127 steps a row.
    assert torch.allclose(weight, module.net[0].weight, atol=float(module.net[0].weight.abs().max()) / 250)


def test_ties_and_several_loaders(tmp_path):
    class Tied(Classifier):
        def __init__(self):
            super().__init__()
            self.twin = self.net[0]

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))
            return {"inputs": batch[0]}

    loaders = {"a": loader(seed=8), "b": loader(40, seed=9)}
    callback, run = measured(Tied(), tmp_path, val=loaders)
    assert callback.metrics_before == pytest.approx(run, rel=1e-6)
    again = load_quantized(callback.path, Tied)
    assert again.twin is again.net[0]
