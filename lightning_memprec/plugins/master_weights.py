"""Train in half with FP32 master weights."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_memprec._lightning import PrecisionBase, misconfiguration, precision_class, raw_optimizer
from lightning_memprec.master_weights.casting import cast_module, patterns_of, ruined_buffers, unmatched
from lightning_memprec.master_weights.checkpoint import restore
from lightning_memprec.master_weights.in_place import masters_in_place
from lightning_memprec.master_weights.loss_scale import (
    HalfLossScaler,
    found_infinity,
    inverse_scale,
    is_unscaled,
    record_infinity,
    unscales_itself,
)
from lightning_memprec.master_weights.low_memory import Clip, StepInBackward, any_infinity, step_in_chunks
from lightning_memprec.master_weights.store import MasterStore
from lightning_memprec.plugins._callbacks import show_to_callbacks, widen_averages
from lightning_memprec.plugins._ddp import ddp_of, reduces_later
from lightning_memprec.plugins._limits import (
    WHY_NOT_BOTH,
    refuse_wrappers,
    unmatched_in_words,
    why_not_in_backward,
    why_not_in_chunks,
)
from lightning_memprec.plugins._sharding import refuse_sharding
from lightning_memprec.plugins._toggling import toggling
from lightning_memprec.scaling.saved_state import find_scaler_states

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from lightning_memprec._lightning import LightningModule

__all__ = ["MasterWeightPrecision"]

# Plugins whose scaler state continues in ours.
_SCALER_KEYS = ("MixedPrecision", "FSDPPrecision", "native_amp_scaling_state")


class MasterWeightPrecision(PrecisionBase):
    """Parameters, activations and gradients in half; FP32 masters for the optimizer and for checkpoints.

    Pass it as a plugin, without `precision`: `Trainer(plugins=[MasterWeightPrecision("bf16-master")])`.

    Any torch optimizer steps the masters in FP32, with FP32 gradients; after each step they are rounded into the
    parameters. Every `state_dict` holds the masters under the parameters' ordinary keys, so that checkpoints are
    those of an FP32 run. With AdamW a parameter takes 16 bytes during backward and 18 at the step's peak, or 18
    throughout while gradients accumulate.

    Args:
        precision: Dtype of the model. "bf16-master" is bfloat16, "16-master" is float16 with a loss scale.
        scaler: A GradScaler to use instead of the default one, or as a safety net for bfloat16. By default
            float16 gets one that starts at 2^15 and stays at or above 1, and bfloat16 gets none.
        keep_fp32: What stays in FP32. Names of modules, parameters or buffers, with * and ?, or class names
            such as "LayerNorm"; a single one may be a plain string. Modules with running statistics always do.
        low_memory: Whether to keep gradients in half until the step, which then takes some parameters at a
            time. The step's peak falls from 18 to about 16 bytes a parameter. Only for optimizers that treat
            every parameter on its own, without accumulation, in automatic optimization.
        step_in_backward: Whether to step each parameter as soon as its gradient is there. Saves 2 more bytes.
            Neither with clipping, nor with a scaler, nor on several devices, nor with `low_memory`.

    Raises:
        ValueError: If `precision` is not one of the two, `keep_fp32` holds what is not a name, or `low_memory`
            and `step_in_backward` are both asked for.
        MisconfigurationException: If the strategy shards the model, as FSDP and DeepSpeed do, or if an optimizer or
            the run does not go with masters or with one of the options. Raised when a run starts.

    Example::

        Trainer(plugins=[MasterWeightPrecision("bf16-master", keep_fp32=["LayerNorm", "head"])])
    """

    def __init__(
        self,
        precision: Literal["bf16-master", "16-master"] = "bf16-master",
        scaler: torch.amp.GradScaler | None = None,
        keep_fp32: list[str] | str | None = None,
        low_memory: bool = False,
        step_in_backward: bool = False,
    ) -> None:
        if precision not in ("bf16-master", "16-master"):
            raise ValueError(f"`precision` must be 'bf16-master' or '16-master', got {precision!r}.")
        if low_memory and step_in_backward:
            raise ValueError(WHY_NOT_BOTH)
        # Lightning's own name of the dtype: its model summary and throughput monitor know no other.
        super().__init__("bf16-true" if precision == "bf16-master" else "16-true")
        self.master_precision = precision
        self.keep_fp32 = patterns_of(keep_fp32)
        self.low_memory = low_memory
        self.step_in_backward = step_in_backward
        if scaler is None and precision == "16-master":
            scaler = HalfLossScaler("cuda" if torch.cuda.is_available() else "cpu")
        self.scaler = scaler
        self.imported_scaler_key: str | None = None  # Of the state that this run took from another plugin.
        self.store = MasterStore()
        self._module: Any = None  # The LightningModule, during a run.
        self._ambient_dtype = torch.float32
        self._clip: Clip | None = None  # Asked for in this step, with `low_memory`.
        self._in_backward: list[StepInBackward] = []
        self._hide_from_callbacks: Callable[[], None] | None = None

    # --- setup and end ---

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()  # Built in half, the initial weights would be rounded ones.

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        refuse_sharding(module)
        dtype = self._desired_input_dtype
        ruined = ruined_buffers(module, dtype, self.keep_fp32)
        if ruined:
            rank_zero_warn(
                f"Whole numbers in the buffers {ruined} become equal in {dtype}. To keep them apart, pass "
                f"`MasterWeightPrecision(keep_fp32={ruined + self.keep_fp32})`."
            )
        missing = unmatched(module, self.keep_fp32)
        if missing:
            rank_zero_warn(unmatched_in_words(missing, type(module).__name__))
        if not self.store.serves(module):
            self.store = MasterStore()  # The module of an earlier run keeps its own.
        cast_module(module, dtype, self.keep_fp32, before=partial(self.store.remember, dtype=dtype))
        self.store.attach(module)
        return module

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[Any, Any, Any]:
        is_ddp = isinstance(model, DistributedDataParallel)
        self._module = model.module if is_ddp else model
        self.imported_scaler_key = None
        self.store.process_group = model.process_group if is_ddp else None
        self.store.connect(optimizers)
        refuse_wrappers(self._module, self.store, optimizers)
        self._show_to_callbacks()
        if optimizers and (self.low_memory or self.step_in_backward):
            self._connect_low_memory(optimizers, is_ddp=is_ddp)
        device = next((p.device.type for p in model.parameters()), "cpu")
        if isinstance(self.scaler, HalfLossScaler) and self.scaler._device != device:
            self.scaler = HalfLossScaler(device)
        return model, optimizers, lr_schedulers

    def _show_to_callbacks(self) -> None:
        trainer = self._module.trainer
        widen_averages(trainer, self._module, self.store)
        self._hide_from_callbacks = show_to_callbacks(trainer, self.show_masters)

    def show_masters(self) -> AbstractContextManager[None]:
        """Let the module's parameters be the FP32 masters for a while, during a run.

        For code that must read or write unrounded weights, such as an average of your own::

            with trainer.precision_plugin.show_masters():
                average.update_parameters(self)

        The module must not compute inside. What is written to the masters is rounded into the parameters at the end.

        Raises:
            RuntimeError: If no run is going on.
        """
        if self._module is None:
            raise RuntimeError(
                "`show_masters` needs a run, from `on_fit_start` on. Outside of it, take `module.state_dict()`."
            )
        return masters_in_place(self._module, self.store)

    def _connect_low_memory(self, optimizers: list[Any], *, is_ddp: bool) -> None:
        trainer = self._module.trainer
        option = "step_in_backward" if self.step_in_backward else "low_memory"
        reason = why_not_in_chunks(trainer, self._module, optimizers)
        if self.step_in_backward and not reason:
            reason = why_not_in_backward(trainer, has_scaler=self.scaler is not None, is_ddp=is_ddp)
        if reason:
            raise misconfiguration(
                trainer, f"`MasterWeightPrecision({option}=True)` cannot be used: {reason}"
            )
        if self.step_in_backward:
            self._in_backward = [StepInBackward(self.store, optimizer) for optimizer in optimizers]

    @override
    def teardown(self) -> None:
        for hooks in self._in_backward:
            hooks.remove()
        self._in_backward = []
        if self._hide_from_callbacks is not None:
            self._hide_from_callbacks()
            self._hide_from_callbacks = None
        self.store.refresh()
        self.store.to_host()
        self._module = None

    # --- forward ---

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        self.store.refresh()
        with _default_dtype(self._desired_input_dtype):
            yield

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        with toggling(self._module, self.store), self.forward_context():
            yield

    # --- backward ---

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        ddp = ddp_of(module)
        expects_gradients = ddp is not None and ddp.find_unused_parameters and ddp.require_backward_grad_sync
        self.store.before_backward(alone=ddp is None, expects_gradients=expects_gradients)
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        result: Tensor = precision_class(module).pre_backward(self, tensor, module)
        return result

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        ddp = ddp_of(module)
        if self.low_memory or self.step_in_backward:
            pass  # Gradients stay half until the step, or are gone already.
        elif ddp is None:
            self.store.after_backward()
        elif not ddp.require_backward_grad_sync:
            self.store.after_backward(local=True)
        elif not reduces_later(ddp, module):
            accumulates = module.trainer.accumulate_grad_batches > 1 or not module.automatic_optimization
            self.store.after_backward(average=accumulates)
        result: Tensor = precision_class(module).post_backward(self, tensor, module)
        return result

    # --- step ---

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        self.store.is_stepping = True
        self._ambient_dtype = torch.get_default_dtype()
        evaluations = 0

        def evaluate() -> Any:
            nonlocal evaluations
            if evaluations:
                self.store.write_back(optimizer)
            evaluations += 1
            with _default_dtype(self._ambient_dtype):
                result = closure()
                if not self.low_memory:
                    self.store.prepare(optimizer)
                if self.scaler is not None and (result is not None or not model.automatic_optimization):
                    self._unscale(optimizer)
                precision_class(model)._after_closure(self, model, optimizer)
            return result

        try:
            # In manual optimization the default dtype is half here, and new optimizer states would be, too.
            with _default_dtype(torch.float32):
                if self.low_memory and not self.step_in_backward:
                    return self._chunked_step(optimizer, evaluate, **kwargs)
                if self.scaler is None:
                    return optimizer.step(closure=evaluate, **kwargs)
                return self._scaled_step(optimizer, model, evaluate, **kwargs)
        finally:
            self.store.is_stepping = False

    def _scaled_step(
        self, optimizer: Optimizer, model: LightningModule, evaluate: Callable[[], Any], **kwargs: Any
    ) -> Any:
        assert self.scaler is not None
        if isinstance(optimizer, torch.optim.LBFGS):
            raise misconfiguration(
                model.trainer,
                "LBFGS evaluates the loss several times in a step, which a GradScaler cannot follow. "
                'Use `MasterWeightPrecision("bf16-master")`, which needs none.',
            )
        result = evaluate()
        if result is None and model.automatic_optimization:
            return result  # `training_step` returned None: there was no backward.
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def _chunked_step(self, optimizer: Optimizer, evaluate: Callable[[], Any], **kwargs: Any) -> Any:
        self._clip = None
        result = evaluate()
        if self.scaler is None:
            step_in_chunks(self.store, optimizer, clip=self._clip, **kwargs)
        elif result is not None:
            if found_infinity(self.scaler, optimizer):
                self.store.drop_gradients()
            else:
                scale = inverse_scale(self.scaler)
                step_in_chunks(self.store, optimizer, inverse_scale=scale, clip=self._clip, **kwargs)
            self.scaler.update()
        return result

    def _unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients, unless that was done already or the step itself will do it."""
        assert self.scaler is not None
        if self.low_memory:
            record_infinity(self.scaler, optimizer, any_infinity(self.store, optimizer))
        elif is_unscaled(self.scaler, optimizer) or unscales_itself(optimizer):
            pass
        else:
            self.scaler.unscale_(optimizer)

    @override
    def _clip_gradients(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        precision_class(model)._clip_gradients(self, model, optimizer, *args, **kwargs)

    @override
    def clip_gradients(  # type: ignore[override]
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        optimizer = raw_optimizer(optimizer)
        if self.low_memory:
            kind: Literal["norm", "value"] = "value" if gradient_clip_algorithm == "value" else "norm"
            self._clip = Clip(kind, clip_val) if clip_val > 0 else None
            return
        if clip_val > 0 and self.scaler is not None and unscales_itself(optimizer):
            raise RuntimeError(
                f"`{type(optimizer).__name__}` unscales gradients inside its step, so they cannot be clipped "
                "before. Pass `fused=False` to the optimizer."
            )
        # Manual optimization: `self.clip_gradients` before `optimizer.step()`.
        if not self.store.is_stepping:
            self.store.prepare(optimizer)
            if self.scaler is not None:
                self._unscale(optimizer)
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    # --- checkpoints ---

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._module is not None:
            # `WeightAveraging` files its average as the state, and the weights being trained apart.
            state = checkpoint.get("current_model_state", checkpoint.get("state_dict", {}))
            restore(self._module, self.store, state)
        if type(self).__qualname__ not in checkpoint:
            self._import_scaler(find_scaler_states(checkpoint))

    def _import_scaler(self, states: dict[str, dict[str, Any]]) -> None:
        """Go on with the scaler state of another plugin."""
        key = next((key for key in _SCALER_KEYS if key in states), None)
        if self.scaler is None or key is None:
            return
        if isinstance(self.scaler, HalfLossScaler):
            self.scaler.take_over(states[key])
        else:
            self.scaler.load_state_dict(states[key])
        self.imported_scaler_key = key
        rank_zero_info(
            f"MasterWeightPrecision: the checkpoint's `{key}` had a loss scale of {states[key]['scale']:g}; "
            f"this run starts at {self.scaler.get_scale():g}."
        )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
