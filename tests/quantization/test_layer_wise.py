"""Coordinate descent over integers, against all integers there are."""

from __future__ import annotations

import pytest
import torch

from lightning_memprec.quantization.affine import integer_range
from lightning_memprec.quantization.reconstruction.gptq import gptq
from lightning_memprec.quantization.reconstruction.layer_wise import LayerWise, descend

from .tiny_problems import ENUMERABLE, SCHEMES, best_errors, errors, problem


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_in_the_end_no_other_integer_in_any_one_place_is_better(scheme):
    matrix, hessian, grid = problem(3, 9, scheme)
    integers = LayerWise(sweeps=30).solve(matrix, hessian, grid)
    found = errors(matrix, hessian, grid, integers)
    low, high = integer_range(grid.bits, grid.mapping)
    for column in range(9):
        for integer in range(low, high + 1):
            other = integers.clone()
            other[:, column] = integer
            # Equal but for rounding in FP64.
            assert (errors(matrix, hessian, grid, other) >= found * (1 - 1e-9)).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_no_row_is_worse_than_rounding_to_nearest_or_gptq(scheme, seed):
    # More columns than one block.
    matrix, hessian, grid = problem(20, 150, scheme, seed)
    found = errors(matrix, hessian, grid, LayerWise().solve(matrix, hessian, grid))
    order = hessian.diagonal().argsort(descending=True)
    for other in (grid.round(matrix), gptq(matrix, hessian, grid, order=order)):
        assert (found <= errors(matrix, hessian, grid, other) * (1 + 1e-9)).all()


@pytest.mark.parametrize("columns", [2, 3])
def test_nine_tenths_of_the_way_to_the_best_of_all_integers(columns):
    matrix, hessian, grid = problem(60, columns, ENUMERABLE)
    best = best_errors(matrix, hessian, grid)
    found = errors(matrix, hessian, grid, LayerWise().solve(matrix, hessian, grid))
    nearest = errors(matrix, hessian, grid, grid.round(matrix))
    assert (found >= best * (1 - 1e-9)).all()
    reached, before = ((error <= best * (1 + 1e-9)).sum() for error in (found, nearest))
    assert reached > before
    assert found.sum() - best.sum() < 0.1 * (nearest.sum() - best.sum())


def test_each_sweep_lowers_the_error_or_nothing_changes():
    matrix, hessian, grid = problem(20, 150, SCHEMES["3 bits"])
    integers, last = grid.round(matrix), torch.inf
    for _ in range(30):
        after = descend(matrix, hessian, grid, integers, sweeps=1)
        error = float(errors(matrix, hessian, grid, after).sum())
        if torch.equal(after, integers):
            break
        assert error < last
        integers, last = after, error
    else:
        pytest.fail("30 sweeps did not come to an end")
    assert torch.equal(integers, descend(matrix, hessian, grid, grid.round(matrix), sweeps=30))
