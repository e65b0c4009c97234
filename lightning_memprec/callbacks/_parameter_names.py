"""Which parameter is which, where its gradient is, and whether it is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_memprec.scaling.norms import optimizer_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

__all__ = ["ParameterNames", "sharding"]


class ParameterNames:
    """Names parameters of optimizers by the module's names.

    Args:
        module: The module.
        plugin: Its precision plugin, which may have put master weights into the optimizers.
        optimizers: The optimizers; parameters that nobody names are named by their place in them.
    """

    def __init__(self, module: nn.Module, plugin: Any, optimizers: Sequence[Any]) -> None:
        self._module = module
        self._plugin = plugin
        self._optimizers = optimizers
        self._names: dict[int, str] = {}

    def __call__(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            self._collect()
        return self._names.get(id(parameter), "unknown")

    @property
    def has_masters(self) -> bool:
        """Whether master weights stand in for the module's parameters."""
        return bool(self._pairs())

    def holders(self, optimizer: Any) -> list[Tensor]:
        """Return the tensors that hold the gradients of an optimizer's parameters.

        Master weights may leave theirs with the half parameters they stand for, until the step.
        """
        parameters = optimizer_parameters(optimizer)
        pairs = self._pairs()
        if not pairs or any(parameter.grad is not None for parameter in parameters):
            return parameters
        halves = {id(pair.master): parameter for parameter, pair in pairs.items()}
        return [halves.get(id(parameter), parameter) for parameter in parameters]

    def _pairs(self) -> Any:
        """Return half parameters with their masters, from this package's `MasterWeightPrecision`."""
        return getattr(getattr(self._plugin, "store", None), "pairs", {})

    def _collect(self) -> None:
        names: dict[int, str] = {}
        for number, optimizer in enumerate(self._optimizers):
            for place, parameter in enumerate(optimizer_parameters(optimizer)):
                names[id(parameter)] = f"optimizer {number}, parameter {place}"
        names.update((id(parameter), name) for name, parameter in self._module.named_parameters())
        for parameter, pair in self._pairs().items():
            names[id(pair.master)] = names.get(id(parameter), names.get(id(pair.master), "unknown"))
        self._names = names


def sharding(trainer: Any) -> tuple[Any, bool]:
    """Tell how a Trainer's parameters are split over ranks.

    Args:
        trainer: A Trainer inside ``fit``.

    Returns:
        The process group over which squares of gradients are summed, ``None`` if there is none, and whether
        parameters are split at all.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None, False
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = trainer.strategy.model
    if isinstance(model, FullyShardedDataParallel):
        whole = model.sharding_strategy == ShardingStrategy.NO_SHARD
        return (None, False) if whole else (model.process_group, True)
    return None, any(hasattr(parameter, "to_local") for parameter in model.parameters())
