"""What is refused, or said, before a whole run was made; and what the closing line says."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from torch import nn

from lightning_memprec.callbacks._ptq_checks import path_problem
from lightning_memprec.callbacks.post_training_quantization import PostTrainingQuantization
from lightning_memprec.quantization.checkpoint import load_quantized

from .ptq_runs import checkpoint, fit, make_module
from .runs import NAMESPACES, namespace


def stopping(name="lightning.pytorch", **options):
    return namespace(name).callbacks.EarlyStopping(**{"monitor": "val_loss", "mode": "min", **options})


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("teacher", [checkpoint, stopping], ids=["ModelCheckpoint", "EarlyStopping"])
def test_the_mode_is_that_of_the_callback_that_monitors_the_metric(tmp_path, name, teacher):
    other = teacher(tmp_path, name) if teacher is checkpoint else teacher(name)
    callback = PostTrainingQuantization(dirpath=tmp_path / "out", monitor="val_loss", max_degradation=9.0)
    fit(make_module(name), callback, other, name=name)
    before, after = callback.metrics_before["val_loss"], callback.metrics_after["val_loss"]
    assert callback.attempts[0].degradation == pytest.approx((after - before) / before, abs=1e-12)


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_limit_without_a_mode_is_refused(tmp_path, name):
    error = namespace(name).utilities.exceptions.MisconfigurationException
    callback = PostTrainingQuantization(monitor="val_acc", max_degradation=0.1)
    with pytest.raises(error, match=r"larger or a smaller `val_acc`(.|\n)*`mode='max'` or `mode='min'`"):
        fit(make_module(name), callback, checkpoint(tmp_path, name), name=name)


def test_a_mode_that_is_given_wins(tmp_path):
    callback = PostTrainingQuantization(
        dirpath=tmp_path / "out", monitor="val_loss", mode="max", max_degradation=9.0
    )
    fit(make_module(), callback, checkpoint(tmp_path))
    before, after = callback.metrics_before["val_loss"], callback.metrics_after["val_loss"]
    assert callback.attempts[0].degradation == pytest.approx((before - after) / before, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": ["nett.3"]}, "'nett.3' matches no module.*names begin with"),
        ({"include": ["Lineal"]}, "'Lineal' matches no module"),
        (
            {"submodule": "model"},
            "`submodule='model'` is no part of the module. Its parts are: net, accuracy",
        ),
        ({"submodule": "net.0"}, "The model itself is a `Linear`"),
    ],
    ids=["exclude", "include", "submodule", "a layer"],
)
def test_names_of_layers_are_checked_before_the_run(tmp_path, options, message):
    steps = []
    module = make_module(on_train_start=lambda self: steps.append(1))
    error = namespace().utilities.exceptions.MisconfigurationException
    with pytest.raises(error, match=message):
        fit(module, PostTrainingQuantization(dirpath=tmp_path, **options))
    assert not steps


def test_layers_that_the_module_makes_in_its_setup_are_known(tmp_path):
    def setup(self, stage):
        self.head = nn.Linear(2, 2)

    callback = PostTrainingQuantization(dirpath=tmp_path, source="last", exclude=["head"])
    fit(make_module(setup=setup), callback)
    assert [row.name for row in callback.report.skipped] == ["head"]


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(tmp_path):
    (tmp_path / "out").write_text("a file")
    error = namespace().utilities.exceptions.MisconfigurationException
    with pytest.raises(error, match=r"out' is a file\. Choose another `dirpath`"):
        fit(make_module(), PostTrainingQuantization(dirpath=tmp_path / "out"))


def test_paths(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.ckpt").mkdir()
    assert path_problem(tmp_path / "new" / "deep" / "int8") == ""
    assert path_problem(tmp_path / "int8.safetensors") == ""
    assert path_problem(tmp_path) == ""
    assert "file' is a file" in path_problem(tmp_path / "file")
    assert "file' is a file" in path_problem(tmp_path / "file" / "deep" / "int8.ckpt")
    assert "folder.ckpt' is a folder" in path_problem(tmp_path / "folder.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.ckpt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        assert "does not allow it" in path_problem(tmp_path / "out" / "int8")
    finally:
        tmp_path.chmod(0o700)


def test_an_unknown_metric_is_named_once_and_early(tmp_path):
    epochs = []
    module = make_module(on_train_epoch_start=lambda self: epochs.append(1))
    callback = PostTrainingQuantization(dirpath=tmp_path, monitor="val_f1")
    seen = []

    class Watch(namespace().Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append(callback._monitor_seen)

    with pytest.warns(UserWarning, match="monitors `val_f1`") as caught:
        fit(module, callback, Watch(), num_sanity_val_steps=1, max_epochs=3)
    assert seen == [True]
    assert sum("val_f1" in str(warning.message) for warning in caught) == 1
    assert callback.path is not None  # There is no limit that it could break.


def test_a_module_that_logs_nothing_in_the_sanity_check_is_not_blamed(tmp_path):
    step = type(make_module()).validation_step

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            step(self, batch, batch_idx)

    callback = PostTrainingQuantization(dirpath=tmp_path, monitor="val_acc")
    fit(
        make_module(validation_step=validation_step), callback, num_sanity_val_steps=1
    )  # Warnings are errors.
    assert callback.path is not None


@pytest.mark.parametrize(
    ("kind", "weights", "metrics"),
    [
        ("best", "best checkpoint by val_loss, ", ["val_loss"]),
        ("unmonitored", "last saved weights (no metric is monitored), ", ["val_acc", "val_loss"]),
        ("none", "last weights (no best checkpoint was saved)", ["val_acc", "val_loss"]),
        ("last", "last weights: ", ["val_loss"]),
    ],
)
def test_the_closing_line_tells_weights_bytes_metrics_and_mode(tmp_path, caplog, kind, weights, metrics):
    others = (
        []
        if kind == "none"
        else [checkpoint(tmp_path, monitor=None if kind == "unmonitored" else "val_loss")]
    )
    callback = PostTrainingQuantization(dirpath=tmp_path / "out", source="last" if kind == "last" else "best")
    with caplog.at_level(logging.INFO):
        fit(make_module(), callback, *others)
    line = next(text for text in caplog.messages if text.startswith("Int8 model from"))
    assert line.startswith(f"Int8 model from {weights}")
    shown = [
        f"{name} {callback.metrics_before[name]:.5g} -> {callback.metrics_after[name]:.5g}"
        for name in metrics
    ]
    size = f"{callback.report.bytes_before} B -> {callback.report.bytes_after} B"
    mode = ["mode min"] if metrics == ["val_loss"] else []
    assert line.endswith(f"{callback.path} ({', '.join([size, *shown, *mode])})")


def test_attempts_can_be_read(tmp_path):
    callback = PostTrainingQuantization(dirpath=tmp_path)
    fit(make_module(), callback)
    (attempt,) = callback.attempts
    text = str(callback.attempts)
    assert text == f"[Attempt(kept=(), metrics={attempt.metrics}, degradation=None)]"


def test_exact_outlier_weights_stay_when_layers_are_kept(tmp_path):
    limit = {"monitor": "val_loss", "mode": "min", "max_degradation": 0.05, "max_kept_layers": 1}
    scheme = {"outlier_threshold": 2.5}
    module = make_module()

    class Rough(namespace().Callback):
        """One row so large that the other weights of its layer vanish: the first attempt must miss the limit."""

        def on_train_end(self, trainer, pl_module):
            with torch.no_grad():
                pl_module.net[3].weight[:, 0] = 3000.0
                pl_module.net[0].weight[0] = 0.0
                pl_module.net[0].bias[0] = -1.0

    callback = PostTrainingQuantization("llm_int8", dirpath=tmp_path, source="last", scheme=scheme, **limit)
    fit(module, Rough(), callback, max_epochs=8)
    first, second = callback.attempts
    assert second.kept == ("net.3",)
    assert second.report.quantized[0].outlier_columns == first.report.quantized[0].outlier_columns > 0
    exact = load_quantized(callback.path, type(module)).net[0]
    columns = exact.outlier_indices
    assert len(columns) == second.report.quantized[0].outlier_columns
    assert torch.equal(exact.outlier_weight, module.net[0].weight.detach()[:, columns])
