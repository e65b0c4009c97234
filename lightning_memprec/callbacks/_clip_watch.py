"""Listen to a precision plugin's clipping: what it clips, and the norm that it takes and drops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_memprec._lightning import clips_with_torch, raw_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["ClipWatch"]


class ClipWatch:
    """Wraps a plugin's clipping; gradients are clipped as without it, bit for bit.

    Args:
        plugin: A Lightning precision plugin.
        before: Called with the optimizer before its gradients are clipped.
        after: Called with the optimizer and the norm before clipping, where the plugin clips by norm.
        guard: Calls a function with arguments and keeps its errors from the run.

    Attributes:
        gives_norm: Whether clipping by norm calls ``after``. A plugin that clips in its own way does not.
    """

    def __init__(
        self,
        plugin: Any,
        before: Callable[[Any], None],
        after: Callable[[Any, Tensor], None],
        guard: Callable[..., None],
    ) -> None:
        self._plugin = plugin
        # A function that somebody else has put in the method's place is called, not replaced.
        self.gives_norm = clips_with_torch(plugin) and "clip_grad_by_norm" not in vars(plugin)
        by_norm, by_value = plugin.clip_grad_by_norm, plugin.clip_grad_by_value

        def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
            raw = raw_optimizer(optimizer)
            guard(before, raw)
            if not self.gives_norm:
                by_norm(optimizer, clip_val)
                return
            # Lightning's own two lines, with what the second returns.
            norm = torch.nn.utils.clip_grad_norm_(plugin.main_params(optimizer), clip_val)
            guard(after, raw, norm)

        def clip_grad_by_value(optimizer: Any, clip_val: float) -> None:
            guard(before, raw_optimizer(optimizer))
            by_value(optimizer, clip_val)

        wrappers = {"clip_grad_by_norm": clip_grad_by_norm, "clip_grad_by_value": clip_grad_by_value}
        self._before = {name: vars(plugin).get(name) for name in wrappers}
        vars(plugin).update(wrappers)

    def detach(self) -> None:
        """Give the plugin its own methods back."""
        for name, previous in self._before.items():
            vars(self._plugin).pop(name, None)
            if previous is not None:
                vars(self._plugin)[name] = previous
        self._before.clear()
