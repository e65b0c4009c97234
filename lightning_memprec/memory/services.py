"""What a LightningModule expects of its Trainer while it is traced: log, optimizers, backward, clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_memprec.memory.metrics import tolerate_metrics
from lightning_memprec.memory.stand_in import trainer_stand_in

if TYPE_CHECKING:
    from lightning_memprec.memory.loop import TrainingLoop

__all__ = ["ModuleServices", "TracedOptimizer"]


class TracedOptimizer:
    """What ``self.optimizers()`` gives under manual optimization: the optimizer, its step recorded."""

    def __init__(self, optimizer: Optimizer, loop: TrainingLoop) -> None:
        self.optimizer = optimizer
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step as the precision plugin does."""
        return self._loop.step_optimizer(self.optimizer, closure)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only this optimizer's parameters require gradients inside the block."""
        module = self._loop.module
        module.toggle_optimizer(self)  # type: ignore[operator]
        try:
            yield
        finally:
            module.untoggle_optimizer(self)  # type: ignore[operator]


class ModuleServices:
    """Gives the copy of a module what a Trainer would give the module.

    Args:
        loop: The loop that runs the copy.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._logged: dict[str, Tensor] = {}

    def attach(self) -> None:
        """Give the copy the Trainer and the methods that a Trainer gives a module."""
        loop, module = self._loop, self._loop.module
        tolerate_metrics(module, loop.note)
        if not hasattr(module, "training_step"):
            return
        trainer = loop.plan.trainer if loop.plan.trainer is not None else trainer_stand_in(loop.plan)
        for child in module.modules():
            # LightningModules inside the module share its Trainer and device.
            if hasattr(child, "_trainer"):
                vars(child).update(
                    _trainer=trainer, _device=loop.device, log=self._log, log_dict=self._log_all
                )
        replaced: dict[str, Any] = {
            "print": lambda *args, **kwargs: None,
            "optimizers": self._get_optimizers,
            "lr_schedulers": self._get_schedulers,
            "manual_backward": lambda loss, *args, **kwargs: loop.backward(loss, *args, **kwargs),
            "clip_gradients": loop.clip_gradients,
        }
        vars(module).update(replaced)

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, Tensor):
            self._logged[name] = value.detach().clone()

    def _log_all(self, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            self._log(name, value)

    def _get_optimizers(self, use_pl_optimizer: bool = True) -> Any:
        wrapped = [TracedOptimizer(o, self._loop) if use_pl_optimizer else o for o in self._loop.optimizers]
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def _get_schedulers(self) -> Any:
        schedulers = self._loop.schedulers
        return schedulers[0] if len(schedulers) == 1 else schedulers or None
