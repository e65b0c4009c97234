"""What a strategy does to the loop of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_memprec.memory.carried import carried_tensors
from lightning_memprec.memory.result import Assumption

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from lightning_memprec.memory.events import MemoryEvents
    from lightning_memprec.memory.loop import TrainingLoop
    from lightning_memprec.memory.trace import Recorder

__all__ = ["Engine", "offloaded", "redirected"]


class Engine:
    """Every device works for itself; strategies override what they do differently.

    Args:
        world_size: Devices of all nodes.

    Attributes:
        inference_mode: Whether it can validate under ``torch.inference_mode``; else Lightning takes ``no_grad``.
        weights_saved: How much of :meth:`weights` one rank saves.
        states_saved: How many times its own optimizer states rank zero saves.
    """

    inference_mode = True
    weights_saved = 1.0
    states_saved = 1

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size
        self._sent: set[int] = set()

    def prepare(self, module: nn.Module) -> None:
        """Called on the copy of the module before its own ``configure_model`` runs."""

    def building(self) -> AbstractContextManager[Any]:
        """Return the context in which the module's own ``configure_model`` runs."""
        return nullcontext()

    def place(self, module: nn.Module, recorder: Recorder) -> None:
        """Count what is on the device when set-up begins: the module."""
        for name, parameter in module.named_parameters():
            recorder.mark(parameter, "parameters", name)
        for name, tensor in carried_tensors(module):
            recorder.mark(tensor, "parameters", name)
        for name, buffer in module.named_buffers():
            recorder.mark(buffer, "buffers", name)

    def count(self, module: nn.Module) -> tuple[int, int]:
        """Return the numbers of trainable elements and of all elements of the whole model."""
        parameters = list(module.parameters())
        return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)

    def wrap(self, loop: TrainingLoop) -> None:
        """Spread the module over devices, before its optimizers are built."""

    def adapt(self, loop: TrainingLoop) -> None:
        """Called with the optimizers, before the first step."""

    def forward(self, loop: TrainingLoop, function: Callable[..., Any], *args: Any) -> Any:
        """Call what runs the module's forward pass, as the strategy does."""
        return function(*args)

    @contextmanager
    def synchronized(self, is_last: bool) -> Iterator[None]:
        """Run a micro-batch; ``is_last`` tells whether an optimizer step follows."""
        yield

    def before_backward(self, loop: TrainingLoop, loss: Tensor) -> None:
        """Called with the loss, before its backward pass."""

    def after_backward(self, loop: TrainingLoop) -> None:
        """Called when a backward pass has ended."""

    def before_step(self, loop: TrainingLoop, optimizer: Optimizer) -> None:
        """Called with the gradients, before they are clipped."""

    def after_step(self, loop: TrainingLoop, optimizer: Optimizer) -> None:
        """Called when an optimizer has stepped."""

    def send_to_host(self, recorder: Recorder, tensor: Tensor) -> None:
        """Note that a tensor lives in host memory, although it is traced like one of the device."""
        index = recorder.register(tensor)
        if index is not None:
            self._sent.add(index)

    def on_host(self, events: MemoryEvents) -> set[int]:
        """Return the numbers of the storages that live in host memory."""
        return self._sent

    def weights(self, loop: TrainingLoop) -> dict[str, Any]:
        """Return the weights of a checkpoint, as one rank gathers them."""
        return loop.module.state_dict()

    def assumptions(self) -> Iterator[Assumption]:
        """Yield what was modelled, and what was traced of the real thing."""
        yield from ()


def offloaded(events: MemoryEvents) -> set[int]:
    """Return what FSDP's CPU offload keeps in host memory: shards, their gradients and all that the optimizer makes.

    Args:
        events: A trace; gathered weights are gone at its end.
    """
    return {
        index
        for index, record in enumerate(events.storages)
        if record.category in ("gradients", "optimizer states")
        or (record.category == "parameters" and record.death == -1)
        or events.phases[record.phase][0] == "optimizer_step"
    }


def redirected(wrapper: nn.Module, module: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function through a wrapper's ``forward``, as Lightning does (``_ForwardRedirection``).

    Args:
        wrapper: Calls the module's ``forward`` in its own.
        module: The wrapped module.
        function: Called in place of that ``forward``.
        args: Its arguments, which the wrapper sees.
    """
    own = vars(module).get("forward")

    def restore() -> None:
        if own is None:
            vars(module).pop("forward", None)
        else:
            module.forward = own  # type: ignore[method-assign]

    def wrapped(*inner_args: Any) -> Any:
        restore()
        return function(*inner_args)

    module.forward = wrapped  # type: ignore[method-assign]
    try:
        return wrapper(*args)
    finally:
        if vars(module).get("forward") is wrapped:
            restore()
