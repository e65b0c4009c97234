"""The way of a gradient: out of a half parameter, in FP32 into its master, and visible on both.

A half parameter gets its gradient in half. After each backward the gradient is cast to FP32, parameter by
parameter, and becomes the master's; the half one is freed. Then the parameter is shown the *same* FP32 tensor
(``Tensor.grad_dtype`` lets a half parameter hold it), so that whoever reads or clips gradients through
``module.parameters()`` sees what the optimizer will see, and the next micro-batch accumulates in FP32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprec.master_weights.pair import Pair

__all__ = ["average_over_ranks", "drop", "follow_optimizer", "hide", "show", "take"]

_CAN_SHOW = hasattr(torch.Tensor, "grad_dtype")


def is_half(gradient: Tensor | None) -> bool:
    """Tell whether a gradient has been produced in half and not been taken yet."""
    return gradient is not None and gradient.dtype in (torch.float16, torch.bfloat16)


def is_shown(pair: Pair) -> bool:
    """Tell whether the parameter was given its master's gradient to hold."""
    return _CAN_SHOW and pair.parameter.grad_dtype is torch.float32


def show(pair: Pair) -> None:
    """Let the parameter hold its master's FP32 gradient."""
    if _CAN_SHOW and pair.master.grad is not None and pair.parameter.grad is not pair.master.grad:
        pair.parameter.grad = None
        pair.parameter.grad_dtype = torch.float32
        pair.parameter.grad = pair.master.grad


def hide(pair: Pair) -> None:
    """Take the FP32 gradient from the parameter, so that its next one is produced in half."""
    if is_shown(pair):
        pair.parameter.grad = None
        pair.parameter.grad_dtype = pair.parameter.dtype


def drop(pair: Pair) -> None:
    """Free the gradient on both sides."""
    hide(pair)
    pair.parameter.grad = pair.master.grad = None


def take(pair: Pair) -> None:
    """Add a gradient that a backward has just left on the parameter to the master's, in FP32."""
    gradient = pair.parameter.grad
    if gradient is None:
        if is_shown(pair):  # The user cleared the module's gradients.
            pair.master.grad = None
            hide(pair)
    elif not is_half(gradient):
        # Accumulated in place, or, for sparse gradients and with `create_graph`, in a new tensor.
        pair.master.grad = gradient
    else:
        pair.parameter.grad = None
        gradient = gradient.detach()
        if pair.master.grad is None:
            pair.master.grad = gradient.float()
        elif gradient.is_sparse or pair.master.grad.is_sparse:
            pair.master.grad = pair.master.grad + gradient.float()
        else:
            pair.master.grad.add_(gradient)  # Computed in FP32: the half operand is cast exactly.


def follow_optimizer(pair: Pair) -> None:
    """Make the parameter's gradient agree with the master's, which the optimizer may have cleared.

    A half gradient that is still pending, from a ``loss.backward()`` that no hook saw, is taken.
    """
    gradient = pair.parameter.grad
    if is_half(gradient) or (gradient is None and is_shown(pair)):
        take(pair)
    elif pair.master.grad is None:
        hide(pair)
    elif is_shown(pair):
        show(pair)


def average_over_ranks(pairs: Sequence[Pair], group: Any) -> None:
    """Average the FP32 gradients that ranks accumulated on their own, as DDP averages half ones.

    Ranks first agree on the parameters that any of them has such a gradient for, so that all make the same
    calls. A gradient that no rank has stays ``None``.

    Args:
        pairs: Parameters with their masters, in the same order on every rank.
        group: The process group.
    """
    if not pairs:
        return
    mine = [pair.unreduced and pair.master.grad is not None for pair in pairs]
    anyone = torch.tensor(mine, dtype=torch.uint8, device=pairs[0].master.device)
    torch.distributed.all_reduce(anyone, torch.distributed.ReduceOp.MAX, group=group)
    size = torch.distributed.get_world_size(group)
    for pair, wanted in zip(pairs, anyone.tolist(), strict=True):
        pair.unreduced = False
        if wanted:
            if pair.master.grad is None:
                pair.master.grad = torch.zeros_like(pair.master)
            pair.master.grad.div_(size)  # Before the sum, as DDP does.
            torch.distributed.all_reduce(pair.master.grad, group=group)
