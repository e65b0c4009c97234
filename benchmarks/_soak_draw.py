"""What every drawn model of ``benchmarks/soak.py`` is made with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["CHECKPOINTING", "DROPOUTS", "Draw", "Drawn", "Stack", "activation_of"]

T = TypeVar("T")


class Draw:
    """A random generator that remembers what it drew, by name.

    Args:
        seed: The same seed draws the same.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.chosen: dict[str, Any] = {}

    def pick(self, name: str, values: Sequence[T]) -> T:
        """Return one of some values."""
        value = self.random.choice(values)
        self.chosen[name] = getattr(value, "__name__", value)
        return value


@dataclass(frozen=True)
class Drawn:
    """What a family drew.

    Args:
        build: Returns the module and its inputs.
        own_loss: Whether the model computes the loss of its inputs itself.
        classes: Whether the output's last dimension are classes, else it is compared with a tensor of its shape.
    """

    build: Callable[[], tuple[nn.Module, Any]]
    own_loss: bool = False
    classes: bool = True


class Stack(nn.Module):
    """Blocks one after the other, maybe with residuals, maybe run again in the backward pass."""

    def __init__(self, blocks: list[nn.Module], *, residual: bool, checkpointing: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.residual, self.checkpointing = residual, checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpointing == "no":
                y = block(x)
            else:
                y = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            x = x + y if self.residual else y
        return x


_ACTIVATIONS = [
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU, nn.Softplus, nn.Hardswish,
    nn.Mish, nn.PReLU, nn.ReLU6, nn.Hardtanh, nn.LogSigmoid, nn.Softsign, nn.CELU,
]  # fmt: skip
DROPOUTS = [0.0, 0.0, 0.1, 0.5]
CHECKPOINTING = ["no", "no", "no", "reentrant", "not reentrant"]


def activation_of(draw: Draw) -> Callable[[], nn.Module]:
    """Draw an activation, in place where it may be."""
    kind = draw.pick("activation", _ACTIVATIONS)
    in_place = kind in (nn.ReLU, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Hardswish) and draw.pick(
        "in_place", [False, True]
    )
    return (lambda: kind(inplace=True)) if in_place else kind
