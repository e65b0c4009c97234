"""Weights that ZeRO stage 3 gathers for the module at work and releases again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_memprec.memory.sharding.strategies import ZeRO
    from lightning_memprec.memory.trace import Recorder

__all__ = ["Gathering"]


class Gathering:
    """Counts gathered weights, as DeepSpeed's ``PartitionedParameterCoordinator`` keeps them.

    A module's own weights are gathered before its forward and its backward pass, with those that come next up to
    ``prefetch_bucket_size``. They stay for their next use while no more than ``max_live_parameters`` elements live;
    beyond that those used longest ago go. After its backward pass a module's weights go.

    Args:
        module: The model.
        recorder: Counts what is gathered.
        options: Limits, in elements.
        is_persistent: Tells which parameters are never released, and are counted already.
    """

    def __init__(
        self, module: nn.Module, recorder: Recorder, options: ZeRO, is_persistent: Callable[[Tensor], bool]
    ) -> None:
        self._recorder = recorder
        self._options = options
        self._owners = [
            (child, [p for p in child.parameters(recurse=False) if not is_persistent(p)])
            for child in module.modules()
        ]
        self._owners = [(child, parameters) for child, parameters in self._owners if parameters]
        self._gathered: OrderedDict[int, Tensor] = OrderedDict()

    def attach(self) -> None:
        """Hook the modules."""
        for index, (child, _) in enumerate(self._owners):
            child.register_forward_pre_hook(self._fetcher(index, 1))
            child.register_full_backward_pre_hook(self._fetcher(index, -1))
            for parameter in self._owners[index][1]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._release)  # type: ignore[no-untyped-call]

    def _fetcher(self, index: int, direction: int) -> Callable[..., None]:
        def fetch(*args: Any) -> None:
            self._gather(index)
            ahead = self._options.prefetch_bucket_size
            following = index + direction
            while 0 <= following < len(self._owners):
                ahead -= sum(p.numel() for p in self._owners[following][1])
                if ahead < 0:
                    break
                self._gather(following)
                following += direction

        return fetch

    def _gather(self, index: int) -> None:
        for parameter in self._owners[index][1]:
            key = id(parameter)
            if key in self._gathered:
                self._gathered.move_to_end(key)
                continue
            whole = torch.empty(parameter.numel(), dtype=parameter.dtype, device="meta")
            self._recorder.mark(whole, "parameters")
            self._gathered[key] = whole
        needed = {id(parameter) for parameter in self._owners[index][1]}
        live = sum(tensor.numel() for tensor in self._gathered.values())
        for key in list(self._gathered):
            if live <= self._options.max_live_parameters:
                break
            if key not in needed:
                live -= self._gathered.pop(key).numel()

    def _release(self, parameter: Tensor) -> None:
        self._gathered.pop(id(parameter), None)
