"""Errors of quantized layers on test data, for ``benchmarks.reconstruction``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.reconstruction_models import Subject
from lightning_memprec.quantization.reconstruction.recording import first_tensor

__all__ = ["Aim", "aimed_errors", "errors_in_place", "layer_errors"]


class Aim(NamedTuple):
    """What a method makes small.

    Attributes:
        parts: Names of the layers or blocks whose outputs it looks at.
        student: Whether their inputs are those that the quantized model gives, else the float model's.
        same_inputs: Whether the output to reach is that of the float part for these inputs, else for the float model's.
            Without ``student`` that is the same.
    """

    parts: tuple[str, ...]
    student: bool
    same_inputs: bool


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


def aimed_errors(subject: Subject, rounded: nn.Module, nearest: nn.Module, aim: Aim) -> dict[str, float]:
    """Return the mean squared error that a method makes small, relative to rounding that part alone to nearest.

    Args:
        subject: The float model and test data.
        rounded: What the method made of it.
        nearest: The model rounded to nearest in the same scheme.
        aim: What the method makes small.
    """
    exact, own, other = (dict(net.named_modules()) for net in (subject.net, rounded, nearest))
    errors: dict[str, tuple[_Mean, _Mean]] = defaultdict(lambda: (_Mean(), _Mean()))
    wanted: dict[str, Tensor] = {}
    with ExitStack() as hooks, torch.no_grad():
        for name in aim.parts:

            def compare(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                if not aim.student:
                    wanted[name] = _tensor(output)
                elif aim.same_inputs:
                    wanted[name] = _tensor(exact[name](*args, **kwargs))
                found = output if aim.student else own[name](*args, **kwargs)
                for mean, answer in zip(errors[name], (found, other[name](*args, **kwargs)), strict=True):
                    mean.add(_tensor(answer) - wanted[name])

            place = (own if aim.student else exact)[name]
            hooks.callback(place.register_forward_hook(compare, with_kwargs=True).remove)
        for batch in subject.test:
            if aim.student and not aim.same_inputs:
                wanted |= _outputs(subject.net, aim.parts, batch)
            (rounded if aim.student else subject.net)(batch)
    return {name: found.value / rival.value for name, (found, rival) in errors.items()}


def _tensor(output: Any) -> Tensor:
    found = first_tensor(output)
    assert found is not None
    return found


def _outputs(model: nn.Module, names: Iterable[str], batch: Any) -> dict[str, Tensor]:
    """Return what layers and the model (the empty name) give for a batch."""
    found: dict[str, Tensor] = {}
    layers = dict(model.named_modules())
    with ExitStack() as hooks, torch.no_grad():
        for name in names:

            def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                found[name] = _tensor(output)

            hooks.callback(layers[name].register_forward_hook(keep).remove)
        output = model(batch)
    found[""] = output if isinstance(output, Tensor) else output.logits
    return found
