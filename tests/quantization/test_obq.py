"""Optimal Brain Quantization, against solving for the remaining weights afresh after each rounding."""

from __future__ import annotations

import pytest
import torch

from lightning_memprec.quantization.reconstruction import obq as module
from lightning_memprec.quantization.reconstruction.obq import obq

from .tiny_problems import ENUMERABLE, SCHEMES, best_errors, errors, problem, round_with_compensation


@pytest.mark.parametrize("size", [2**25, 200], ids=["rows together", "rows in blocks"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_each_row_takes_the_order_and_the_integers_of_the_definition(monkeypatch, scheme, size):
    monkeypatch.setattr(module, "_NUMBERS", size)
    matrix, hessian, grid = problem(6, 9, scheme)
    integers, orders = obq(matrix, hessian, grid)
    for row in range(6):
        expected = round_with_compensation(matrix[row], hessian, grid.rows(slice(row, row + 1)))
        assert torch.equal(orders[row], expected[1])
        assert torch.equal(integers[row], expected[0])
    assert len({tuple(order) for order in orders.tolist()}) > 1


def test_the_order_can_be_given():
    matrix, hessian, grid = problem(4, 9, SCHEMES["3 bits"])
    order = torch.tensor([3, 1, 8, 0, 2, 4, 7, 5, 6])
    integers, orders = obq(matrix, hessian, grid, order=order)
    assert torch.equal(orders, order.expand(4, -1))
    for row in range(4):
        expected, _ = round_with_compensation(matrix[row], hessian, grid.rows(slice(row, row + 1)), order)
        assert torch.equal(integers[row], expected)


def test_weights_outside_of_the_grid_go_first():
    matrix, hessian, grid = problem(1, 6, SCHEMES["4 bits, one scale"])
    grid = grid._replace(scale=grid.scale * 0.5)
    outside = (matrix - grid.real(grid.round(matrix))).abs() > grid.scale / 2
    assert outside.any()
    _, orders = obq(matrix, hessian, grid)
    assert int(orders[0, 0]) == int((matrix - grid.real(grid.round(matrix))).abs().argmax())


@pytest.mark.parametrize("columns", [2, 3])
def test_errors_lie_between_the_best_of_all_integers_and_rounding_to_nearest(columns):
    matrix, hessian, grid = problem(40, columns, ENUMERABLE)
    best, nearest = best_errors(matrix, hessian, grid), errors(matrix, hessian, grid, grid.round(matrix))
    found = errors(matrix, hessian, grid, obq(matrix, hessian, grid)[0])
    assert (found >= best * (1 - 1e-9)).all()
    assert found.sum() < nearest.sum()


def test_independent_inputs_leave_nothing_to_make_up_for():
    matrix, _, grid = problem(5, 8, SCHEMES["4 bits, zero points"])
    hessian = torch.rand(8, generator=torch.Generator().manual_seed(0)).double().add(0.1).diag()
    assert torch.equal(obq(matrix, hessian, grid)[0], grid.round(matrix))
