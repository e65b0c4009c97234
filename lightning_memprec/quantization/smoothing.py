r"""Smoothing: move what is hard to round from the inputs of a layer into its weights, before it is quantized.

With one step for all inputs of a layer, a channel that is a thousand times larger than the others decides it for all.
Dividing each channel by a factor and multiplying the weight's column by it changes nothing in floating point:
:math:`WX = (W\,\mathrm{diag}(s))\,(\mathrm{diag}(s)^{-1}X)`, with
:math:`s_j = \max|X_j|^\alpha / \max|W_j|^{1-\alpha}` (SmoothQuant, arXiv 2211.10438, equation 4).

The division is folded into the layer before (:mod:`lightning_memprec.quantization.smoothing_pairs`), so layers, kernels
and files stay as they are. Factors are rounded to powers of two: then the float model computes the same bits as before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memprec.quantization.activations import fake_quantize
from lightning_memprec.quantization.affine import choose_parameters, dequantize_matrix
from lightning_memprec.quantization.calibration import feed
from lightning_memprec.quantization.measure import run_batches
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.smoothing_pairs import (
    Forward,
    Pair,
    fold,
    parameters_of,
    proven_pairs,
    restore,
)
from lightning_memprec.quantization.targets import Target

__all__ = ["check_smoothing", "smoothed", "smoothing_factors"]

_SMALLEST = (
    1e-5  # Channels below this part of the largest are taken for that; the authors' code has the same number.
)
_JUDGED = 4  # One row in four judges, the first of a sequence among them.
_UNPROVEN = (
    "not smoothed: no layer before it was found that could take the factors without changing the model"
)
_WORSE = "not smoothed: it would err no less"


def check_smoothing(strength: float, scheme: Scheme) -> None:
    """Refuse a strength out of range, and inputs that have no static scale or whose outliers are left out of it."""
    if not 0 < strength <= 1:
        raise ValueError(
            f"`smoothing` must be larger than 0 and at most 1, got {strength!r}. Try 0.8, or 0.5 as the paper."
        )
    if scheme.activations != "static" or scheme.outlier_threshold is not None:
        raise ValueError(
            "`smoothing` is for inputs with one static scale, all features among them; got"
            f" activations {scheme.activations!r} and outlier threshold {scheme.outlier_threshold}."
            " Use `activations='static'` without a threshold."
        )


def smoothing_factors(inputs: Tensor, weights: Tensor, strength: float) -> Tensor:
    r"""Return powers of two by which to divide the channels of a layer's inputs.

    Args:
        inputs: Largest magnitude of each channel, FP32 ``[K]``.
        weights: Largest magnitude of each column of the weight, FP32 ``[K]``.
        strength: :math:`\alpha`, 0 to 1.

    Returns:
        FP32 ``[K]`` around 1; a channel that is always zero, or whose weights are, has 1.

    Example:
        >>> smoothing_factors(torch.tensor([64.0, 1.0, 1.0, 0.0]), torch.ones(4), 0.5)
        tensor([4.0000, 0.5000, 0.5000, 1.0000])
    """
    used = (inputs > 0) & (weights > 0)
    if not bool(used.any()):
        return torch.ones_like(inputs)
    exponents = strength * _logarithms(inputs) - (1 - strength) * _logarithms(weights)
    exponents = (exponents - exponents[used].mean()).round()
    return torch.where(used, torch.exp2(exponents), 1.0)


def _logarithms(magnitudes: Tensor) -> Tensor:
    largest = magnitudes.max()
    return torch.log2(torch.maximum(magnitudes, largest * _SMALLEST))


@dataclass
class _Choice:
    """What is known of a pair: the extremes of its readers' inputs, and the errors without and with factors."""

    pair: Pair
    smallest: Tensor = field(default_factory=lambda: torch.empty(0))
    largest: Tensor = field(default_factory=lambda: torch.empty(0))
    factors: list[Tensor] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def see(self, rows: Tensor) -> None:
        smallest, largest = torch.aminmax(rows, dim=0)
        if self.smallest.numel():
            smallest, largest = torch.minimum(smallest, self.smallest), torch.maximum(largest, self.largest)
        self.smallest, self.largest = smallest, largest

    def propose(self, weights: Sequence[Tensor], strength: float) -> None:
        """Make factors, beside those that do nothing."""
        inputs = torch.maximum(self.smallest.abs(), self.largest.abs())
        columns = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
        self.factors = [torch.ones_like(inputs), smoothing_factors(inputs, columns, strength)]
        self.errors = [0.0, 0.0]

    def judge(self, rows: Tensor, target: Target) -> None:
        """Add a reader's squared errors, each row's divided by the norm of its output.

        Undivided, a first token with outputs of 25,000 decides alone; divided by the square, it has no say, though a
        language model needs it.
        """
        weight = target.weights["weight"]().float()
        exact = rows @ weight.t()
        norms = exact.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        total = float(norms.sum())
        for index, factors in enumerate(self.factors):
            values, scale, zero_point = target.scheme.quantize(weight * factors)
            rounded = dequantize_matrix(values, scale, zero_point, target.scheme.group_size)
            edges = (self.smallest / factors).amin()[None], (self.largest / factors).amax()[None]
            mapping = target.scheme.mapping
            inputs = fake_quantize(
                rows / factors,
                per_token=False,
                mapping=mapping,
                parameters=choose_parameters(*edges, mapping=mapping),
            )
            self.errors[index] += float(((inputs @ rounded.t() - exact).square() / norms).sum()) / total

    @property
    def best(self) -> Tensor | None:
        """The factors, or ``None`` if the layers err no less with them."""
        return self.factors[1] if self.errors[1] < self.errors[0] else None


@contextmanager
def smoothed(
    model: nn.Module, targets: list[Target], batches: Sequence[Any], forward: Forward, strength: float
) -> Iterator[dict[str, str]]:
    """Fold the factors of layers with static inputs into the layers before them, in place; undone if the block fails.

    Layers that would err more with factors, quantized, on part of the data, get none.

    Args:
        model: The float model; with the factors it computes the same.
        targets: What will be quantized.
        batches: Calibration batches.
        forward: Runs one batch.
        strength: How much moves into the weights, 0 to 1.

    Yields:
        Notes on layers that are not smoothed, by name.
    """
    static = {target.name: target for target in targets if target.scheme.activations == "static"}
    pairs = proven_pairs(model, {name: target.module for name, target in static.items()}, batches, forward)
    choices = _choices(model, static, pairs, batches, forward, strength)
    chosen = [(choice.pair, choice.best) for choice in choices if choice.best is not None]
    before = parameters_of(model, [pair for pair, _ in chosen])
    try:
        folded = _fold_what_changes_nothing(model, chosen, batches, forward)
        notes = dict.fromkeys(static, _UNPROVEN)
        for choice in choices:
            for name in choice.pair.readers:
                if choice.best is None:
                    notes[name] = _WORSE
                elif choice.pair in folded:
                    del notes[name]
        yield notes
    except BaseException:
        restore(before)
        raise


def _fold_what_changes_nothing(
    model: nn.Module, chosen: Sequence[tuple[Pair, Tensor]], batches: Sequence[Any], forward: Forward
) -> set[Pair]:
    """Fold the factors of those pairs with which the whole model gives the same bits on all data.

    A part that was shown to stay the same with one batch may do otherwise with another, or leave something elsewhere.
    """
    expected = _fingerprint(model, batches, forward) if chosen else ""
    folded: set[Pair] = set()

    def add(pairs: Sequence[tuple[Pair, Tensor]]) -> None:
        before = parameters_of(model, [pair for pair, _ in pairs])
        for pair, factors in pairs:
            fold(model, pair, factors)
        if _fingerprint(model, batches, forward) == expected:
            folded.update(pair for pair, _ in pairs)
            return
        restore(before)
        if len(pairs) > 1:
            half = len(pairs) // 2
            add(pairs[:half])
            add(pairs[half:])

    if chosen:
        add(chosen)
    return folded


def _fingerprint(model: nn.Module, batches: Sequence[Any], forward: Forward) -> str:
    """Return a digest of all that a model answers."""
    digest = hashlib.sha256()

    def note(module: nn.Module, batch: Any) -> Any:
        output = forward(module, batch)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                # Zeros of either sign are equal.
                bits = (leaf.detach() + 0).contiguous().view(-1).view(torch.uint8).cpu()
                digest.update(bits.numpy().tobytes())
        return output

    run_batches(model, batches, note)
    return digest.hexdigest()


def _choices(
    model: nn.Module,
    targets: Mapping[str, Target],
    pairs: Sequence[Pair],
    batches: Sequence[Any],
    forward: Forward,
    strength: float,
) -> list[_Choice]:
    choices = [_Choice(pair) for pair in pairs]
    of = {name: choice for choice in choices for name in choice.pair.readers}
    firsts = {choice.pair.readers[0]: choice for choice in choices}
    if not pairs:
        return []
    modules = {name: targets[name].module for name in of}
    feed(
        model,
        batches,
        forward,
        {name: modules[name] for name in firsts},
        lambda name, rows: firsts[name].see(rows[:, 0]),
    )
    for choice in choices:
        choice.propose([targets[name].weights["weight"]().float() for name in choice.pair.readers], strength)
    feed(
        model, batches, forward, modules, lambda name, rows: of[name].judge(rows[::_JUDGED, 0], targets[name])
    )
    return choices
