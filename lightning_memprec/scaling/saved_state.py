"""Find a loss scaler's state in a Lightning checkpoint, whatever plugin wrote it."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["find_scaler_states"]

# In torch's kernel the scale is FP32, and counters are C integers.
_LARGEST_SCALE, _LARGEST_COUNT = torch.finfo(torch.float32).max, 2**31 - 1
_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def find_scaler_states(checkpoint: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the scaler states at the top level of a checkpoint.

    Lightning stores a precision plugin's state under the plugin's class name (``MixedPrecision``,
    ``FSDPPrecision``), and before version 1.6 under ``native_amp_scaling_state``. A state is told by its form:
    the five entries of `torch.amp.GradScaler.state_dict`, with values that a scaler can have.

    Args:
        checkpoint: A loaded checkpoint.

    Returns:
        States by the key under which they were found.

    Example:
        >>> state = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9,
        ...          "_growth_tracker": 1}
        >>> list(find_scaler_states({"MixedPrecision": state, "epoch": 1, "Broken": {**state, "scale": 0.0}}))
        ['MixedPrecision']
    """
    return {
        key: {name: value[name] for name in _KEYS}
        for key, value in checkpoint.items()
        if isinstance(value, dict) and all(_is_number(value.get(name)) for name in _KEYS) and _is_valid(value)
    }


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= _LARGEST_SCALE  # NaN is not.


def _is_valid(state: dict[str, Any]) -> bool:
    return bool(
        state["scale"] > 0
        and state["growth_factor"] > 1
        and 0 < state["backoff_factor"] < 1
        and isinstance(state["growth_interval"], int)
        and 1 <= state["growth_interval"] <= _LARGEST_COUNT
        and isinstance(state["_growth_tracker"], int)
        and 0 <= state["_growth_tracker"] <= _LARGEST_COUNT
    )
