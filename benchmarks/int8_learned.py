"""What methods that learn from data gain over rounding to nearest, at 8, 4 and 3 bits.

Run: ``python -m benchmarks.int8_learned``.

A perceptron and a small convolutional net are trained on scikit-learn's digits: 1,000 images to train on, 600 of
these to calibrate with, 797 to test on. The error of a layer is that of its output on test images, fed with the float
net's inputs, relative to rounding to nearest in the same scheme; that of the logits is relative to the float net's. The
peer is torchao's weight-only quantization of linear layers, which rounds to nearest, too (its GPTQ runs on CUDA only).
"""

from __future__ import annotations

import copy
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import geometric_mean, mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._machine import describe_machine
from lightning_memprec import quantize_
from lightning_memprec.quantization.affine import quantize_matrix
from lightning_memprec.quantization.methods import Method, register_method
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.gptq import GPTQ, gptq
from lightning_memprec.quantization.reconstruction.hessian import Grid, damped, row_errors
from lightning_memprec.quantization.reconstruction.layer_wise import descend

_METHODS = ["layer_wise", "gptq", "gptq, act_order", "gptq, parallel", "obq"]
_TRAIN, _CALIBRATE = 1000, 600
_SEEDS = 3
_SWEEPS = 12

register_method(Method("gptq, act_order", Scheme(), GPTQ(act_order=True), needs_calibration=True))
register_method(Method("gptq, parallel", Scheme(), GPTQ(sequential=False), needs_calibration=True))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels to train on, and to test on."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(data.target)[order]
    return images[:_TRAIN], labels[:_TRAIN], images[_TRAIN:], labels[_TRAIN:]


def nets(seed: int) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    return {
        "perceptron 64-128-128-10": nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        ),
        "convolutions, one depth-wise": nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 32, 1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
        ),
    }  # fmt: skip


def train(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(20):
        for rows in torch.randperm(len(images)).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimizer.step()
    net.eval()


def layer_errors(exact: nn.Module, rounded: nn.Module, images: Tensor) -> dict[str, float]:
    """Return the mean squared error of each layer's output, fed with the float net's inputs."""
    errors: dict[str, float] = {}
    layers, hooks = dict(rounded.named_modules()), []
    for name, module in exact.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):

            def compare(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
                errors[name] = float((layers[name](args[0]).double() - output.double()).square().mean())

            hooks.append(module.register_forward_hook(compare))
    with torch.no_grad():
        exact(images)
    for hook in hooks:
        hook.remove()
    return errors


def by_torchao(net: nn.Module, bits: int) -> nn.Module:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization import quantize_ as torchao_quantize_

    rounded = copy.deepcopy(net)
    dtype = {8: torch.int8, 4: torch.int4, 3: torch.int3}[bits]
    torchao_quantize_(rounded, IntxWeightOnlyConfig(weight_dtype=dtype))
    return rounded


@dataclass
class Row:
    """What one method did to the nets of all seeds."""

    ratios: list[float] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0


def on_digits(name: str, bits: int) -> None:
    images, labels, test, answers = digits()
    calibration = list(images[:_CALIBRATE].split(50))
    rows: dict[str, Row] = defaultdict(Row)
    weights = 0
    for seed in range(_SEEDS):
        net = nets(seed)[name]
        train(net, images, labels)
        weights += sum(
            part.weight.numel() for part in net.modules() if isinstance(part, (nn.Linear, nn.Conv2d))
        )
        base: dict[str, float] = {}
        with torch.no_grad():
            exact = net(test)
        for method in ["floating point", "weight_only", "torchao (peer)", *_METHODS]:
            row, rounded = rows[method], copy.deepcopy(net)
            start = time.process_time()
            if method == "torchao (peer)":
                rounded = by_torchao(net, bits)
            elif method != "floating point":
                quantize_(rounded, method, bits=bits, calibration=calibration)
                row.seconds += time.process_time() - start
                errors = layer_errors(net, rounded, test)
                base = base or errors
                row.ratios += [errors[layer] / base[layer] for layer in base]
            with torch.no_grad():
                output = rounded(test)
            row.distances.append(float((output - exact).norm() / exact.norm()))
            row.accuracies.append(float((output.argmax(1) == answers).double().mean()))
    print(f"\n{name}, {bits} bits a weight, {weights // _SEEDS:,} weights, means over {_SEEDS} trainings")
    print(
        f"{'':20s} {'layer error':>11s} {'best':>6s} {'worst':>6s} {'logits':>7s} {'accuracy':>8s} {'CPU s/M':>8s}"
    )
    for method, row in rows.items():
        text = f"{method:20s} "
        if row.ratios:
            text += f"{geometric_mean(row.ratios):11.3f} {min(row.ratios):6.2f} {max(row.ratios):6.2f}"
        else:
            text += " " * 25
        text += f" {mean(row.distances):7.2%} {mean(row.accuracies):8.2%}"
        print(text + (f" {row.seconds / weights * 1e6:8.1f}" if row.ratios else ""), flush=True)


def sweeps() -> None:
    """Print what each sweep of coordinate descent gains, on 512 correlated inputs."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(256, 512, generator=generator)
    inputs = torch.randn(2048, 512, generator=generator) @ torch.randn(512, 512, generator=generator)
    hessian = damped(inputs.t().double() @ inputs.double(), 0.01)
    quantized, matrix = quantize_matrix(matrix, bits=4), matrix.double()
    grid = Grid.of(quantized, Scheme(bits=4))
    nearest = row_errors(matrix - grid.real(quantized.values), hessian).sum()
    integers = gptq(matrix, hessian, grid, order=hessian.diagonal().argsort(descending=True))
    shares = []
    for _ in range(_SWEEPS + 1):
        shares.append(float(row_errors(matrix - grid.real(integers), hessian).sum() / nearest))
        integers = descend(matrix, hessian, grid, integers, sweeps=1)
    print(
        "\nerror to rounding to nearest, 512 correlated inputs, 4 bits: act_order GPTQ, then each sweep of layer_wise"
    )
    print(" ".join(f"{share:.4f}" for share in shares))


def main() -> None:
    warnings.simplefilter("ignore")
    print(describe_machine())
    for bits in (8, 4, 3):
        for name in nets(0):
            on_digits(name, bits)
    sweeps()


if __name__ == "__main__":
    main()
