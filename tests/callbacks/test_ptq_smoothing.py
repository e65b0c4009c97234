"""Smoothing after ``fit``: in the exported copy only."""

from __future__ import annotations

import pytest
import torch

from lightning_memprec.callbacks.post_training_quantization import PostTrainingQuantization
from lightning_memprec.quantization.checkpoint import load_quantized

from .ptq_runs import data, fit, make_module

STATIC = {"activations": "static"}


def with_a_large_feature():
    """Make one feature a hundred times larger than the others, which the layer behind it undoes."""
    module = make_module()
    with torch.no_grad():
        for parameter in module.net[0].parameters():
            parameter[0] *= 100
        module.net[3].weight[:, 0] /= 100
    return module


def test_the_copy_is_smoothed_and_the_run_is_not(tmp_path):
    exports, runs, notes = {}, {}, {}
    for smoothing in (None, 0.8):
        runs[smoothing] = with_a_large_feature()
        callback = PostTrainingQuantization(
            "vectorwise", tmp_path / str(smoothing), scheme=STATIC, source="last", smoothing=smoothing
        )
        fit(runs[smoothing], callback, max_epochs=1)
        exports[smoothing] = load_quantized(callback.path, type(runs[smoothing])).eval()
        notes[smoothing] = {row.name: row.note for row in callback.report.quantized}
    for name, value in runs[None].state_dict().items():
        assert torch.equal(value, runs[0.8].state_dict()[name])
    assert notes[None] == {"net.0": None, "net.3": None}
    assert notes[0.8]["net.3"] is None
    assert "no layer before it was found" in notes[0.8]["net.0"]
    with torch.no_grad():
        exact = runs[None].eval()(data()[0])
        errors = [(net(data()[0]) - exact).norm() / exact.norm() for net in exports.values()]
    assert errors[1] < errors[0]
    assert errors[1] < 0.05  # 8 bits.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": STATIC, "smoothing": 2.0}, "must be larger than 0"),
        ({"smoothing": 0.8}, "one static scale"),
    ],
    ids=["strength", "scheme"],
)
def test_it_is_refused_before_the_run(options, message):
    with pytest.raises(ValueError, match=message):
        PostTrainingQuantization("vectorwise", **options)
