"""One training step after another, in the order of Lightning's loop, on a module without storage.

Order of Lightning 2.6 (``loops/training_epoch_loop.py``, ``loops/optimization/automatic.py``)::

    batch to device → optimizer.step(closure), where closure is
        training_step → loss / accumulation → zero_grad (first micro-batch) → backward
    → unscale → on_before_optimizer_step → clip → update

so that the gradients of one step live through the next forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memprec._errors import TraceError
from lightning_memprec.memory.autocast import AutocastEmulation
from lightning_memprec.memory.calling import call_with, default_loss, takes_index
from lightning_memprec.memory.master import MasterWeights
from lightning_memprec.memory.optimizers import (
    configured_optimizers,
    configured_schedulers,
    state_tensors,
    steppable,
)
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.precision import PrecisionPolicy
from lightning_memprec.memory.result import Assumption
from lightning_memprec.memory.services import ModuleServices, TracedOptimizer
from lightning_memprec.memory.sharding.engine import Engine
from lightning_memprec.memory.trace import Recorder
from lightning_memprec.memory.tree import map_tensors, tensors_in

__all__ = ["TrainingLoop"]

# Parameters and gradients keep their names for what belongs to them.
_FIXED = ("parameters", "buffers", "gradients")


def _without_the_rest(tensor: Tensor) -> Tensor:
    """Copy a part of a larger meta tensor: only the part is brought to the device."""
    is_part = tensor.is_meta and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if is_part and not tensor.requires_grad else tensor


class TrainingLoop:
    """Runs the steps of a plan on a copy of its module.

    Args:
        plan: The run.
        module: Copy of the module on ``meta``, already in its precision.
        recorder: Records what the steps allocate.
        policy: Precision of the run.
        autocast: Autocast of the estimated device.
        device: Device that user code believes in.
        engine: Spreads the module over devices.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        module: nn.Module,
        recorder: Recorder,
        policy: PrecisionPolicy,
        autocast: AutocastEmulation,
        device: torch.device,
        engine: Engine | None = None,
    ) -> None:
        self.plan = plan
        self.module = module
        self.recorder = recorder
        self.policy = policy
        self.autocast = autocast
        self.device = device
        self.engine = engine or Engine()
        self.step = 0
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        self.masters: MasterWeights | None = None
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.is_lightning = plan.loss is None and hasattr(module, "training_step")
        self.automatic = bool(getattr(module, "automatic_optimization", True)) or not self.is_lightning
        self.notes: list[Assumption] = []
        ModuleServices(self).attach()

    # -- setup ----------------------------------------------------------------------------------------

    def note(self, assumption: Assumption) -> None:
        """Keep an assumption, once."""
        if assumption.name not in {known.name for known in self.notes}:
            self.notes.append(assumption)

    def configure(self) -> None:
        """Spread the module over its devices, then build the optimizers, as Lightning does."""
        plan, module = self.plan, self.module
        self.engine.wrap(self)
        self.names |= {id(p): name for name, p in module.named_parameters()}
        if plan.optimizer is not None:
            self.optimizers = configured_optimizers(
                plan.optimizer([p for p in module.parameters() if p.requires_grad])
            )
        elif hasattr(module, "configure_optimizers"):
            configured = module.configure_optimizers()  # type: ignore[operator]
            self.optimizers = configured_optimizers(configured)
            self.schedulers = configured_schedulers(configured)
        if plan.adapt_optimizer is not None:
            self.optimizers = [plan.adapt_optimizer(optimizer) for optimizer in self.optimizers]
        self.engine.adapt(self)
        if hasattr(module, "training_step") and hasattr(module._trainer, "optimizers"):
            module._trainer.optimizers = list(self.optimizers)  # type: ignore[union-attr]
        if self.policy.master_weights:
            self.masters = MasterWeights(
                self.optimizers,
                self.recorder,
                self.names,
                plan.masters,
                alone=self.engine.world_size == 1,
                on_cpu=plan.device == "cpu",
            )
        self._mark_states()

    # -- one step -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all steps of the plan."""
        for step in range(self.plan.steps):
            self.step = step
            for micro_batch in range(self.plan.accumulate_grad_batches):
                self._micro_batch(micro_batch)

    def _micro_batch(self, micro_batch: int) -> None:
        index = self.step * self.plan.accumulate_grad_batches + micro_batch
        self.recorder.enter_phase("batch_transfer", self.step)
        batch = self.transfer(self.plan.make_batch())
        self.hook("on_train_batch_start", batch, index)
        outputs: list[Any] = []
        if not self.automatic:
            outputs.append(self._training_step(batch, index))
        else:

            def closure() -> Any:
                return self._closure(batch, index, micro_batch, outputs)

            if micro_batch == self.plan.accumulate_grad_batches - 1 and self.optimizers:
                self._automatic_step(index, closure)
            else:
                with torch.enable_grad(), self.engine.synchronized(not self.optimizers):
                    closure()
        self.hook("on_train_batch_end", outputs[-1] if outputs else None, batch, index)

    def transfer(self, batch: Any, loader: int = 0) -> Any:
        """Bring a batch of a loader to the device, through the module's transfer hooks."""
        if batch is None:
            raise TraceError("The batch is `None`. Pass a batch, or shapes through `batch_spec`.")
        batch = map_tensors(_without_the_rest, batch)
        dtype = self.policy.parameter_dtype
        if dtype is not None:
            batch = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
        if self.is_lightning and hasattr(self.module, "transfer_batch_to_device"):
            batch = self.module.on_before_batch_transfer(batch, loader)  # type: ignore[operator]
            batch = self.module.transfer_batch_to_device(batch, self.device, loader)  # type: ignore[operator]
            batch = self._mark_inputs(batch)
            batch = self.module.on_after_batch_transfer(batch, loader)  # type: ignore[operator]
        else:
            batch = map_tensors(self._to_device, batch)
        return self._mark_inputs(batch)

    def _to_device(self, tensor: Tensor) -> Tensor:
        # Detached: no gradient flows back to the host.
        return tensor.detach().to(self.device).requires_grad_(tensor.requires_grad)

    def _mark_inputs(self, batch: Any) -> Any:
        for tensor in tensors_in(batch):
            self.recorder.mark(tensor, "inputs")
        return batch

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Run a step as the precision plugin does: its default dtype, its autocast."""
        policy = self.policy
        default = torch.get_default_dtype()
        if policy.parameter_dtype is not None:
            torch.set_default_dtype(policy.parameter_dtype)
        try:
            if policy.autocast_dtype is None:
                yield
            else:
                # Lightning disables the cast cache (MixedPrecision.autocast_context_manager).
                with self.autocast.context(policy.autocast_dtype, cache_enabled=False):
                    yield
        finally:
            torch.set_default_dtype(default)

    def _training_step(self, batch: Any, index: int) -> Any:
        self.recorder.enter_phase("forward", self.step)
        with self.forward_context():
            return self.engine.forward(self, self._loss_of, batch, index)

    def _loss_of(self, batch: Any, index: int) -> Any:
        if self.plan.loss is not None:
            return self.plan.loss(self.module, batch)
        if not self.is_lightning:
            return default_loss(call_with(self.module, batch))
        training_step: Any = self.module.training_step
        return training_step(batch, index) if takes_index(training_step) else training_step(batch)

    def _closure(self, batch: Any, index: int, micro_batch: int, outputs: list[Any]) -> Tensor | None:
        output = self._training_step(batch, index)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        closure_loss = detached = None
        if loss is not None:
            if not isinstance(loss, Tensor):
                kind = "float" if isinstance(loss, float) else type(loss).__name__
                raise TraceError(
                    f"`training_step` returned a `{kind}` as the loss. Return a scalar tensor, "
                    "a dictionary with the key 'loss', or `None`."
                )
            closure_loss = loss / self.plan.accumulate_grad_batches
            detached = closure_loss.detach().clone()
        # Lightning drops the loss with its graph here and keeps the other outputs.
        outputs.append({**(output if isinstance(output, Mapping) else {}), "loss": detached})
        del output, loss
        if micro_batch == 0:
            for optimizer in self.optimizers:
                self.hook("on_before_zero_grad", optimizer)
                if not self.hook("optimizer_zero_grad", 0, index, optimizer):
                    optimizer.zero_grad()
        if closure_loss is not None:
            self.backward(closure_loss)
        return detached

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Scale the loss, run the module's backward, and say which storages became gradients."""
        if self.masters is not None:
            self.masters.before_backward()
        if self.policy.loss_scaling:
            loss = loss * torch.full((), 65536.0, device=loss.device)
        self.hook("on_before_backward", loss)
        self.engine.before_backward(self, loss)
        self.recorder.enter_phase("backward", self.step)
        if not self.hook("backward", loss, *args, **kwargs):
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.masters is not None:
            self.masters.after_backward()
        self.engine.after_backward(self)
        self.hook("on_after_backward")
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                # A lazy module makes its parameters in its first forward pass.
                self.recorder.mark(parameter, "parameters", name)
                self.recorder.mark(parameter.grad, "gradients", name)

    def _automatic_step(self, index: int, closure: Callable[[], Any]) -> None:
        optimizer = self.optimizers[0]

        def lightning_closure() -> Any:
            with torch.enable_grad():
                return closure()

        if self.is_lightning and hasattr(self.module, "optimizer_step"):
            self.module.optimizer_step(0, index, TracedOptimizer(optimizer, self), lightning_closure)  # type: ignore[operator]
        else:
            self.step_optimizer(optimizer, lightning_closure)

    def step_optimizer(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step one optimizer as the precision plugin does."""
        in_chunks = self.masters.step_in_chunks if self.masters and self.masters.steps_in_chunks else None
        if self.policy.loss_scaling or in_chunks is not None:
            if closure is not None:
                closure()
            self._before_update(optimizer)
            with steppable(optimizer, None, self.recorder, self.note):
                result = optimizer.step() if in_chunks is None else in_chunks(optimizer)
        else:

            def wrapped() -> Any:
                loss = closure() if closure is not None else None
                self._before_update(optimizer)
                return loss

            with steppable(optimizer, wrapped, self.recorder, self.note) as traceable:
                result = optimizer.step(traceable)
        if self.masters is not None:
            self.masters.write_back(optimizer)
        self.engine.after_step(self, optimizer)
        self._mark_states()
        return result

    def _before_update(self, optimizer: Optimizer) -> None:
        self.recorder.enter_phase("optimizer_step", self.step)
        self.engine.before_step(self, optimizer)
        if self.masters is not None:
            self.masters.prepare(optimizer)
        self.hook("on_before_optimizer_step", optimizer)
        if not self.automatic:
            return
        value, algorithm = self.plan.gradient_clip_val, self.plan.gradient_clip_algorithm
        if not self.hook("configure_gradient_clipping", optimizer, value, algorithm):
            self.clip_gradients(optimizer, value, algorithm)

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of one optimizer, as ``LightningModule.clip_gradients`` does."""
        if gradient_clip_val is None or gradient_clip_val <= 0:
            return
        if self.masters is not None and self.masters.options.low_memory:
            self.masters.clip(gradient_clip_algorithm or "norm")
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)

    # -- helpers --------------------------------------------------------------------------------------

    def hook(self, name: str, *args: Any, **kwargs: Any) -> bool:
        """Call a LightningModule's hook; return whether there is one."""
        hook = getattr(self.module, name, None) if self.is_lightning else None
        if hook is None:
            return False
        hook(*args, **kwargs)
        return True

    def _mark_states(self) -> None:
        storages = self.recorder.events.storages
        for optimizer in self.optimizers:
            for parameter, tensor in state_tensors(optimizer):
                tensor = getattr(tensor, "_local_tensor", tensor)  # of a sharded state
                if not tensor.is_meta or tensor.layout is not torch.strided:
                    continue
                index = self.recorder.register(tensor)
                if index is not None and storages[index].category not in _FIXED:
                    storages[index].category = "optimizer states"
                    storages[index].owner = self.names.get(id(parameter))
