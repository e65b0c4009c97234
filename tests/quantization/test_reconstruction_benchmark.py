"""The benchmark of methods that learn judges by rows that no method sees, and counts what it says it counts."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch.nn import functional as F

from benchmarks import reconstruction
from benchmarks.reconstruction import Row, table
from benchmarks.reconstruction_errors import Aim, aimed_errors, errors_in_place, layer_errors
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


AIMS = {
    "teacher": (Aim(("3", "5"), student=False, same_inputs=False), False, False),
    "student": (Aim(("3", "5"), student=True, same_inputs=False), True, False),
    "student, same inputs": (Aim(("3", "5"), student=True, same_inputs=True), True, True),
}


@pytest.mark.parametrize(("aim", "student", "same"), AIMS.values(), ids=AIMS)
def test_what_a_method_makes_small_is_measured_on_its_own_inputs(subject, aim, student, same):
    rounded, nearest = copy.deepcopy(subject.net), copy.deepcopy(subject.net)
    quantize_(rounded, "gptq", bits=4, calibration=subject.calibration)
    quantize_(nearest, bits=4)
    found = aimed_errors(subject, rounded, nearest, aim)
    exact = given = subject.test[0].flatten(1)
    with torch.no_grad():
        for name in ("1", "3", "5"):
            index = int(name)
            wanted = subject.net[index](given if same else exact)
            errors = [float((net[index](given) - wanted).square().sum()) for net in (rounded, nearest)]
            if name in aim.parts:
                assert found[name] == pytest.approx(errors[0] / errors[1], rel=1e-3)
            exact = subject.net[index](exact).relu()
            given = rounded[index](given).relu() if student else exact
    assert list(found) == list(aim.parts)


def test_each_method_is_judged_by_what_it_makes_small(subject):
    layers = tuple(subject.layers())
    wanted = {
        "gptq": Aim(layers, True, True), "gptq, parallel": Aim(layers, False, True),
        "adaquant": Aim(layers, True, False), "adaquant, parallel": Aim(layers, False, False),
        "zeroquant": Aim(layers, False, False), "brecq": Aim(layers, True, False),
    }  # fmt: skip
    assert {row: reconstruction.aim(subject, row) for row in wanted} == wanted
    assert reconstruction.aim(subject, "weight_only") is None


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
    assert float(cells["| gptq"][4]) < 0.5
    assert cells["| gptq"][3] == cells["| gptq"][6] == "3 of 3"


def test_layers_that_got_worse_are_named():
    rows = {
        ("scheme", "method"): Row({"a, 0": 0.5, "b, 0": 2.0}, {"c, 0": 0.25, "d, 0": 4.0}, metrics=[3.25])
    }
    lines = list(table(rows, "perplexity"))
    assert "| method | 1.000 | 2.000 | 1 of 2 | 1.000 | 4.000 | 1 of 2 |  |  |  |  | 3.250 |  |  |" in lines
    assert lines[-2].endswith(
        "on the float model's inputs, errs more than rounding to nearest on 1 (layer, training): b, 0: 2.000"
    )
    assert lines[-1].endswith(
        "on its own inputs, errs more than rounding to nearest on 1 (layer, training): d, 0: 4.000"
    )


def test_smollm2_needs_its_folder(capsys):
    with pytest.raises(SystemExit):
        reconstruction.main(["--models", "smollm2"])
    assert "--smollm2 FOLDER" in capsys.readouterr().err
