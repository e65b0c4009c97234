"""Errors of quantized layers on test data, for ``benchmarks.reconstruction``."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.reconstruction_models import Subject

__all__ = ["errors_in_place", "layer_errors"]


class _Mean:
    """Mean of squares over many tensors."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, values: Tensor) -> None:
        self.total += float(values.double().square().sum())
        self.count += values.numel()

    @property
    def value(self) -> float:
        return self.total / self.count


def layer_errors(subject: Subject, rounded: nn.Module) -> dict[str, float]:
    """Return the mean squared error of each layer's output, fed with the float model's inputs."""
    layers = dict(rounded.named_modules())
    means: dict[str, _Mean] = defaultdict(_Mean)
    with ExitStack() as hooks, torch.no_grad():
        for name, module in subject.layers().items():

            def compare(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
                means[name].add(layers[name](args[0]) - output)

            hooks.callback(module.register_forward_hook(compare).remove)
        for batch in subject.test:
            subject.net(batch)
    return {name: mean.value for name, mean in means.items()}


def errors_in_place(subject: Subject, rounded: nn.Module) -> tuple[dict[str, float], float]:
    """Compare the quantized model, run as a whole, with the float model.

    Returns:
        The mean squared error of each layer's output, and ``‖Y - Ŷ‖ / ‖Y‖`` of the model's.
    """
    means: dict[str, _Mean] = defaultdict(_Mean)
    noise, signal = _Mean(), _Mean()
    for batch in subject.test:
        exact, found = (_outputs(net, list(subject.layers()), batch) for net in (subject.net, rounded))
        noise.add(exact[""] - found[""])
        signal.add(exact.pop(""))
        for name, output in exact.items():
            means[name].add(output - found[name])
    return {name: mean.value for name, mean in means.items()}, math.sqrt(noise.value / signal.value)


def _outputs(model: nn.Module, names: list[str], batch: Any) -> dict[str, Tensor]:
    """Return what layers and the model (the empty name) give for a batch."""
    found: dict[str, Tensor] = {}
    layers = dict(model.named_modules())
    with ExitStack() as hooks, torch.no_grad():
        for name in names:

            def keep(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
                found[name] = output

            hooks.callback(layers[name].register_forward_hook(keep).remove)
        output = model(batch)
    found[""] = output if isinstance(output, Tensor) else output.logits
    return found
