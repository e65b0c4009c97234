"""Padding in calibration batches: tokens that must not count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map_only

__all__ = ["Mask", "MaskedForward", "without_padding"]

Mask = str | Callable[[Any], Tensor | None]
_DEFAULT = "attention_mask"  # As tokenizers of Hugging Face Transformers name it.
# Their inputs have other layouts than [batch, tokens, features].
_OTHER_LAYOUTS = (_ConvNd, nn.MultiheadAttention, nn.RNNBase)


class MaskedForward:
    """Runs a batch, and knows meanwhile which of its tokens are padding.

    Args:
        forward: Runs one batch, ``forward(module, batch)``.
        mask: Key of the mask in batches, or a function that returns the mask of a batch; ones (or ``True``) for tokens,
            ``[batch, tokens]``. By default ``"attention_mask"`` where a batch has it.

    Attributes:
        current: bool ``[batch, tokens]`` of the batch that is running, or ``None``.
    """

    def __init__(self, forward: Callable[[nn.Module, Any], Any], mask: Mask | None = None) -> None:
        self.forward = forward
        self.mask = mask
        self.current: Tensor | None = None

    def __call__(self, module: nn.Module, batch: Any) -> Any:
        """Run a copy of a batch, because models may work in place and see their data many times."""
        self.current = self._find(batch)
        try:
            return self.forward(module, tree_map_only(Tensor, Tensor.clone, batch))
        finally:
            self.current = None

    def _find(self, batch: Any) -> Tensor | None:
        if callable(self.mask):
            found = self.mask(batch)
        else:
            parts = batch if isinstance(batch, (list, tuple)) else [batch]
            mapping = next((part for part in parts if isinstance(part, Mapping)), {})
            if self.mask is not None and self.mask not in mapping:
                raise ValueError(
                    f"A calibration batch has no {self.mask!r} to tell padding by. Its keys are:"
                    f" {', '.join(map(str, mapping)) or 'none'}."
                )
            found = mapping.get(self.mask or _DEFAULT)
        if isinstance(found, Tensor) and found.dim() == 2 and not found.is_floating_point():
            return found.bool()
        if self.mask is None or found is None:
            return None
        kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"The mask of a calibration batch must be bool or integer [batch, tokens], got {kind}."
            " Ones stand for tokens, zeros for padding."
        )


def without_padding(forward: Any, module: nn.Module, values: Tensor) -> Tensor:
    """Return the inputs or outputs of a layer that do not come from padding.

    Args:
        forward: What runs the batch; without a mask unless it is a :class:`MaskedForward`.
        module: The layer. Convolutions, attention and recurrent layers mix tokens or lay them out in other ways: all of
            theirs count.
        values: ``[batch, tokens, *]``, or ``[batch * tokens, *]``; others are returned as they are.

    Returns:
        ``[N, *]`` for N tokens, or ``values``.
    """
    mask = forward.current if isinstance(forward, MaskedForward) else None
    if mask is None or isinstance(module, _OTHER_LAYOUTS):
        return values
    if values.shape[:2] == mask.shape and values.dim() > 2:
        return values[mask.to(values.device)]
    if values.shape[0] == mask.numel() and values.dim() == 2:
        return values[mask.flatten().to(values.device)]
    return values
