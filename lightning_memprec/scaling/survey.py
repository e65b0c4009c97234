"""A look at every gradient and parameter of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_memprec.scaling.norms import first_non_finite, tensor_norms, total_norm
from lightning_memprec.scaling.readback import Readback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["Findings", "Survey"]


@dataclass(frozen=True)
class Findings:
    """What a survey found.

    Args:
        grad_norm: L2 norm of all gradients, scaled as they were; ``None`` if it was not taken.
        culprit: First parameter with a non-finite gradient, ``None`` if there is none.
        param_norm: Largest L2 norm of a parameter, ``None`` if it was not taken.
        param_name: The parameter with that norm.
    """

    grad_norm: float | None = None
    culprit: str | None = None
    param_norm: float | None = None
    param_name: str | None = None


class Survey:
    """Norms of gradients and parameters, on their way to the host.

    Args:
        holders: Parameters that hold the gradients to look at; those without one are passed over.
        parameters: Parameters to look at themselves.
        group: Process group over which parameters are sharded; the gradient norm is then summed over its
            ranks, all of which must make a survey.
        sharded: Whether parameters are sharded. Without a ``group`` only the culprit is looked up then.
    """

    def __init__(
        self,
        holders: Sequence[Tensor],
        parameters: Sequence[Tensor] = (),
        *,
        group: Any = None,
        sharded: bool = False,
    ) -> None:
        self._with_grad = [parameter for parameter in holders if parameter.grad is not None]
        self._all = () if sharded else parameters
        self._sharded = sharded
        grads = [parameter.grad for parameter in self._with_grad if parameter.grad is not None]
        tensors = [*grads, *self._all]
        values: list[Tensor] = [tensor_norms(tensors)] if tensors else []
        self._is_summed = group is not None
        if group is not None:
            # A rank whose parts are all empty has no gradient, but takes part.
            square = values[0].square().sum() if grads else torch.zeros((), device=holders[0].device)
            dist.all_reduce(square, group=group)
            values.append(square.sqrt())
        self._copy = Readback(values) if values else None

    def read(self, name_of: Callable[[Tensor], str]) -> Findings:
        """Return what was found, once the numbers have arrived.

        Args:
            name_of: Names a parameter.
        """
        if self._copy is None:
            return Findings()
        values = self._copy.read()
        count = len(self._with_grad)
        grad_norms, param_norms = values[:count], values[count : count + len(self._all)]
        grad_norm = total_norm(grad_norms) if count and not self._sharded else None
        param_norm, largest = _largest(param_norms, self._all)
        bad = first_non_finite(grad_norms)
        return Findings(
            values[-1] if self._is_summed else grad_norm,
            None if bad is None else name_of(self._with_grad[bad]),
            param_norm,
            None if largest is None else name_of(largest),
        )


def _largest(norms: Sequence[float], tensors: Sequence[Tensor]) -> tuple[float | None, Tensor | None]:
    if not norms:
        return None, None
    # NaN counts as largest: it is what a reader must see.
    norm, index = max((norm if norm == norm else float("inf"), index) for index, norm in enumerate(norms))
    return norm, tensors[index]
