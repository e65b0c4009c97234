"""Methods that learn from data, after ``fit``."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from lightning_memprec.callbacks.post_training_quantization import PostTrainingQuantization
from lightning_memprec.quantization.checkpoint import load_quantized
from lightning_memprec.quantization.convert import quantize_

from .ptq_runs import data, fit, make_module


@pytest.mark.parametrize("method", ["layer_wise", "gptq", "obq"])
def test_the_callback_learns_from_training_batches(tmp_path, method):
    callback = PostTrainingQuantization(method=method, dirpath=tmp_path, scheme={"bits": 4}, source="last")
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
