"""From batches to integers, block by block: what ZeroQuant and BRECQ have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor, nn

from lightning_memprec.quantization.measure import run_batches
from lightning_memprec.quantization.methods import Solution
from lightning_memprec.quantization.progress import Progress
from lightning_memprec.quantization.reconstruction.blocks import (
    Block,
    find_blocks,
    reason_not_to_learn,
    single_layers,
)
from lightning_memprec.quantization.reconstruction.learning import Integers, Learner, Schedule, learn
from lightning_memprec.quantization.reconstruction.recording import (
    Call,
    TensorStore,
    record,
    replays,
    temporary_store,
)
from lightning_memprec.quantization.reconstruction.standing_in import rounding_inputs, standing_in
from lightning_memprec.quantization.reconstruction.survey import survey
from lightning_memprec.quantization.rounding import round_to_nearest
from lightning_memprec.quantization.targets import Target

__all__ = ["BlockWise", "Inputs"]

Inputs = Literal["teacher", "student"]

_NEAREST = "rounded to nearest: "


@dataclass(frozen=True)
class BlockWise(ABC):
    """Learns the weights of one block at a time from recorded calls of it; called by ``quantize_``.

    Linear layers, convolutions and attention learn, in blocks as :func:`find_blocks` finds them. Calls are recorded
    block by block, in memory up to a budget and in temporary files beyond it. A block that cannot be run by itself, or
    gives something else then, is taken apart into its layers, and the notes say so. What is rounded to nearest is
    named in the notes, too. Padding that ``forward`` knows of does not count.

    Args:
        inputs: What a block learns from: ``"teacher"``, the float model's activations, or ``"student"``, those that
            the model gives which is quantized up to there; that takes a pass over the data for each block.
        iterations: Steps for each block; a step takes one batch.
        learning_rate: Of Adam.
        memory_bytes: Recorded tensors that are kept in memory; blocks that fit in it share a pass over the data.
        seed: Of the order in which batches are taken.
    """

    inputs: Inputs
    iterations: int
    learning_rate: float
    memory_bytes: int = 2**30
    seed: int = 0

    def __post_init__(self) -> None:
        if self.inputs not in get_args(Inputs):
            raise ValueError(f"`inputs` must be 'teacher' or 'student', got {self.inputs!r}.")
        if self.iterations < 1:
            raise ValueError(f"`iterations` must be at least 1, got {self.iterations!r}.")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"`learning_rate` must be larger than 0 and finite, got {self.learning_rate!r}."
                " Leave it out for the default."
            )
        if self.memory_bytes < 0:
            raise ValueError(f"`memory_bytes` must be at least 0, got {self.memory_bytes!r}.")

    @abstractmethod
    def learner(self, block: Block, calls: Sequence[Call], start: Integers) -> Learner:
        """Return the weights of a block while they are learned.

        Args:
            block: The block.
            calls: Its recorded calls.
            start: Weights rounded to nearest, of the targets that learn.
        """

    @property
    def schedule(self) -> Schedule:
        """How to learn."""
        return Schedule(self.iterations, self.learning_rate, self.seed)

    def loss(self) -> Callable[[Any], tuple[str | None, Tensor] | None] | None:
        """Return what makes a scalar of the model's output, for methods that need gradients."""
        return None

    def __call__(
        self,
        model: nn.Module,
        targets: list[Target],
        batches: Iterable[Any] | None,
        forward: Callable[[nn.Module, Any], Any],
    ) -> Solution:
        """Quantize the weights of targets; the model is not changed.

        Args:
            model: The float model.
            targets: What to quantize.
            batches: Calibration batches; without any, all is rounded to nearest.
            forward: Runs one batch.

        Raises:
            ValueError: If a weight cannot be quantized, there are no batches, or one gives a NaN.
        """
        reasons = reason_not_to_learn(targets)
        solution = Solution(
            round_to_nearest(targets), {name: _NEAREST + reason for name, reason in reasons.items()}
        )
        if batches is None:
            for target in targets:
                solution.notes.setdefault(target.name, f"{_NEAREST}no calibration data to learn from")
            return solution
        run = _Run(self, model, targets, list(batches), forward, solution)
        # Once, so that the model stays in evaluation mode and random generators come back while blocks learn.
        run_batches(model, [None], lambda model, batch: run.solve())
        return solution


class _Run:
    """One solution in the making."""

    def __init__(
        self,
        method: BlockWise,
        model: nn.Module,
        targets: list[Target],
        data: list[Any],
        forward: Callable[[nn.Module, Any], Any],
        solution: Solution,
    ) -> None:
        self._method, self._model, self._targets = method, model, targets
        self._data, self._forward, self._solution = data, forward, solution
        # Int8 layers of what is quantized so far.
        self._done = {target.name: self._build(target) for target in targets if target.name in solution.notes}
        self._sizes: dict[str, int] = {}

    def solve(self) -> None:
        """Let all blocks learn, in the order in which the data reaches them."""
        blocks = find_blocks(self._model, self._targets)
        parts = {block.name: block.module for block in blocks}
        parts |= {target.name: target.module for target in self._targets}
        self._sizes = survey(self._model, parts, self._data, self._forward)
        for target in self._targets:
            if target.name not in self._sizes and target.name not in self._done:
                self._leave(target, "no calibration data reached it")
        waiting = self._waiting(blocks)
        with Progress(len(waiting)) as progress:
            for group in self._groups(waiting):
                self._solve_group(group, progress)

    def _waiting(self, blocks: list[Block]) -> list[Block]:
        """Return the blocks that have something to learn, in the order of use."""
        order = list(self._sizes)
        waiting = [block for block in blocks if block.name in self._sizes and self._learning(block)]
        return sorted(waiting, key=lambda block: order.index(block.name))

    def _learning(self, block: Block) -> list[Target]:
        return [target for target in block.targets if target.name not in self._solution.notes]

    def _groups(self, blocks: list[Block]) -> Iterator[list[Block]]:
        """Group the blocks that share a pass over the data."""
        group: list[Block] = []
        size = 0
        for block in blocks:
            needed = self._sizes[block.name]
            if group and size + needed > self._method.memory_bytes:
                yield group
                group, size = [], 0
            group.append(block)
            size += needed
        if group:
            yield group

    def _solve_group(self, group: list[Block], progress: Progress) -> None:
        with temporary_store(self._method.memory_bytes) as store:
            calls = self._record(group, store, self._method.loss())
            for block in group:
                progress.step(block.name)
                own = calls.pop(block.name)
                if own and replays(block.module, own):
                    self._solve_block(block, own)
                elif block.module is block.targets[0].module:
                    self._leave(block.targets[0], "called again, it answers differently")
                else:
                    self._solve_layers(block, progress)

    def _record(
        self,
        blocks: list[Block],
        store: TensorStore,
        loss: Callable[[Any], tuple[str | None, Tensor] | None] | None = None,
    ) -> dict[str, list[Call]]:
        modules = {block.name: block.module for block in blocks}
        try:
            return record(self._model, modules, self._data, self._forward, store, loss)
        except RuntimeError:
            if loss is None:
                raise
        # Not every model has gradients: it may work in place, or hold inference tensors. Other faults come again.
        return record(self._model, modules, self._data, self._forward, store)

    def _solve_layers(self, block: Block, progress: Progress) -> None:
        """Let the layers of a block learn one by one."""
        layers = self._waiting(single_layers(block))
        progress.total += len(layers)
        self._solve_group(layers, progress)
        for layer in layers:
            self._note(layer.name, f"learned by itself: `{block.name}` answers differently when called alone")

    def _solve_block(self, block: Block, calls: list[Call]) -> None:
        targets = self._learning(block)
        start = {target.name: self._solution[target.name] for target in targets}
        with temporary_store(self._method.memory_bytes) as store:
            if self._method.inputs == "student":
                calls = self._as_student(block, calls, store)
            with ExitStack() as rounded:
                rest = [target for target in block.targets if target not in targets]
                rounded.enter_context(standing_in(rest, self._done))
                rounded.enter_context(rounding_inputs([(target, self._build(target)) for target in targets]))
                learner = self._method.learner(block, calls, start)
                found, note = learn(block, calls, start, learner, self._method.schedule)
        for target in targets:
            self._solution[target.name] = dict(found[target.name])
            self._done[target.name] = self._build(target)
            for text in filter(None, (note, learner.note)):
                self._note(target.name, text)

    def _as_student(self, block: Block, calls: list[Call], store: TensorStore) -> list[Call]:
        """Return calls with the inputs that the model gives which is quantized so far."""
        with standing_in([target for target in self._targets if target.name in self._done], self._done):
            seen = self._record([block], store)[block.name]
        if [call.output.shape for call in seen] != [call.output.shape for call in calls]:
            for target in self._learning(block):
                self._note(target.name, "learned from the teacher's inputs: the student's are not as many")
            return calls
        return [
            replace(call, args=student.args, kwargs=student.kwargs)
            for call, student in zip(calls, seen, strict=True)
        ]

    def _leave(self, target: Target, reason: str) -> None:
        self._solution.notes[target.name] = _NEAREST + reason
        self._done[target.name] = self._build(target)

    def _build(self, target: Target) -> nn.Module:
        return target.build(self._solution[target.name])

    def _note(self, name: str, text: str) -> None:
        self._solution.notes[name] = "; ".join(filter(None, [self._solution.notes.get(name), text]))
