"""What can be learned from a GradScaler without asking the device.

Part of it is private to torch. Where a name is missing, the answer is "unknown", never an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["clamp_scale", "found_infs", "is_unscaled", "scale_tensor", "steps_by_itself"]


def scale_tensor(scaler: Any) -> Tensor | None:
    """Return the scale, float32 on its device, shape ``()``; ``None`` before the first scaled loss.

    Args:
        scaler: A `torch.amp.GradScaler` or a subclass.
    """
    if hasattr(scaler, "_get_scale_async"):
        scale: Tensor | None = scaler._get_scale_async()
        return scale
    return torch.tensor(scaler.get_scale())  # The public way waits for the device.


def is_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Tell whether the optimizer's gradients have been divided by the scale since the last `update`.

    Args:
        scaler: A `torch.amp.GradScaler` or a subclass.
        optimizer: The optimizer.
    """
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        return not steps_by_itself(optimizer)
    # `get` makes no entry where there is none.
    stage = states.get(id(optimizer), {}).get("stage")
    return getattr(stage, "_name_", "") == "UNSCALED"  # What `Enum.name` returns, without its detour.


def found_infs(scaler: Any, optimizer: Any) -> list[Tensor]:
    """Return the scaler's findings for an optimizer, one tensor a device, above 0 where a gradient overflowed.

    Args:
        scaler: A `torch.amp.GradScaler` or a subclass.
        optimizer: The optimizer, after `unscale_` and before `update`.
    """
    states = getattr(scaler, "_per_optimizer_states", {})
    return list(states.get(id(optimizer), {}).get("found_inf_per_device", {}).values())


def steps_by_itself(optimizer: Any) -> bool:
    """Tell whether the optimizer unscales and skips inside its own kernel, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def clamp_scale(scaler: Any, min_scale: float) -> None:
    """Raise the scale to a floor if it fell below, without asking the device.

    torch's scaler has no floor of its own: halved often enough the scale becomes 0, and then NaN gradients pass
    its check for overflow.

    Args:
        scaler: A `torch.amp.GradScaler` or a subclass, after its `update`.
        min_scale: The floor.
    """
    if hasattr(scaler, "_get_scale_async"):
        scale = scaler._get_scale_async()
        if scale is not None:
            scale.clamp_(min=min_scale)
    elif scaler.get_scale() < min_scale:
        scaler.update(new_scale=float(min_scale))
