"""FP32 masters of half-precision parameters, as far as they matter for memory.

Follows ``MasterWeightPrecision``: what is alive when, and what each move takes for a moment. A parameter costs 2
bytes in half, 4 for its master and, with Adam, 8 of states. Its gradient is 2 bytes while backward runs and 4 from then
on; with ``low_memory`` it stays at 2 until the step, which goes through the parameters in chunks; with
``step_in_backward`` it goes as soon as it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from lightning_memprec._errors import TraceError
from lightning_memprec._partial_step import chunks, is_separable, only
from lightning_memprec.memory.trace import Recorder

if TYPE_CHECKING:
    from lightning_memprec.memory.plan import MasterOptions

__all__ = ["MasterWeights", "cast_to_half"]

_HALF = (torch.float16, torch.bfloat16)
# Elements that are compared at a time with what others may have written: for each thread on a CPU, and elsewhere.
_CPU_PIECE, _DEVICE_PIECE = 2**16, 2**22


def cast_to_half(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module in place, but for modules with running statistics, which would stop moving in half.

    Args:
        module: The module.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
    """
    module.to(dtype)
    for child in module.modules():
        if isinstance(child, _NormBase) and child.track_running_stats:
            child.float()


class MasterWeights:
    """Puts an FP32 master in the place of every half-precision parameter of the optimizers.

    Args:
        optimizers: Optimizers to change in place.
        recorder: Recorder that counts the masters, as optimizer states.
        names: Parameter names by identity; the masters are added to it.
        options: How gradients reach the masters.
        alone: Whether nobody but autograd touches the gradients. DDP's reducer wants them in half.
        on_cpu: Whether the run is one on a CPU, where a question to a tensor costs nothing.

    Raises:
        TraceError: If an optimizer cannot step its parameters one by one, as the options demand.
    """

    def __init__(
        self,
        optimizers: list[Optimizer],
        recorder: Recorder,
        names: dict[int, str],
        options: MasterOptions,
        *,
        alone: bool = True,
        on_cpu: bool = False,
    ) -> None:
        self.options = options
        self.clip_algorithm: str | None = None  # Asked for in this step, with `low_memory`.
        self._recorder = recorder
        self._names = names
        self._alone = alone
        self._on_cpu = on_cpu
        self._masters: dict[Tensor, Tensor] = {}
        self._parameters: dict[Tensor, Tensor] = {}
        for optimizer in optimizers:
            self._adopt(optimizer)
        if options.low_memory or options.step_in_backward:
            for optimizer in optimizers:
                _check_separable(optimizer)
        if options.step_in_backward:
            for optimizer in optimizers:
                for stepped in _parameters_of(optimizer):
                    take_step = partial(self._take_step, optimizer, stepped)
                    self._holder(stepped).register_post_accumulate_grad_hook(take_step)  # type: ignore[no-untyped-call]

    @property
    def steps_in_chunks(self) -> bool:
        """Whether gradients stay in half until the step."""
        return self.options.low_memory and not self.options.step_in_backward

    def _adopt(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.dtype not in _HALF:
                    continue
                master = self._masters.get(parameter)
                if master is None:
                    master = parameter.detach().float().requires_grad_(parameter.requires_grad)
                    self._names[id(master)] = self._names.get(id(parameter), "")
                    self._recorder.mark(master, "optimizer states", self._names[id(master)])
                    self._masters[parameter], self._parameters[master] = master, parameter
                group["params"][index] = master
                if parameter in optimizer.state:  # Made in the optimizer's constructor.
                    state = optimizer.state.pop(parameter)
                    optimizer.state[master] = {k: _in_fp32(value) for k, value in state.items()}

    # -- backward -------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Free what the optimizers or the module cleared; let the rest accumulate in FP32, in place."""
        for parameter, master in self._masters.items():
            is_shown = parameter.grad_dtype is torch.float32
            if is_shown and parameter.grad is None:
                master.grad = None
            if is_shown and (master.grad is None or not self._alone):
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype

    def after_backward(self) -> None:
        """Give each master its gradient in FP32, free the half one, and show the parameter the master's."""
        if self.options.low_memory or self.options.step_in_backward:
            return
        for parameter, master in self._masters.items():
            gradient = parameter.grad
            if gradient is None or gradient.dtype not in _HALF:
                continue
            parameter.grad = None
            if master.grad is None:
                master.grad = gradient.detach().float()
                self._recorder.mark(master.grad, "gradients", self._names[id(master)])
            else:
                master.grad.add_(gradient.detach())
            del gradient  # Else it would live until the next one.
            parameter.grad_dtype = torch.float32
            parameter.grad = master.grad

    def _holder(self, stepped: Tensor) -> Tensor:
        """Return the parameter that holds a gradient until the step."""
        return self._parameters.get(stepped, stepped)

    def _take_gradient(self, stepped: Tensor) -> None:
        holder = self._holder(stepped)
        gradient, holder.grad = holder.grad, None
        stepped.grad = None if gradient is None else gradient.float()

    @torch.no_grad()
    def _take_step(self, optimizer: Optimizer, stepped: Tensor, _: Tensor) -> None:
        self._compare(stepped)
        self._take_gradient(stepped)
        self._step_only(optimizer, [stepped])

    # -- step -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare(self, optimizer: Optimizer) -> None:
        """Look for what others wrote over the parameters, before a step of all of them."""
        if not self.options.low_memory:
            for stepped in _parameters_of(optimizer):
                self._compare(stepped)

    def _compare(self, stepped: Tensor) -> None:
        parameter = self._parameters.get(stepped)
        if parameter is not None:
            # One piece stands for all: each is freed before the next.
            size = _CPU_PIECE * torch.get_num_threads() if self._on_cpu else _DEVICE_PIECE
            single, half = stepped, parameter
            if single.is_contiguous() and half.is_contiguous():
                single, half = single.view(-1)[:size], half.view(-1)[:size]
            rounded = single.to(half.dtype)
            if not self._on_cpu:
                changed = rounded != half
                del rounded
                half.float()  # `torch.where` brings both to one dtype.
                del changed

    def clip(self, algorithm: str) -> None:
        """Clip in the chunks of the step."""
        self.clip_algorithm = algorithm

    @torch.no_grad()
    def step_in_chunks(self, optimizer: Optimizer) -> None:
        """Step some parameters at a time, from half gradients, and free them."""
        parameters = _parameters_of(optimizer)
        if self.clip_algorithm == "norm":
            held = [self._holder(p).grad for p in parameters]
            norms = [torch.linalg.vector_norm(g, 2, dtype=torch.float32) for g in held if g is not None]
            del held
            torch.linalg.vector_norm(torch.stack(norms), 2)
        self.clip_algorithm = None
        for chunk in chunks(parameters, Tensor.numel):
            for stepped in chunk:
                self._compare(stepped)
                self._take_gradient(stepped)
            self._step_only(optimizer, chunk)

    def _step_only(self, optimizer: Optimizer, chosen: Sequence[Tensor]) -> None:
        with only(optimizer, chosen):
            optimizer.step()
        for stepped in chosen:
            stepped.grad = None

    def write_back(self, optimizer: Optimizer) -> None:
        """Round the masters into the parameters."""
        with torch.no_grad():
            for stepped in _parameters_of(optimizer):
                if stepped in self._parameters:
                    self._parameters[stepped].copy_(stepped)


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_separable(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if not is_separable(optimizer):
        raise TraceError(
            f"`{kind.__name__}` is not known to treat every parameter on its own. "
            "Use an optimizer of `torch.optim` such as AdamW, or drop the option of the plugin."
        )
