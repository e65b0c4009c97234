"""Rows of a layer's inputs, a random part that fits into memory, beside what the float layer gives for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memprec.quantization.calibration import feed

__all__ = ["RowSample", "Survey", "survey"]

_HELD_OUT = 5  # One row in five judges, four are learned from: the share of five-fold cross-validation.


@dataclass
class RowSample:
    """A random part of the rows that come by; where as many come by, it is the same part.

    Of each block the last fifth is held out: neighbouring rows (windows of one image) are much alike, so rows picked in
    between would be no test.

    Args:
        share: Part of the rows to keep, at most 1.

    Attributes:
        blocks: Length of each block that came by.
    """

    share: float
    blocks: list[int] = field(default_factory=list)
    _kept: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    _seen: list[int] = field(default_factory=lambda: [0, 0])
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def add(self, rows: Tensor) -> None:
        """Add a block ``[N, ...]``; what is kept lies on the CPU."""
        before = sum(self._seen)
        self.blocks.append(len(rows))
        held = (before + len(rows)) // _HELD_OUT - before // _HELD_OUT
        for index, part in enumerate(torch.split(rows, [len(rows) - held, held])):
            already = int(self._seen[index] * self.share)
            self._seen[index] += len(part)
            wanted = int(self._seen[index] * self.share) - already
            chosen = torch.randperm(len(part), generator=self._generator)[:wanted].sort().values
            self._kept[index].append(part[chosen.to(part.device)].cpu())

    def take(self) -> tuple[Tensor, Tensor]:
        """Return rows to learn from and held-out ones, and forget them; too few to hold one out do both."""
        learned_from, held_out = (torch.cat(kept) for kept in self._kept)
        self._kept = ([], [])
        if not len(learned_from):
            learned_from = held_out
        return learned_from, held_out if len(held_out) else learned_from


@dataclass(frozen=True)
class Survey:
    """What one pass of the float model tells of its layers.

    Attributes:
        rows: How many rows each layer saw, in the order of use; layers that the data does not reach are missing.
        groups: Names of layers that always saw the same tensor, such as an attention's projections, in that order.
    """

    rows: dict[str, int]
    groups: list[list[str]]


def survey(
    model: nn.Module,
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
    layers: dict[str, nn.Module],
) -> Survey:
    """Count the rows of layers, and find those that share their input.

    Arguments and errors are those of :func:`~lightning_memprec.quantization.calibration.feed`.
    """
    rows: dict[str, int] = {}
    inputs: dict[str, list[int]] = {}
    last: list[Any] = [None, None, 0]

    def count(name: str, block: Tensor) -> None:
        rows[name] = rows.get(name, 0) + len(block)

    def note(name: str, values: Any) -> None:
        # A tensor that was written to since is another input. Inference tensors do not count their writes.
        version = None if values.is_inference() else values._version
        if values is not last[0] or version != last[1]:
            last[:] = values, version, last[2] + 1
        inputs.setdefault(name, []).append(last[2])

    with ExitStack() as hooks:
        for name, layer in layers.items():
            # Bound here, because hooks are only told of the module.
            def hook(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                note(name, args[0] if args else next(iter(kwargs.values())))

            hooks.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        feed(model, batches, forward, layers, count)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in rows:
        groups.setdefault(tuple(inputs[name]), []).append(name)
    return Survey(rows, list(groups.values()))
