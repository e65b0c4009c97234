"""Run data through a float model and compare each layer with its int8 replacement on the way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memprec._isolation import unchanged
from lightning_memprec.quantization.outliers import OutlierStatistics
from lightning_memprec.quantization.padding import without_padding

__all__ = ["Comparison", "call", "run_batches"]


def call(module: nn.Module, batch: Any) -> Any:
    """Call a module with a batch: a mapping as keywords, a list or tuple as arguments, else the batch itself."""
    if isinstance(batch, Mapping):
        return module(**batch)
    if isinstance(batch, (list, tuple)):
        return module(*batch)
    return module(batch)


def run_batches(
    module: nn.Module, batches: Iterable[Any], forward: Callable[[nn.Module, Any], Any] = call
) -> int:
    """Run batches through a model in evaluation mode, leaving modes and random generators as they were.

    Args:
        module: The model.
        batches: What ``forward`` takes.
        forward: Runs one batch.

    Returns:
        Number of batches.

    Raises:
        ValueError: If there are none.
    """
    modes = [(part, part.training) for part in module.modules()]
    count = 0
    # The fast path of `nn.TransformerEncoder` packs padded batches into nested tensors, which hooks cannot read.
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with unchanged(), torch.no_grad(), _eager():
        module.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            for batch in batches:
                forward(module, batch)
                count += 1
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for part, mode in modes:
                part.training = mode
    if not count:
        raise ValueError(
            "There are no calibration batches. Give an iterable with at least one, such as a list."
        )
    return count


def _eager() -> AbstractContextManager[object]:
    """Run compiled models without their compiled code, which ignores hooks that come and go after it was made."""
    # Nothing is compiled before this is imported, which takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class Comparison:
    """Feeds the inputs of float layers to their replacements, and sums up how far apart the outputs are.

    Nothing is stored but sums, so memory does not grow with the data.

    Args:
        forward: What runs the batches; it knows their padding.
        statistics: Told of every input of the layers in ``watched``.
        watched: Layers whose outliers count.

    Attributes:
        batches: How many batches have begun; counted by the caller.
    """

    def __init__(
        self,
        forward: Callable[[nn.Module, Any], Any] = call,
        statistics: OutlierStatistics | None = None,
        watched: frozenset[str] = frozenset(),
    ) -> None:
        self.batches = 0
        self.statistics = statistics
        self._forward = forward
        self._uses: dict[str, list[int]] = {}
        self._watched = watched
        self._noise: dict[str, float] = {}
        self._signal: dict[str, float] = {}
        self._unusable: dict[str, int] = {}

    def attach(self, name: str, module: nn.Module, replacement: nn.Module) -> Any:
        """Hook a float layer; the handle that comes back removes the hook."""

        def compare(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            replacement.eval()
            self._uses.setdefault(name, []).append(self.batches)
            exact, rounded = (
                without_padding(self._forward, module, _first(result).detach())
                for result in (output, replacement(*args, **kwargs))
            )
            if not bool(exact.isfinite().all()):
                self._unusable[name] = self._unusable.get(name, 0) + 1
                return
            self._noise[name] = self._noise.get(name, 0.0) + _square(rounded.double() - exact.double())
            self._signal[name] = self._signal.get(name, 0.0) + _square(exact.double())
            if self.statistics is not None and name in self._watched:
                self.statistics.update(name, without_padding(self._forward, module, args[0].detach()))

        return module.register_forward_hook(compare, with_kwargs=True)

    def error(self, name: str) -> float | None:
        """Return ``‖Y - Ŷ‖ / ‖Y‖`` of a layer; ``None`` if no data came by or its output is zero."""
        signal = self._signal.get(name)
        return None if not signal else float((self._noise[name] / signal) ** 0.5)

    def usage(self, name: str) -> str | None:
        """Say that a layer ran in some of the batches only, or several times in one; ``None`` if neither.

        A layer that no data reached is left to what is said of it elsewhere.
        """
        uses = self._uses.get(name, [])
        reached = len(set(uses))
        parts = []
        if 0 < reached < self.batches:
            parts.append(f"reached by {reached} of {self.batches} calibration batches")
        if len(uses) > reached:
            parts.append(f"shared: runs {len(uses) / reached:.3g} times in a batch")
        return "; ".join(parts) or None

    def unusable(self, name: str) -> str | None:
        """Say how many calls of a layer are not in its error since they gave a NaN or an infinity; ``None`` if none."""
        if name not in self._unusable:
            return None
        count, calls = self._unusable[name], len(self._uses[name])
        return f"error without {count} of {calls} calls, which give NaN or infinite values"


def _first(output: Any) -> Tensor:
    while isinstance(output, (tuple, list)):
        output = output[0]
    return output  # type: ignore[no-any-return]


def _square(values: Tensor) -> float:
    return float(values.square().sum())
