"""GPTQ, against OBQ in the same order, and as a method of ``quantize_`` and of the callback."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memprec.quantization import methods
from lightning_memprec.quantization.checkpoint import load_quantized, save_quantized
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.methods import Method, register_method
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.gptq import GPTQ, gptq
from lightning_memprec.quantization.reconstruction.obq import obq

from . import digits
from .tiny_problems import ENUMERABLE, SCHEMES, best_errors, errors, problem, round_with_compensation


@pytest.mark.parametrize("block_size", [1, 4, 128])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_it_is_obq_in_the_same_order(scheme, block_size):
    matrix, hessian, grid = problem(6, 9, scheme)
    order = torch.tensor([3, 1, 8, 0, 2, 4, 7, 5, 6])
    ordered = gptq(matrix, hessian, grid, order=order, block_size=block_size)
    assert torch.equal(ordered, obq(matrix, hessian, grid, order=order)[0])
    expected, _ = round_with_compensation(matrix[0], hessian, grid.rows(slice(0, 1)), order)
    assert torch.equal(ordered[0], expected)
    plain = gptq(matrix, hessian, grid, block_size=block_size)
    assert torch.equal(plain, obq(matrix, hessian, grid, order=torch.arange(9))[0])
    # In the order that OBQ chose for a row, it gives that row's integers.
    greedy, orders = obq(matrix, hessian, grid)
    for row in range(6):
        one = slice(row, row + 1)
        assert torch.equal(gptq(matrix[one], hessian, grid.rows(one), order=orders[row])[0], greedy[row])


@pytest.mark.parametrize("columns", [2, 3])
def test_errors_lie_between_the_best_of_all_integers_and_rounding_to_nearest(columns):
    matrix, hessian, grid = problem(40, columns, ENUMERABLE)
    best, nearest = best_errors(matrix, hessian, grid), errors(matrix, hessian, grid, grid.round(matrix))
    found = errors(matrix, hessian, grid, gptq(matrix, hessian, grid))
    assert (found >= best * (1 - 1e-9)).all()
    assert found.sum() < nearest.sum()


def test_act_order_takes_the_columns_of_the_largest_inputs_first():
    matrix, hessian, grid = problem(6, 9, SCHEMES["4 bits, groups"])
    order = torch.tensor(sorted(range(9), key=lambda column: -float(hessian[column, column])))
    assert not torch.equal(order, torch.arange(9))
    found = GPTQ(act_order=True).solve(matrix, hessian, grid)
    assert torch.equal(found, gptq(matrix, hessian, grid, order=order))
    assert torch.equal(GPTQ().solve(matrix, hessian, grid), gptq(matrix, hessian, grid))


def test_inputs_that_are_always_zero_leave_rounding_to_nearest():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4))
    nearest, learned = copy.deepcopy(net), copy.deepcopy(net)
    quantize_(nearest, bits=4)
    quantize_(learned, "gptq", bits=4, calibration=[torch.zeros(10, 6)])
    assert torch.equal(nearest[0].weight, learned[0].weight)


def test_damping_that_is_too_small_says_so():
    with pytest.raises(ValueError, match="`damping` must be larger than 0 and finite, got 0"):
        GPTQ(damping=0.0)
    _, hessian, grid = problem(2, 3, Scheme())
    with pytest.raises(
        ValueError, match=r"products of 3 features are not positive definite\. Raise `damping`"
    ):
        gptq(torch.ones(2, 3).double(), -hessian, grid)


METHODS = ("layer_wise", "gptq", "obq")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.extended if kind == "conv" else ()) for kind in digits.NETS]
)
@pytest.mark.parametrize("method", METHODS)
def test_every_layer_errs_less_on_test_images_than_rounding_to_nearest_at_4_bits(method, kind):
    exact = digits.trained(kind)
    nearest, learned = copy.deepcopy(exact), copy.deepcopy(exact)
    quantize_(nearest, bits=4)
    report = quantize_(learned, method, bits=4, calibration=digits.calibration())
    before, after = digits.test_errors(exact, nearest), digits.test_errors(exact, learned)
    assert before.keys() == {row.name for row in report.quantized}
    assert {name for name in before if not after[name] < before[name]} == set()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "scheme", [{"bits": 4, "group_size": 9, "mapping": "affine"}, {"activations": "token"}], ids=str
)
def test_results_repeat_and_files_hold_them(tmp_path, method, scheme):
    first, second = digits.trained("conv"), digits.trained("conv")
    quantize_(first, method, calibration=digits.calibration(100), **scheme)
    torch.manual_seed(99)
    quantize_(second, method, calibration=digits.calibration(100), **scheme)
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    save_quantized(first, tmp_path / "net.safetensors")
    again = load_quantized(tmp_path / "net.safetensors", digits.build("conv"))
    images = digits.images()[2][:20]
    with torch.no_grad():
        assert torch.equal(first(images), again(images))


def test_options_are_those_of_a_method_that_one_registers(monkeypatch):
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    register_method(
        Method("mine", Scheme(bits=4), GPTQ(act_order=True, sequential=False), needs_calibration=True)
    )
    plain, ordered = digits.trained("mlp"), digits.trained("mlp")
    quantize_(plain, "gptq", bits=4, calibration=digits.calibration(100))
    report = quantize_(ordered, "mine", calibration=digits.calibration(100))
    assert report.method == "mine"
    assert not torch.equal(plain[1].weight, ordered[1].weight)
