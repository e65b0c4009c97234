"""FP32 master copies of half-precision parameters, as far as they matter for memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memprec.memory.trace import Recorder

__all__ = ["MasterWeights"]


class MasterWeights:
    """Puts an FP32 master in the place of every half-precision parameter of the optimizers.

    The masters get FP32 copies of the half gradients before the step and are rounded back after it, so that
    a parameter costs 2 (half) + 4 (master) bytes, and its gradient 2 during backward and 4 during the step.

    Args:
        optimizers: Optimizers to change in place.
        recorder: Recorder that counts the masters, as optimizer states.
        names: Parameter names by identity; the masters are added to it.
    """

    def __init__(self, optimizers: list[Optimizer], recorder: Recorder, names: dict[int, str]) -> None:
        self._recorder = recorder
        self._names = names
        self._pairs: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for optimizer in optimizers:
            pairs = self._pairs.setdefault(id(optimizer), [])
            for group in optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    if parameter.dtype not in (torch.float16, torch.bfloat16):
                        continue
                    master = parameter.detach().float().requires_grad_(parameter.requires_grad)
                    names[id(master)] = names.get(id(parameter), "")
                    recorder.mark(master, "optimizer states", names[id(master)])
                    group["params"][index] = master
                    pairs.append((parameter, master))

    def take_gradients(self, optimizer: Optimizer) -> None:
        """Give each master its parameter's gradient in FP32 and free the half one."""
        for parameter, master in self._pairs[id(optimizer)]:
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
                self._recorder.mark(master.grad, "gradients", self._names[id(master)])
                parameter.grad = None

    def write_back(self, optimizer: Optimizer) -> None:
        """Round the masters into the parameters."""
        with torch.no_grad():
            for parameter, master in self._pairs[id(optimizer)]:
                parameter.copy_(master)

    def zero_grad(self) -> None:
        """Drop the half gradients, which the optimizers do not see."""
        for pairs in self._pairs.values():
            for parameter, _ in pairs:
                parameter.grad = None
