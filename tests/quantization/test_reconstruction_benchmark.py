"""The benchmark of methods that learn judges by rows that no method sees, and counts what it says it counts."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch.nn import functional as F

from benchmarks import reconstruction
from benchmarks.reconstruction import Row, table
from benchmarks.reconstruction_errors import errors_in_place, layer_errors
from benchmarks.reconstruction_models import SUBJECTS, python_text
from lightning_memprec import quantize_


@pytest.fixture(scope="module")
def subject():
    return SUBJECTS["mlp"](0)


def test_layers_are_fed_with_the_inputs_of_the_float_model(subject):
    rounded = copy.deepcopy(subject.net)
    quantize_(rounded, bits=4)
    found = layer_errors(subject, rounded)
    values = subject.test[0].flatten(1)
    for name in ("1", "3", "5"):
        layer = subject.net[int(name)]
        difference = F.linear(values, rounded[int(name)].dequantize() - layer.weight)
        # Differences of FP32 products: their own rounding is 1e-6 of the outputs, so 1e-4 of 4-bit errors.
        assert found[name] == pytest.approx(float(difference.detach().double().square().mean()), rel=1e-3)
        values = layer(values).relu()


def test_errors_in_place_are_those_of_the_whole_quantized_model(subject):
    rounded = copy.deepcopy(subject.net)
    quantize_(rounded, bits=4)
    errors, distance = errors_in_place(subject, rounded)
    with torch.no_grad():
        exact, found = subject.net(subject.test[0]), rounded(subject.test[0])
    assert distance == pytest.approx(float((exact - found).norm() / exact.norm()), rel=1e-5)
    # The last layer's output is the model's; the first layer sees the same input in both.
    assert errors["5"] == pytest.approx(float((exact - found).square().mean()), rel=1e-5)
    assert errors["1"] == pytest.approx(layer_errors(subject, rounded)["1"], rel=1e-5)


def test_test_rows_are_not_calibration_rows(subject):
    calibration, test = torch.cat(subject.calibration).flatten(1), torch.cat(subject.test).flatten(1)
    same = (calibration[:, None] == test[None]).all(-1)
    assert not same.any()
    paragraphs = [part for part in python_text().split("\n\n") if part]
    assert len(paragraphs) == len(set(paragraphs))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_run_prints_a_table_in_which_learning_helps(capsys):
    pytest.importorskip("torchao")
    reconstruction.main(["--models", "mlp", "--methods", "gptq", "--bits", "4", "--seeds", "1"])
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split(" | ")[0]: line.split(" | ") for line in lines if line.startswith("| ")}
    assert cells["| rounding to nearest"][1:4] == ["1.000", "1.000", "0 of 3"]
    assert float(cells["| gptq"][1]) < 0.5
    assert cells["| gptq"][3] == "3 of 3"


def test_layers_that_got_worse_are_named():
    rows = {("scheme", "method"): Row(ratios={"a, 0": 0.5, "b, 0": 2.0}, metrics=[3.25])}
    lines = list(table(rows, "perplexity"))
    assert "| method | 1.000 | 2.000 | 1 of 2 |  |  |  |  | 3.250 |  |  |" in lines
    assert lines[-1].endswith("on 1 (layer, training): b, 0: 2.000")


def test_smollm2_needs_its_folder(capsys):
    with pytest.raises(SystemExit):
        reconstruction.main(["--models", "smollm2"])
    assert "--smollm2 FOLDER" in capsys.readouterr().err
