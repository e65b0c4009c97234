"""What the order of columns and repeated sweeps do to the rounding of one layer.

Run: ``python -m benchmarks.rounding_orders``.

On the layers of a perceptron trained on digits: GPTQ beside OBQ in the same order, where both should find the same
integers, and beside OBQ in the order that each row chooses. On 512 correlated inputs: what each sweep of
``layer_wise`` gains. Errors are those on the calibration inputs, relative to rounding to nearest, at 4 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks._machine import describe_machine
from benchmarks.reconstruction_models import SUBJECTS
from lightning_memprec.quantization.affine import quantize_matrix
from lightning_memprec.quantization.calibration import InputProducts, feed
from lightning_memprec.quantization.measure import call
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.gptq import gptq
from lightning_memprec.quantization.reconstruction.hessian import Grid, damped, row_errors
from lightning_memprec.quantization.reconstruction.layer_wise import descend
from lightning_memprec.quantization.reconstruction.obq import obq

_SCHEME = Scheme(bits=4)
_SWEEPS = 12


def grid_of(matrix: Tensor) -> Grid:
    return Grid.of(quantize_matrix(matrix, bits=_SCHEME.bits), _SCHEME)


def orders() -> None:
    """Print how many integers of GPTQ and OBQ differ on trained layers, and the errors of both."""
    subject = SUBJECTS["mlp"](0)
    layers = subject.layers()
    products = {name: InputProducts() for name in layers}
    feed(subject.net, subject.calibration, call, layers, lambda name, rows: products[name].add(rows))
    print(
        "\n| layer | integers that differ, same order | GPTQ | integers that differ, greedy | OBQ, greedy |"
    )
    print("|---|---|---|---|---|")
    for name, layer in layers.items():
        assert isinstance(layer, nn.Linear)
        hessian, matrix = damped(products[name].learned_from[0], 0.01), layer.weight.detach()
        grid, exact = grid_of(matrix), matrix.double()
        nearest = row_errors(exact - grid.real(grid.round(exact)), hessian).sum()
        left_to_right = torch.arange(matrix.shape[1])
        found = gptq(exact, hessian, grid)
        same, greedy = obq(exact, hessian, grid, order=left_to_right)[0], obq(exact, hessian, grid)[0]
        shares = [float(row_errors(exact - grid.real(x), hessian).sum() / nearest) for x in (found, greedy)]
        print(
            f"| {layer.in_features} to {layer.out_features} | {int((found != same).sum())} of {found.numel()} |"
            f" {shares[0]:.4f} | {float((found != greedy).double().mean()):.1%} | {shares[1]:.4f} |"
        )


def sweeps() -> None:
    """Print the error of GPTQ with ``act_order``, and after each sweep of coordinate descent from there."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(256, 512, generator=generator)
    inputs = torch.randn(2048, 512, generator=generator) @ torch.randn(512, 512, generator=generator)
    hessian, grid, exact = (
        damped(inputs.t().double() @ inputs.double(), 0.01),
        grid_of(matrix),
        matrix.double(),
    )
    nearest = row_errors(exact - grid.real(grid.round(exact)), hessian).sum()
    integers = gptq(exact, hessian, grid, order=hessian.diagonal().argsort(descending=True))
    shares = []
    for _ in range(_SWEEPS + 1):
        shares.append(float(row_errors(exact - grid.real(integers), hessian).sum() / nearest))
        integers = descend(exact, hessian, grid, integers, sweeps=1)
    print("\n512 correlated inputs: GPTQ with act_order, then each sweep of layer_wise")
    print(" ".join(f"{share:.4f}" for share in shares))


def main() -> None:
    print(describe_machine())
    orders()
    sweeps()


if __name__ == "__main__":
    main()
