"""Stepping a few parameters at a time, so that FP32 gradients never exist all at once.

With AdamW a parameter takes 2 (half) + 4 (master) + 8 (moments) + 2 (half gradient) = 16 bytes. The FP32
gradient would add 2 more to the peak. Here gradients stay half until the step, which goes through the parameters in
chunks: cast, unscale, clip, step, round, free. Or each parameter is stepped in the middle of backward, as soon as
its gradient is complete: then gradients take next to nothing, 14 bytes in all.

That is only right for an optimizer that treats every parameter on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightning_memprec._partial_step import chunks, only
from lightning_memprec.master_weights.pair import merge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from lightning_memprec.master_weights.pair import Pair
    from lightning_memprec.master_weights.store import MasterStore

__all__ = ["Clip", "StepInBackward", "any_infinity", "step_in_chunks"]


@dataclass(frozen=True)
class Clip:
    """How gradients are clipped.

    Args:
        algorithm: "norm" of all gradients of the optimizer, or each "value".
        limit: The largest norm, or the largest absolute value.
    """

    algorithm: Literal["norm", "value"]
    limit: float


class _Entry:
    """A tensor that an optimizer steps, and the parameter that holds its gradient until then.

    For a half parameter these are its master and itself; for one that stays in FP32 they are the same.
    """

    def __init__(self, stepped: Tensor, pair: Pair | None) -> None:
        self.stepped = stepped
        self.pair = pair
        self.holder = stepped if pair is None else pair.parameter

    def take(self) -> Tensor | None:
        """Return the gradient in FP32, and free it where it was."""
        gradient, self.holder.grad = self.holder.grad, None
        return None if gradient is None else gradient.float()


def _entries(store: MasterStore, optimizer: Optimizer) -> list[_Entry]:
    pairs = {pair.master: pair for pair in store.adopt(optimizer)}
    return [_Entry(p, pairs.get(p)) for group in optimizer.param_groups for p in group["params"]]


def _gradients(entries: Sequence[_Entry]) -> list[Tensor]:
    return [entry.holder.grad for entry in entries if entry.holder.grad is not None]


def any_infinity(store: MasterStore, optimizer: Optimizer) -> Tensor:
    """Return 1.0 if any gradient is infinite or NaN, else 0.0, as a tensor on their device."""
    flags = [gradient.isfinite().all().logical_not() for gradient in _gradients(_entries(store, optimizer))]
    return torch.stack(flags).any().float() if flags else torch.zeros(())


def _clip_factor(entries: Sequence[_Entry], clip: Clip | None, inverse_scale: Tensor | None) -> Tensor | None:
    """Return the factor of ``clip_grad_norm_``, from half gradients, with squares summed in FP32."""
    gradients = _gradients(entries)
    if clip is None or clip.algorithm != "norm" or not gradients:
        return None
    norms = [torch.linalg.vector_norm(gradient, 2, dtype=torch.float32) for gradient in gradients]
    total = torch.linalg.vector_norm(torch.stack(norms), 2)
    if inverse_scale is not None:
        total = total * inverse_scale
    return torch.clamp(clip.limit / (total + 1e-6), max=1.0)


def _step(optimizer: Optimizer, entries: Sequence[_Entry], **kwargs: Any) -> None:
    """Step some parameters; the optimizer's post-hook rounds their masters into them."""
    stepped = [entry.stepped for entry in entries]
    with only(optimizer, stepped):
        optimizer.step(**kwargs)
    for tensor in stepped:
        tensor.grad = None


@torch.no_grad()
def step_in_chunks(
    store: MasterStore,
    optimizer: Optimizer,
    *,
    inverse_scale: Tensor | None = None,
    clip: Clip | None = None,
    **kwargs: Any,
) -> None:
    """Step an optimizer from half gradients, and free them.

    Args:
        store: The masters.
        optimizer: A separable optimizer.
        inverse_scale: What to multiply the gradients by, FP32 scalar.
        clip: How to clip the unscaled gradients.
        kwargs: Passed to the optimizer's ``step``.
    """
    entries = _entries(store, optimizer)
    factor = _clip_factor(entries, clip, inverse_scale)
    for chunk in chunks(entries, lambda entry: entry.stepped.numel()):
        for entry in chunk:
            if entry.pair is not None:
                merge(entry.pair)
            gradient = entry.take()
            if gradient is not None:
                entry.stepped.grad = _finish(gradient, inverse_scale, factor, clip)
        _step(optimizer, chunk, **kwargs)


def _finish(
    gradient: Tensor, inverse_scale: Tensor | None, factor: Tensor | None, clip: Clip | None
) -> Tensor:
    """Unscale, then clip, an FP32 gradient in place."""
    if inverse_scale is not None:
        gradient.mul_(inverse_scale)
    if factor is not None:
        gradient.mul_(factor)
    elif clip is not None and clip.algorithm == "value":
        gradient.clamp_(-clip.limit, clip.limit)
    return gradient


class StepInBackward:
    """Steps each parameter as soon as its gradient is complete.

    Args:
        store: The masters.
        optimizer: A separable optimizer.
    """

    def __init__(self, store: MasterStore, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._handles = [
            entry.holder.register_post_accumulate_grad_hook(partial(self._take_step, entry))  # type: ignore[no-untyped-call]
            for entry in _entries(store, optimizer)
        ]

    @torch.no_grad()
    def _take_step(self, entry: _Entry, _: Tensor) -> None:
        if entry.pair is not None:
            merge(entry.pair)
        entry.stepped.grad = entry.take()
        _step(self._optimizer, [entry])

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
