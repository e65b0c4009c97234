from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memprec.callbacks.post_training_quantization import PostTrainingQuantization
from lightning_memprec.quantization.checkpoint import load_quantized
from lightning_memprec.quantization.convert import quantize_

from .ptq_runs import checkpoint, data, fit, loader, make_module
from .runs import NAMESPACES, make_trainer, namespace


def metrics_of(module, batches):
    """Accuracy per class, averaged, and mean loss over batches, by plain PyTorch."""
    module = module.eval()
    with torch.no_grad():
        logits = torch.cat([module(x) for x, _ in batches])
        target = torch.cat([y for _, y in batches])
        hits = [(logits.argmax(1) == target)[target == k].double().mean() for k in (0, 1)]
        return {
            "val_acc": float(sum(hits) / 2),
            "val_loss": float(nn.functional.cross_entropy(logits, target)),
        }


def close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], rel=1e-5), name  # FP32 sums in another order.


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("filename", ["int8", "int8.safetensors", "int8.ckpt"])
def test_the_best_weights_are_exported_and_measured(tmp_path, name, filename):
    module = make_module(name)
    callback = PostTrainingQuantization(dirpath=tmp_path / "out", filename=filename)
    trainer = fit(module, callback, checkpoint(tmp_path, name), name=name, max_epochs=3)
    best = make_module(name)
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    best.load_state_dict(saved["state_dict"])
    batches = list(loader(seed=8))
    close(callback.metrics_before, metrics_of(best, batches))
    quantize_(best)
    close(callback.metrics_after, metrics_of(best, batches))
    assert callback.path == tmp_path / "out" / filename
    again = load_quantized(callback.path, type(module)).eval()
    assert torch.equal(again(data()[0]), best.eval()(data()[0]))
    assert [row.name for row in callback.report.quantized] == ["net.0", "net.3"]
    report = json.loads(next((tmp_path / "out").rglob("*report.json")).read_text())
    assert report["metrics_after"] == callback.metrics_after
    assert report["weights"].startswith("best checkpoint by val_loss, ")


def test_the_run_is_bit_identical(tmp_path):
    results = []
    for callbacks in ([], [PostTrainingQuantization("llm_int8", dirpath=tmp_path / "out")]):
        module = make_module()
        folder = tmp_path / str(len(callbacks))
        np.random.seed(5)
        trainer = fit(module, *callbacks, checkpoint(folder, save_last=True))
        after = (torch.rand(3), np.random.rand(3))
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        tested = trainer.validate(module, loader(seed=9), verbose=False, ckpt_path="best", weights_only=True)
        state = torch.load(folder / "last.ckpt", weights_only=True)
        results.append(
            (module.state_dict(), after, metrics, tested, state["state_dict"], state["optimizer_states"])
        )
    plain, ours = results
    assert all(torch.equal(a, b) for a, b in zip(plain[0].values(), ours[0].values(), strict=True))
    assert torch.equal(plain[1][0], ours[1][0])
    assert (plain[1][1] == ours[1][1]).all()
    assert plain[2:4] == ours[2:4]
    assert all(torch.equal(plain[4][key], ours[4][key]) for key in plain[4])
    assert str(plain[5]) == str(ours[5])


def test_every_hook_of_the_run_is_still_called(tmp_path):
    called = []
    hooks = ("on_train_end", "on_fit_end", "teardown", "on_validation_end")
    module = make_module()
    for hook in hooks:
        setattr(
            type(module),
            hook,
            lambda self, *args, hook=hook, **options: called.append((hook, self is module)),
        )
    trainer = fit(module, PostTrainingQuantization(dirpath=tmp_path))
    assert called[-3:] == [("on_train_end", True), ("on_fit_end", True), ("teardown", True)]
    assert trainer.state.fn == "fit"
    assert trainer.state.status == "finished"
    assert ("on_validation_end", False) in called  # The copy has its own hooks.


def test_the_copy_is_not_set_up_again_but_sees_the_data_module(tmp_path):
    pl = namespace()
    setups, seen = [], []

    class Data(pl.LightningDataModule):
        factor = 1.0

        def setup(self, stage):
            setups.append(stage)

        def prepare_data(self):
            setups.append("prepare")

        def train_dataloader(self):
            return loader()

        def val_dataloader(self):
            return [loader(seed=8), loader(seed=9)]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * self.factor, batch[1]

    class Module(type(make_module())):
        def setup(self, stage):
            setups.append(f"module {stage.value}")
            self.extra = nn.Linear(2, 2)

        def validation_step(self, batch, batch_idx, dataloader_idx):
            seen.append(
                (self.trainer.datamodule.factor, self.trainer.current_epoch, type(self.net[0]).__name__)
            )
            super().validation_step(batch, batch_idx)

    module = Module()
    limit = {"monitor": "val_loss/dataloader_idx_1", "mode": "min", "max_degradation": 1.0}
    callback = PostTrainingQuantization("llm_int8", dirpath=tmp_path, **limit)
    trainer = make_trainer(callback, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, datamodule=Data())
    assert setups == ["prepare", "fit", "module fit"]
    assert {kind for *_, kind in seen} == {"Linear", "Int8Linear"}
    assert {factor for factor, *_ in seen} == {1.0}
    assert seen[-1][1] == trainer.current_epoch == 1
    assert all(row.output_error < 0.1 for row in callback.report.quantized if row.name != "extra")
    assert set(callback.metrics_after) == {
        f"{name}/dataloader_idx_{index}" for name in ("val_acc", "val_loss") for index in (0, 1)
    }


def noisy_last_layer(module):
    """Make one layer lose much when it is quantized: one weight so large that the others vanish."""
    with torch.no_grad():
        module.net[3].weight[:, 0] = 3000.0
        module.net[0].weight[0] = 0.0
        module.net[0].bias[0] = -1.0


def spoil(name="lightning.pytorch"):
    class SpoilWeights(namespace(name).Callback):
        def on_train_end(self, trainer, pl_module):
            noisy_last_layer(pl_module)

    return SpoilWeights()


def test_the_worst_layer_stays_in_floating_point_until_the_limit_holds(tmp_path):
    module = make_module()
    callback = PostTrainingQuantization(
        dirpath=tmp_path,
        source="last",
        monitor="val_acc",
        mode="max",
        max_degradation=0.05,
        degradation="absolute",
    )
    fit(module, spoil(), callback, max_epochs=8)
    assert [attempt.kept for attempt in callback.attempts] == [(), ("net.3",)]
    assert callback.attempts[0].degradation > 0.05 >= callback.attempts[1].degradation
    assert callback.metrics_after["val_acc"] == pytest.approx(callback.metrics_before["val_acc"], abs=0.05)
    again = load_quantized(callback.path, type(module))
    assert type(again.net[3]) is nn.Linear
    assert type(again.net[0]).__name__ == "Int8Linear"


def test_a_missed_limit_fails_the_export_and_not_the_run(tmp_path):
    module = make_module()
    callback = PostTrainingQuantization(
        dirpath=tmp_path / "out",
        source="last",
        monitor="val_acc",
        mode="max",
        max_degradation=0.05,
        max_kept_layers=0,
    )
    with pytest.warns(
        UserWarning, match=r"exported nothing: the relative degradation of `val_acc`(.|\n)*all layers"
    ):
        trainer = fit(module, spoil(), callback, max_epochs=8)
    assert trainer.state.status == "finished"
    assert callback.path is None
    assert len(callback.report.quantized) == 2
    assert not (tmp_path / "out").exists()


def test_the_monitor_of_the_checkpoint_callback_is_taken(tmp_path):
    callback = PostTrainingQuantization(max_degradation=0.5)
    fit(make_module(), callback, checkpoint(tmp_path))
    attempt = callback.attempts[0]
    before, after = callback.metrics_before["val_loss"], callback.metrics_after["val_loss"]
    assert attempt.degradation == pytest.approx((after - before) / before, abs=1e-12)
    assert callback.path == tmp_path / "int8"


def test_last_weights_in_half_are_taken_from_the_masters(tmp_path):
    from lightning_memprec.plugins.master_weights import MasterWeightPrecision

    module = make_module()
    callback = PostTrainingQuantization(dirpath=tmp_path, source="last")
    fit(module, callback, plugins=[MasterWeightPrecision("bf16-master")])
    exported = load_quantized(callback.path, type(module))
    assert exported.net[0].bias.dtype == torch.float32
    masters = module.state_dict()["net.0.bias"]
    assert masters.dtype == torch.float32
    assert torch.equal(exported.net[0].bias, masters)
    assert not torch.equal(masters.bfloat16().float(), masters)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions(tmp_path, precision):
    callback = PostTrainingQuantization(dirpath=tmp_path)
    fit(make_module(), callback, precision=precision)
    assert callback.path.exists()
    # bfloat16 has 8 bits; int8 weights change these metrics less than that.
    assert callback.metrics_after["val_loss"] == pytest.approx(callback.metrics_before["val_loss"], rel=0.05)
    bias = load_quantized(callback.path, make_module()).net[0].bias
    assert bias.dtype == (torch.float64 if precision == "64-true" else torch.float32)


@pytest.mark.parametrize("kind", ["WeightAveraging", "StochasticWeightAveraging"])
def test_averaged_weights_are_taken(tmp_path, kind):
    callbacks = namespace().callbacks
    average = (
        callbacks.WeightAveraging()
        if kind == "WeightAveraging"
        else callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    )
    module = make_module()
    callback = PostTrainingQuantization(dirpath=tmp_path, source="averaged")
    fit(module, callback, average, max_epochs=4)  # Afterwards the module holds the average itself.
    exported = load_quantized(callback.path, type(module))
    assert torch.equal(exported.net[0].bias, module.net[0].bias.detach())


def test_averaged_weights_need_a_callback_that_averages(tmp_path):
    error = namespace().utilities.exceptions.MisconfigurationException
    with pytest.raises(error, match="no callback averages"):
        fit(make_module(), PostTrainingQuantization(source="averaged"))


def test_a_limit_needs_a_metric_and_a_validation(tmp_path):
    error = namespace().utilities.exceptions.MisconfigurationException
    with pytest.raises(error, match="Give `monitor`"):
        fit(make_module(), PostTrainingQuantization(max_degradation=0.1))
    with pytest.raises(error, match="this run has none"):
        fit(
            make_module(),
            PostTrainingQuantization(max_degradation=0.1, monitor="x", mode="max"),
            limit_val_batches=0,
        )


def test_an_unknown_metric_is_named(tmp_path):
    callback = PostTrainingQuantization(
        dirpath=tmp_path / "out", max_degradation=0.1, monitor="val_f1", mode="max"
    )
    with pytest.warns(UserWarning, match="val_f1") as caught:
        fit(make_module(), callback)
    early, late = [str(w.message) for w in caught if "val_f1" in str(w.message)]
    assert "monitors `val_f1`, which is not among the metrics so far: ['val_acc', 'val_loss']" in early
    assert "`val_f1` is not among the validation metrics ['val_acc', 'val_loss']" in late
    assert callback.path is None


def test_without_validation_the_export_is_not_measured(tmp_path):
    callback = PostTrainingQuantization(dirpath=tmp_path)
    fit(make_module(), callback, limit_val_batches=0)
    assert callback.metrics_before == callback.metrics_after == {}
    assert callback.path.exists()


def test_fast_dev_run_measures_and_writes_nothing(tmp_path):
    callback = PostTrainingQuantization(dirpath=tmp_path / "out")
    fit(make_module(), callback, fast_dev_run=True)
    assert set(callback.metrics_after) == {"val_acc", "val_loss"}
    assert callback.path is None
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_run_that_breaks_off_exports_nothing(tmp_path, error):
    def training_step(self, batch, batch_idx):
        raise error("broken")

    callback = PostTrainingQuantization(dirpath=tmp_path / "out")
    import signal

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
            fit(make_module(training_step=training_step), callback)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning turns Ctrl+C off and exits.
    assert callback.path is None
    assert not (tmp_path / "out").exists()


def test_a_fault_of_the_export_does_not_reach_the_run(tmp_path):
    class Block(namespace().Callback):
        def on_train_end(self, trainer, pl_module):
            (tmp_path / "out").write_text("a file where the folder should be")

    callback = PostTrainingQuantization(dirpath=tmp_path / "out")
    with pytest.warns(UserWarning, match="exported nothing: (NotADirectory|FileExists)Error"):
        trainer = fit(make_module(), Block(), callback)
    assert trainer.state.status == "finished"
    assert callback.path is None


def test_a_fault_of_a_logger_does_not_reach_the_run(tmp_path):
    class Logger(namespace().loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step=None):
            if any(key.startswith("memprec/quantization/") for key in metrics):
                raise ConnectionError("no server")

    callback = PostTrainingQuantization(dirpath=tmp_path / "out")
    with pytest.warns(UserWarning, match="exported nothing: ConnectionError: no server"):
        fit(make_module(), callback, logger=Logger())
    assert callback.path is None


@pytest.mark.slow
def test_persistent_workers_serve_again_afterwards(tmp_path):
    val = loader(seed=8, num_workers=1, persistent_workers=True)
    callback = PostTrainingQuantization(dirpath=tmp_path, source="last")
    module = make_module()
    trainer = fit(module, callback, val=val)
    result = trainer.validate(module, val, verbose=False)[0]
    close(result, callback.metrics_before)


def test_a_module_that_diverged_is_named(tmp_path):
    class Break(namespace().Callback):
        def on_train_end(self, trainer, pl_module):
            nn.init.constant_(pl_module.net[3].weight, float("nan"))

    callback = PostTrainingQuantization(dirpath=tmp_path)
    with pytest.warns(UserWarning, match="`net.3.weight` cannot be quantized"):
        fit(make_module(), Break(), callback)


def test_a_second_fit_exports_anew(tmp_path):
    module = make_module()
    callback = PostTrainingQuantization(dirpath=tmp_path, source="last")
    trainer = fit(module, callback)
    first, bias = callback.metrics_before, load_quantized(callback.path, type(module)).net[0].bias.clone()
    trainer.fit_loop.max_epochs += 2
    trainer.fit(module, loader(shuffle=True), loader(seed=8))
    assert callback.metrics_before != first
    assert len(callback.attempts) == 1
    again = load_quantized(callback.path, type(module))
    assert not torch.equal(again.net[0].bias, bias)
    assert torch.equal(again.net[0].bias, module.net[0].bias)
    assert isinstance(module.net[0], nn.Linear)


def test_metrics_are_logged_under_own_names(tmp_path):
    logged = {}

    class Logger(namespace().loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step=None):
            logged.update(metrics)

    callback = PostTrainingQuantization(dirpath=tmp_path)
    fit(make_module(), callback, logger=Logger())
    ours = {key: value for key, value in logged.items() if key.startswith("memprec/quantization/")}
    assert ours == {
        "memprec/quantization/float_bytes": callback.report.bytes_before,
        "memprec/quantization/int8_bytes": callback.report.bytes_after,
        "memprec/quantization/kept_layers": 0,
        **{f"memprec/quantization/{k}_before": v for k, v in callback.metrics_before.items()},
        **{f"memprec/quantization/{k}_after": v for k, v in callback.metrics_after.items()},
    }


def test_a_part_of_the_module_and_of_its_layers(tmp_path):
    callback = PostTrainingQuantization(
        "llm_int8", dirpath=tmp_path, submodule="net", exclude=["3"], scheme={"outlier_threshold": 1.0}
    )
    module = make_module()
    fit(module, callback)
    net = load_quantized(callback.path, make_module().net)
    assert type(net[3]) is nn.Linear
    assert callback.report.layers[0].outlier_columns == 6  # Gaussian features, all of which pass 1.
    assert callback.report.layers[0].output_error < 0.05


def test_lightning_tests_the_exported_checkpoint(tmp_path):
    from lightning_memprec.quantization.checkpoint import restore_int8_layers

    def on_load_checkpoint(self, saved):
        restore_int8_layers(self, saved)

    module = make_module(on_load_checkpoint=on_load_checkpoint)
    callback = PostTrainingQuantization(dirpath=tmp_path, filename="int8.ckpt")
    fit(module, callback)
    again = type(module).load_from_checkpoint(callback.path, weights_only=True)
    result = make_trainer().validate(again, loader(seed=8), verbose=False)[0]
    close(result, callback.metrics_after)
    fresh = make_module(on_load_checkpoint=on_load_checkpoint)
    trainer = make_trainer()
    result = trainer.validate(
        fresh, loader(seed=8), verbose=False, ckpt_path=callback.path, weights_only=True
    )[0]
    close(result, callback.metrics_after)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fp4"}, "no method 'fp4'"),
        ({"mode": "best"}, "`mode` must be one of"),
        ({"source": "first"}, "`source` must be one of"),
        ({"degradation": "x"}, "`degradation` must be one of"),
        ({"format": "gguf"}, "`format` must be one of"),
        ({"max_degradation": -0.1}, "at least 0, got -0.1"),
        ({"max_degradation": float("nan")}, "at least 0, got nan"),
        ({"max_kept_layers": -1}, "at least 0"),
        ({"calibration_batches": 0}, "at least 1"),
        ({"filename": "a/b"}, "without folders"),
        ({"scheme": {"bits": 9}}, "from 2 to 8"),
        # Not for the user to choose: several devices must agree on it.
        ({"scheme": {"exact_outliers": True}}, "no parts"),
        ({"scheme": {"bit": 4}}, r"no parts \['bit'\]\. Choose among: .*bits"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        PostTrainingQuantization(**options)
