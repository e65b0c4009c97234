"""Rows of layers, from the float model and, the same ones, from the model that is quantized up to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_memprec.quantization.activations import outlier_columns
from lightning_memprec.quantization.calibration import feed
from lightning_memprec.quantization.methods import Solution
from lightning_memprec.quantization.reconstruction.blocks import Block
from lightning_memprec.quantization.reconstruction.paired_rows import RowSample
from lightning_memprec.quantization.reconstruction.prefix import Prefix, Source
from lightning_memprec.quantization.reconstruction.recording import temporary_store
from lightning_memprec.quantization.reconstruction.standing_in import standing_in
from lightning_memprec.quantization.targets import Target

__all__ = ["Pair", "Sample", "StudentAndTeacher", "collect"]

_BUDGET = 2**30  # Bytes of recorded calls in memory; the rest goes to files.

Pair = tuple["Sample", "Sample"]


@dataclass
class Sample:
    """Rows of one layer, and the features that are outliers in any of its rows."""

    target: Target
    rows: RowSample
    outliers: Tensor | None = None

    def add(self, block: Tensor) -> None:
        """Add a block of rows, FP32 ``[N, G, K]``."""
        self.rows.add(block)
        threshold = self.target.scheme.outlier_threshold
        if threshold is not None:
            found = outlier_columns(block[:, 0], threshold)
            self.outliers = found if self.outliers is None else self.outliers | found


def collect(targets: Iterable[Target], shares: Mapping[str, float], source: Source) -> dict[str, Sample]:
    """Return rows of layers from one pass over the data.

    Args:
        targets: The layers.
        shares: Part of the rows of each to keep, by name.
        source: What gives them their inputs.
    """
    samples = {target.name: Sample(target, RowSample(shares[target.name])) for target in targets}
    modules = {target.name: target.module for target in targets}
    feed(*source, modules, lambda name, rows: samples[name].add(rows))
    return samples


class StudentAndTeacher(ExitStack):
    """A float model and the same one with the layers quantized that are finished; both run in the same modules.

    Args:
        whole: The model and its data.
        solution: Of all layers; an entry counts when its layer is finished.
    """

    def __init__(self, whole: Source, solution: Solution) -> None:
        super().__init__()
        self._whole, self._solution = whole, solution
        self._finished: list[Target] = []
        self._layers: dict[str, nn.Module] = {}
        self._prefix = self.enter_context(Prefix(whole, _BUDGET))

    def finish(self, targets: Iterable[Target]) -> None:
        """Let layers be quantized in the student from now on."""
        for target in self._solution.complete(list(targets)):
            self._finished.append(target)
            self._layers[target.name] = target.build(dict(self._solution[target.name]))

    @contextmanager
    def sources(self, block: Block | None) -> Iterator[tuple[Source, Source]]:
        """Give what layers of a block get their inputs from, in the teacher and in the student.

        When the context ends, all of the block's layers must be finished.

        Args:
            block: A block that every batch calls once; ``None`` for layers that learn from passes over the model.
        """
        with temporary_store(_BUDGET) as store:
            teacher = student = None
            if block is not None:
                with self._prefix.paused():
                    teacher = self._prefix.calls(block, store)
            if block is not None and teacher is not None:
                with self._quantized():
                    student = self._prefix.calls(block, store)
            if teacher is None or student is None:
                yield self._whole, self._whole
                return
            yield teacher, student
            with self._quantized():
                self._prefix.finish(student)

    def rows(
        self, targets: list[Target], shares: Mapping[str, float], sources: tuple[Source, Source]
    ) -> dict[str, Pair]:
        """Return rows of layers in the teacher and in the student.

        Args:
            targets: Layers that share their input.
            shares: Part of the rows of each to keep, by name.
            sources: What :meth:`sources` gave.
        """
        teacher, student = sources
        with self._prefix.paused():
            exact = collect(targets, shares, teacher)
        if not self._finished:
            return {name: (sample, sample) for name, sample in exact.items()}
        with self._quantized():
            seen = collect(targets, shares, student)
        return {name: (exact[name], seen[name]) for name in exact}

    def _quantized(self) -> AbstractContextManager[None]:
        return standing_in(self._finished, self._layers)
