"""Watch the optimizer steps of a run without touching them."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from lightning_memprec._lightning import overrides_clipping
from lightning_memprec.callbacks._clip_watch import ClipWatch
from lightning_memprec.callbacks._parameter_names import ParameterNames, sharding
from lightning_memprec.scaling.norms import optimizer_parameters, tensor_norms
from lightning_memprec.scaling.pending import Loss, PendingStep
from lightning_memprec.scaling.readback import Readback
from lightning_memprec.scaling.scaler_access import found_infs, is_unscaled, scale_tensor, steps_by_itself
from lightning_memprec.scaling.survey import Survey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from lightning_memprec._lightning import LightningModule, Trainer
    from lightning_memprec.scaling.record import StepRecord

__all__ = ["ScalerWatch"]

# In manual optimization a wrong order shows at once, but telling it takes two norms, and the first steps may be
# skipped.
_EARLY_NORMS = 4
# Losses of more batches than this between two steps are forgotten, so that memory stays bounded.
_MAX_LOSSES = 256


class ScalerWatch:
    """Turns what happens around each optimizer step of a `fit` into records.

    Skips are told by the optimizers' own step hooks, which a scaler that skips never reaches; fused optimizers
    hold the scaler's finding while they step. All figures travel to the host by themselves and are read when
    they have arrived: at the end of the batch if the scaler has asked the device anyway, one batch later else.

    Args:
        trainer: The Trainer, with optimizers in place.
        pl_module: Its module.
        every_n_steps: Look at all gradients and parameters every so many steps of an optimizer.
        counts: Steps that each optimizer has made before.
        tell: Called with the kind of an event and its figures when a wrong order of calls is seen.
        guard: Calls a function with arguments and keeps its errors from the run.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        every_n_steps: int,
        counts: Mapping[int, int],
        tell: Callable[[str, dict[str, Any]], None],
        guard: Callable[..., None],
    ) -> None:
        self._trainer = trainer
        self._is_manual = not pl_module.automatic_optimization
        self._every_n_steps = every_n_steps
        self._tell = tell
        self._guard = guard
        plugin: Any = trainer.precision_plugin
        scaler = getattr(plugin, "scaler", None)
        self.scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None
        self.batch_idx = 0
        self.last: PendingStep | None = None
        self._pending: list[PendingStep] = []
        self._optimizers: list[Any] = []
        self._indices: dict[int, int] = {}
        self._have_hooks: list[bool] = []
        self._handles: list[Any] = []
        self._stepping: dict[int, PendingStep] = {}
        self._losses: list[Loss] = []
        self._has_stepped = False  # Since the last backward pass.
        self._is_backward = False  # Whether a backward pass of Lightning's is under way.
        self._raw: set[int] = set()  # Optimizers whose gradients came without one.
        self._backwards = 0
        self._backwards_at_step: dict[int, int] = defaultdict(int)
        self._backward_norms: dict[int, Tensor] = {}
        self._counts: dict[int, int] = defaultdict(int, counts)
        self._is_alarmed = False
        self._name_of = ParameterNames(pl_module, plugin, self._optimizers)
        self._group, self._is_sharded = sharding(trainer)
        self.is_order_checked = self.scaler is not None and self._is_manual
        # With master weights the user may unscale first and clip then, which is right and shrinks the norm, too.
        self._can_clip_early = (
            self.is_order_checked and not self._is_sharded and not self._name_of.has_masters
        )
        self._early: dict[int, int] = defaultdict(lambda: _EARLY_NORMS if self._can_clip_early else 0)
        self._clip = ClipWatch(plugin, self._before_clipping, self._after_clipping, guard)
        # The norm is taken once: by clipping, where that does it.
        self._clip_gives_norm = bool(
            self._clip.gives_norm
            and not self._is_manual
            and trainer.gradient_clip_val
            and trainer.gradient_clip_algorithm in (None, "norm")
            and not overrides_clipping(pl_module)
        )
        for optimizer in trainer.optimizers:
            self._attach(optimizer)

    def detach(self) -> None:
        """Take every hook away again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._clip.detach()

    # --- hooks, in the order in which they come ---

    def start_batch(self, batch_idx: int) -> None:
        """Note which batch comes."""
        self.batch_idx, self.last = batch_idx, None

    def before_backward(self, loss: Tensor) -> None:
        """Remember a scaled loss."""
        self._is_backward = True
        if self._has_stepped:
            self._losses.clear()
            self._has_stepped = False
            if self.scaler is not None:
                self._stepping.clear()
        loss = loss.detach()
        self._losses.append(Loss(self.batch_idx, loss if loss.dim() == 0 else loss.sum()))
        del self._losses[:-_MAX_LOSSES]
        self._backwards += 1

    def after_backward(self) -> None:
        """Take the norm of scaled gradients, where a user may clip them too early."""
        self._is_backward = False
        if not self._can_clip_early:
            return
        for index, optimizer in enumerate(self._optimizers):
            grads = [p.grad for p in optimizer_parameters(optimizer) if p.grad is not None]
            if grads and self._is_due(index):
                self._backward_norms[index] = torch.linalg.vector_norm(tensor_norms(grads))

    def before_step(self, optimizer: Any) -> None:
        """Start the copies for a step; its gradients are unscaled now, and not yet clipped."""
        step, known = self._trainer.global_step, self._stepping.get(id(optimizer))
        self._has_stepped = True
        if self.scaler is None and known is not None and known.step == step:
            return  # The optimizer evaluates its closure once more, as LBFGS does.
        index = self._index(optimizer)
        holders = self._name_of.holders(optimizer)
        if not self._is_sharded and all(p.grad is None for p in holders):
            self._has_stepped = False
            return  # `training_step` returned None, or the scaler is about to complain.
        if self.is_order_checked:
            self._find_raw_backward(index)
        pending = PendingStep(
            step,
            self.batch_idx,
            index,
            is_fused=self.scaler is not None and steps_by_itself(optimizer),
            is_unscaled=self.scaler is None or is_unscaled(self.scaler, optimizer),
            has_scaler=self.scaler is not None,
            has_hooks=self._have_hooks[index],
            is_due=self._counts[index] % self._every_n_steps == 0,
            epoch=self._trainer.current_epoch,
        )
        self._send(pending, optimizer, holders)
        self._counts[index] += 1
        self._stepping[id(optimizer)] = self.last = pending
        self._pending.append(pending)

    def _send(self, pending: PendingStep, optimizer: Any, holders: list[Tensor]) -> None:
        """Start the copies of what is known just before a step."""
        pending.send(None if self.scaler is None else scale_tensor(self.scaler), self._losses)
        if not pending.has_hooks and pending.has_scaler:
            infs = found_infs(self.scaler, optimizer)
            pending.found_inf = Readback([torch.stack(infs).sum()]) if infs else None
        if pending.optimizer in self._backward_norms:
            pending.backward_norm = Readback([self._backward_norms.pop(pending.optimizer)])
        if self._is_due(pending.optimizer):
            pending.survey = Survey(
                holders if self._is_alarmed or not self._clip_gives_norm else (),
                optimizer_parameters(optimizer) if pending.is_due else (),
                # An alarm need not be the same on every rank; the schedule is.
                group=self._group if pending.is_due else None,
                sharded=self._is_sharded,
            )

    def _before_clipping(self, optimizer: Any) -> None:
        """Find who clips gradients that are still scaled."""
        manual = self.scaler is not None and self._is_manual
        if manual and scale_tensor(self.scaler) is not None and not is_unscaled(self.scaler, optimizer):
            self._tell("clip_before_unscale", {"scale": self.scaler.get_scale()})

    def _after_clipping(self, optimizer: Any, norm: Tensor) -> None:
        """Keep the norm that clipping has taken."""
        pending = self._stepping.get(id(optimizer))
        if pending is None or pending.clip_norm is not None:
            return
        if not hasattr(norm, "full_tensor"):
            pending.clip_norm = Readback([norm])
        elif pending.is_due:
            pending.clip_norm = Readback([norm.full_tensor()])

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note that an optimizer has stepped: a step hook, which a skipped step never reaches."""
        pending = self._stepping.get(id(optimizer))
        if pending is None:
            return
        pending.has_run = True
        found_inf = getattr(optimizer, "found_inf", None)
        if pending.is_fused and isinstance(found_inf, torch.Tensor):
            self._guard(lambda: setattr(pending, "found_inf", Readback([found_inf])))

    def records(self, *, every: bool = False) -> list[tuple[StepRecord, bool]]:
        """Return the records whose figures have arrived, in the order of steps, and whether each is to be logged.

        Args:
            every: Wait for those on their way too; a step that is under way is none of them.
        """
        scale = None if self.scaler is None else scale_tensor(self.scaler)
        for pending in self._pending:
            pending.follow_scale(scale)
        found = []
        while self._pending and self._pending[0].can_be_read(every=every):
            pending = self._pending.pop(0)
            if not pending.is_left_out:
                found.append((self._resolve(pending), pending.is_due))
        if not every:
            for pending in self._pending:
                pending.is_old = True
        return found

    def _resolve(self, pending: PendingStep) -> StepRecord:
        record = pending.resolve(self._name_of)
        if record.skipped and record.culprit is None and not pending.waits:
            # Its gradients are still there; who skips a step has time for a look.
            holders = self._name_of.holders(self._optimizers[pending.optimizer])
            look = Survey(holders, sharded=self._is_sharded)
            record = record._replace(culprit=look.read(self._name_of).culprit)
        self._is_alarmed = bool(
            record.skipped or (record.loss is not None and not math.isfinite(record.loss))
        )
        if record.grad_norm is not None and not record.skipped:
            self._early[record.optimizer] -= 1
        return record

    # --- parts ---

    def _attach(self, optimizer: Any) -> int:
        index = self._indices[id(optimizer)] = len(self._optimizers)
        self._optimizers.append(optimizer)
        has_hooks = hasattr(optimizer, "register_step_post_hook")
        self._have_hooks.append(has_hooks)
        if has_hooks:
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        if self.is_order_checked and not self._is_sharded:
            self._listen_for_raw_backward(optimizer, index)
        return index

    def _index(self, optimizer: Any) -> int:
        index = self._indices.get(id(optimizer))
        # One that was made after the start of `fit` is new.
        return self._attach(optimizer) if index is None else index

    def _is_due(self, index: int) -> bool:
        """Tell whether the next step of an optimizer is looked at closely."""
        return self._is_alarmed or self._early[index] > 0 or self._counts[index] % self._every_n_steps == 0

    def _listen_for_raw_backward(self, optimizer: Any, index: int) -> None:
        """Let one of an optimizer's parameters tell of backward passes that Lightning knows nothing of."""

        def note(_: Tensor) -> None:
            if not self._is_backward:
                self._raw.add(index)

        listener = next((p for p in self._name_of.holders(optimizer) if p.requires_grad and p.is_leaf), None)
        if listener is not None:
            handle = listener.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _find_raw_backward(self, index: int) -> None:
        """Find gradients that came without Lightning's backward pass."""
        if index in self._raw or self._backwards == self._backwards_at_step[index]:
            self._tell("raw_backward", {})
            self._backward_norms.pop(index, None)  # It is that of other gradients.
        self._raw.discard(index)
        self._backwards_at_step[index] = self._backwards
