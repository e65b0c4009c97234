"""Small problems of rounding with correlated inputs, and references that are slow and plain."""

from __future__ import annotations

import itertools

import torch

from lightning_memprec.quantization.affine import integer_range, quantize_matrix
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.hessian import Grid, damped

SCHEMES = {
    "3 bits": Scheme(bits=3),
    "4 bits, zero points": Scheme(bits=4, mapping="affine"),
    "4 bits, groups": Scheme(bits=4, weight_granularity="group", group_size=2),
    "4 bits, one scale": Scheme(bits=4, weight_granularity="tensor"),
    "8 bits": Scheme(),
}
# One scale for all, because with one for each row the largest of its few weights would have no error.
ENUMERABLE = Scheme(bits=3, weight_granularity="tensor")


def problem(rows, columns, scheme, seed=0):
    """Return weights, a Hessian of correlated inputs and the grid of rounding to nearest, in FP64."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator)
    inputs = torch.randn(40, columns, generator=generator) @ torch.randn(
        columns, columns, generator=generator
    )
    quantized = quantize_matrix(
        matrix,
        bits=scheme.bits,
        mapping=scheme.mapping,
        granularity=scheme.weight_granularity,
        group_size=scheme.group_size,
    )
    hessian = damped(inputs.T.double() @ inputs.double(), 0.01)
    return matrix.double(), hessian, Grid.of(quantized, scheme)


def errors(matrix, hessian, grid, integers):
    """Return each row's squared error of the output, row by row."""
    zero = 0 if grid.zero_point is None else grid.zero_point.double()
    misses = matrix - (integers.double() - zero) * grid.scale
    return torch.stack([row @ hessian @ row for row in misses])


def best_errors(matrix, hessian, grid):
    """Return each row's smallest error among all integers, enumerated."""
    low, high = integer_range(grid.bits, grid.mapping)
    every = torch.tensor(list(itertools.product(range(low, high + 1), repeat=matrix.shape[1])))
    found = []
    for row in range(len(matrix)):
        own = grid.rows(slice(row, row + 1))
        many = matrix[row : row + 1].expand(len(every), -1)
        zero = None if own.zero_point is None else own.zero_point.expand(len(every), -1)
        grids = own._replace(scale=own.scale.expand(len(every), -1), zero_point=zero)
        found.append(errors(many, hessian, grids, every).min())
    return torch.stack(found)


def round_with_compensation(row, hessian, grid, order=None):
    """Round one row weight by weight, the rest set to the exact optimum each time by solving for it afresh.

    Which comes next is given by ``order``, else by how much that optimum grows. Returns integers and the order.
    """
    target, integers = row.clone(), torch.zeros(len(row), dtype=torch.int8)
    real, taken, left = torch.zeros_like(row), [], list(range(len(row)))
    while left:
        fixed = torch.tensor(taken, dtype=torch.long)
        free = torch.tensor(left)
        # Minimise (row - w) H (row - w)' over the free part of w.
        pull = hessian[free][:, fixed] @ (row - real)[fixed]
        target[free] = row[free] + torch.linalg.solve(hessian[free][:, free], pull)
        rounded = grid.round(target[None])[0]
        misses = target - grid.real(rounded[None])[0]
        if order is None:
            cost = misses[free] ** 2 / torch.linalg.inv(hessian[free][:, free]).diagonal()
            outside = misses[free].abs() > grid.scale[0][free] / 2 * (1 + 1e-9)
            chosen = left[int((misses[free].abs() if outside.any() else -cost).argmax())]
        else:
            chosen = int(order[len(taken)])
        integers[chosen] = rounded[chosen]
        real[chosen] = target[chosen] - misses[chosen]
        taken.append(chosen)
        left.remove(chosen)
    return integers, torch.tensor(taken)
