"""Methods that learn from data, after ``fit``."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from lightning_memprec.callbacks.post_training_quantization import PostTrainingQuantization
from lightning_memprec.quantization.calibration import InputProducts
from lightning_memprec.quantization.checkpoint import load_quantized
from lightning_memprec.quantization.convert import quantize_

from .ptq_runs import data, fit, loader, make_module

METHODS = {
    "layer_wise": {},
    "gptq": {},
    "obq": {},
    "adaquant": {"iterations": 20},
    "zeroquant": {"iterations": 50, "learning_rate": 0.02},
    "brecq": {"iterations": 50, "learning_rate": 0.2},
}


@pytest.mark.parametrize(("method", "options"), METHODS.items(), ids=METHODS)
def test_the_callback_learns_from_training_batches(tmp_path, method, options):
    callback = PostTrainingQuantization(
        method, tmp_path, scheme={"bits": 4}, source="last", method_options=options
    )
    module = make_module()
    fit(module, callback, max_epochs=1)
    nearest = copy.deepcopy(module)
    quantize_(nearest, bits=4)
    again = load_quantized(callback.path, type(module)).eval()
    assert not torch.equal(again.net[3].weight, nearest.net[3].weight)
    report = json.loads(next(tmp_path.rglob("*report.json")).read_text())
    assert report["method"] == method
    assert set(report["metrics_after"]) == {"val_acc", "val_loss"}
    with torch.no_grad():
        exact = module.eval()(data()[0])
        assert (again(data()[0]) - exact).norm() < 0.2 * exact.norm()  # 4 bits.


def test_options_of_the_method_reach_it(tmp_path):
    options = {"act_order": True, "sequential": False}
    reports = []
    for number, given in enumerate((None, options)):
        callback = PostTrainingQuantization(
            method="gptq", dirpath=tmp_path, filename=f"{number}", scheme={"bits": 3}, method_options=given
        )
        fit(make_module(), callback, max_epochs=1, train=loader(count=64))
        reports.append(callback.report)
    assert [row.sqnr_db for row in reports[0].layers] != [row.sqnr_db for row in reports[1].layers]


def test_a_wrong_option_is_refused_before_the_run():
    with pytest.raises(ValueError, match=r"'gptq' has no option 'order'\. Its options are: .*act_order"):
        PostTrainingQuantization(method="gptq", method_options={"order": True})
    with pytest.raises(ValueError, match="'weight_only' has no options"):
        PostTrainingQuantization(method_options={"act_order": True})


def test_the_export_of_four_bits_is_packed_and_loads_again(tmp_path):
    module = make_module()
    callback = PostTrainingQuantization(dirpath=tmp_path, scheme={"bits": 4}, source="last")
    fit(module, callback, max_epochs=1)
    tensors = load_file(callback.path / "model.safetensors")
    assert tensors["net.0.weight_packed"].shape == (16, 1)  # Six integers of 4 bits a row.
    again = load_quantized(callback.path, type(module)).eval()
    expected = copy.deepcopy(module).eval()
    quantize_(expected, bits=4)
    assert torch.equal(again(data()[0]), expected(data()[0]))
    assert callback.report.bytes_after == sum(t.nbytes for t in (*expected.parameters(), *expected.buffers()))


@pytest.mark.parametrize("method", ["gptq", "llm_int8"])
def test_outliers_and_a_limit_together_with_data(tmp_path, method):
    scheme = {"bits": 4, "activations": "token", "outlier_threshold": 2.0}
    callback = PostTrainingQuantization(
        method=method,
        dirpath=tmp_path,
        scheme=scheme,
        monitor="val_loss",
        mode="min",
        max_degradation=0.5,
        source="last",
    )
    module = make_module()
    fit(module, callback, max_epochs=1)
    assert callback.path is not None
    assert all(row.outlier_columns is not None for row in callback.report.quantized)
    again = load_quantized(callback.path, type(module)).eval()
    exact = module.eval()(data()[0])
    assert (again(data()[0]) - exact).norm() < 0.3 * exact.norm()  # 4 bits.


def padded_text():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 12, (16, 7), generator=generator)
    mask = torch.arange(7) < torch.arange(16)[:, None] % 5 + 2
    return [
        {"tokens": row, "attention_mask": keep, "y": row[0] % 2}
        for row, keep in zip(tokens * mask, mask, strict=True)
    ]


def tagger():
    class Tagger(LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 2)

        def training_step(self, batch, batch_idx):
            return self.head(self.embedding(batch["tokens"])).square().mean()

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Tagger()


def renamed(key):
    return [
        {("keep" if name == "attention_mask" else name): v for name, v in row.items()} if key else row
        for row in padded_text()
    ]


@pytest.mark.parametrize("key", [None, "keep"], ids=["by default", "by name"])
def test_padding_of_batches_does_not_count(tmp_path, monkeypatch, key):
    rows = []
    add = InputProducts.add
    monkeypatch.setattr(
        InputProducts, "add", lambda self, block: (rows.append(len(block)), add(self, block))[1]
    )
    batches = DataLoader(renamed(key), batch_size=8)
    callback = PostTrainingQuantization("gptq", tmp_path, mask=key, source="last", include=["head"])
    fit(tagger(), callback, max_epochs=1, train=batches, val=batches)
    assert callback.path is not None
    assert sum(rows) == int(sum(row["attention_mask"].sum() for row in padded_text()))


def normalized():
    """A module with a convolution and the batch norm that belongs to it."""
    module = make_module()
    module.net = nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 8, 3),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 2),
    )
    return module


@pytest.mark.parametrize("choice", ["fold", "retune"])
def test_batch_norms_are_folded_or_tuned_in_the_copy_only(tmp_path, choice):
    copies = {}
    for batch_norm in ("keep", choice):
        module = normalized()
        callback = PostTrainingQuantization(
            dirpath=tmp_path / batch_norm, scheme={"bits": 3}, source="last", batch_norm=batch_norm
        )
        fit(module, callback, max_epochs=1)
        copies[batch_norm] = load_file(callback.path / "model.safetensors"), module.state_dict()
    (kept, run), (changed, other) = copies.values()
    torch.testing.assert_close(run, other, rtol=0, atol=0)
    assert any(not torch.equal(kept[key], changed[key]) for key in kept)


def test_a_wrong_choice_for_batch_norms_is_refused():
    with pytest.raises(ValueError, match="`batch_norm` must be one of"):
        PostTrainingQuantization(batch_norm="drop")
