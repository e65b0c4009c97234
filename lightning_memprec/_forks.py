"""What works in a forked process."""

from __future__ import annotations

import torch

__all__ = ["autograd_runs"]


def autograd_runs() -> bool:
    """Tell whether autograd works here: not in a child whose parent's has started threads.

    Asked first, because an error in the middle could be taken for one of the user's code.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad():
            torch.ones((), requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True
