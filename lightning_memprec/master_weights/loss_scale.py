"""The loss scale of float16 training with a float16 loss, and the private parts of GradScaler in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = [
    "HalfLossScaler",
    "found_infinity",
    "inverse_scale",
    "is_unscaled",
    "record_infinity",
    "unscales_itself",
]

# The gradient that flows into a float16 loss is the scale itself, in float16, whose largest value is 65504.
MAX_SCALE_OF_HALF_LOSS = 2.0**15
# Below 1 the scale makes small gradients vanish, which it is there to prevent. At 0, which backing off reaches
# in the end, gradients turn NaN without the scaler noticing. DeepSpeed and Megatron-LM stop at 1, too.
MIN_SCALE = 1.0


class HalfLossScaler(torch.amp.GradScaler):
    """A GradScaler whose scale stays within what float16 gradients can carry.

    The scale starts at 2^15, never falls below 1, and never exceeds 2^15 while the loss is float16: it is the
    gradient of the loss, and 2^16 would be infinite there, a step skipped each time the scale grows. With a
    loss computed in FP32 it may grow further.

    Args:
        device: Type of the device, "cuda" or "cpu".
    """

    def __init__(self, device: str) -> None:
        super().__init__(device, init_scale=MAX_SCALE_OF_HALF_LOSS)

    def scale(self, outputs: Tensor) -> Tensor:  # type: ignore[override]
        """Return the loss times the scale, after holding the scale within its bounds.

        Args:
            outputs: The loss, float16 or FP32.
        """
        if self._scale is None:  # As torch does it in its own method; a loaded scale has no bounds yet.
            self._lazy_init_scale_growth_tracker(outputs.device)
        assert self._scale is not None
        is_half = outputs.dtype == torch.float16
        self._scale.clamp_(MIN_SCALE, MAX_SCALE_OF_HALF_LOSS if is_half else None)
        return super().scale(outputs)

    def take_over(self, state: dict[str, Any]) -> None:
        """Load the state of another scaler, its scale held within the bounds of a float16 loss.

        Lightning's `16-mixed` starts at 2^16, with a loss in FP32. With one here, too, the scale grows back.

        Args:
            state: A `torch.amp.GradScaler.state_dict`.
        """
        scale = min(max(state["scale"], MIN_SCALE), MAX_SCALE_OF_HALF_LOSS)
        self.load_state_dict({**state, "scale": scale})


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Tell whether an optimizer's gradients were unscaled since the last update of the scale."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY)


def unscales_itself(optimizer: Any) -> bool:
    """Tell whether an optimizer unscales gradients in the kernel of its step, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def inverse_scale(scaler: torch.amp.GradScaler) -> Tensor:
    """Return one over the scale, rounded as ``GradScaler.unscale_`` rounds it; FP32 scalar on its device."""
    scale = scaler._get_scale_async()
    assert scale is not None, (
        "The loss was not scaled: use `self.manual_backward(loss)`, not `loss.backward()`."
    )
    return scale.double().reciprocal().float()


def record_infinity(scaler: torch.amp.GradScaler, optimizer: Optimizer, infinity: Tensor) -> None:
    """Tell a scaler, for its next update, whether an optimizer's gradients are all finite.

    Args:
        scaler: The scaler.
        optimizer: The optimizer.
        infinity: 1.0 if any gradient is infinite or NaN, else 0.0.
    """
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {infinity.device: infinity}


def found_infinity(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Tell whether an infinite or NaN gradient was recorded. Waits for the device."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(infinity.item()) for infinity in found.values())
