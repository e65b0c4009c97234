"""Convolution nets of torchvision and timm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.memory.zoo.case import Case, adamw

__all__ = ["CASES"]


def _images(batch: int, size: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


def _torchvision(name: str, *, batch: int, size: int, **kwargs: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        import torchvision

        return torchvision.models.get_model(name, weights=None, num_classes=10, **kwargs), _images(
            batch, size, 10
        )

    return build


def _timm(name: str, *, batch: int, size: int) -> tuple[nn.Module, Any]:
    import timm

    return timm.create_model(name, num_classes=10), _images(batch, size, 10)


def _vgg11() -> tuple[nn.Module, Any]:
    # The 102M parameters of the usual classifier would hide the activations.
    import torchvision

    features = torchvision.models.vgg11(weights=None, init_weights=False).features
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return nn.Sequential(features, head), _images(16, 96, 10)


CASES = [
    Case(
        name="resnet18",
        family="convolution",
        build=_torchvision("resnet18", batch=8, size=128),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    ),
    Case(
        name="resnet18_accumulate_clip_value_adagrad",
        family="convolution",
        build=_torchvision("resnet18", batch=8, size=112),
        optimizer=partial(torch.optim.Adagrad, lr=0.01),
        accumulate=2,
        clip=0.5,
        clip_algorithm="value",
    ),
    Case(name="vgg11", family="convolution", build=_vgg11, optimizer=partial(torch.optim.SGD, lr=0.01)),
    Case(
        name="mobilenet_v3_small",
        family="convolution",
        build=_torchvision("mobilenet_v3_small", batch=16, size=128),
    ),
    Case(
        name="efficientnet_b0_bf16_mixed",
        family="convolution",
        build=_torchvision("efficientnet_b0", batch=8, size=112),
        precision="bf16-mixed",
    ),
    Case(
        name="densenet121",
        family="convolution",
        build=_torchvision("densenet121", batch=4, size=96),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    ),
    Case(
        name="convnext_tiny_clip_norm",
        family="convolution",
        build=_torchvision("convnext_tiny", batch=4, size=96),
        optimizer=adamw,
        clip=1.0,
    ),
    Case(
        name="timm_convnext_atto_bf16_true",
        family="convolution",
        build=partial(_timm, "convnext_atto", batch=8, size=160),
        precision="bf16-true",
    ),
]
