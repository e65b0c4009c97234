"""Small nets trained on scikit-learn's handwritten digits, and what quantization does to each of their layers."""

from __future__ import annotations

import copy
import functools

import torch
from sklearn.datasets import load_digits
from torch import nn

NETS = ("mlp", "conv")


@functools.cache
def images():
    """Return images to train on, to calibrate with (a part of those) and to test on, with the labels of the first."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    pixels, labels = pixels[order], torch.tensor(digits.target)[order]
    return pixels[:1200], labels[:1200], pixels[1200:]


def build(kind):
    torch.manual_seed(1)
    if kind == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10)
        )
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


@functools.cache
def _trained(kind):
    pixels, labels, _ = images()
    net = build(kind)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(2)
    for _ in range(8):
        for rows in torch.randperm(len(pixels), generator=generator).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(pixels[rows]), labels[rows]).backward()
            optimizer.step()
    return net.eval()


def trained(kind):
    return copy.deepcopy(_trained(kind))


def calibration(count=600):
    return list(images()[0][:count].split(50))


def test_errors(exact, rounded):
    """Return the squared error of each quantized layer's output on test images, fed with the float net's inputs."""
    errors, hooks = {}, []
    layers = dict(rounded.named_modules())
    for name, module in exact.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):

            def compare(module, args, output, name=name):
                errors[name] = float((layers[name](args[0]).double() - output.double()).square().mean())

            hooks.append(module.register_forward_hook(compare))
    with torch.no_grad():
        exact(images()[2])
    for hook in hooks:
        hook.remove()
    return errors


test_errors.__test__ = False
