"""Validation between the training steps: the module's own ``validation_step``, as Lightning's loop runs it.

Order of Lightning 2.6 (``loops/training_epoch_loop.py``, ``loops/evaluation_loop.py``)::

    on_validation_model_zero_grad → eval mode → on_validation_start → on_validation_epoch_start
    → for each batch: to device → on_validation_batch_start → validation_step → on_validation_batch_end
    → on_validation_epoch_end → on_validation_end → modes restored

The gradients are released first, the optimizer states stay. The hooks at the end are not run: they read values, and
write files and logs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_memprec._errors import TraceError
from lightning_memprec._units import format_bytes
from lightning_memprec.memory._location import error_location
from lightning_memprec.memory.calling import call_with, takes_index
from lightning_memprec.memory.result import Assumption

if TYPE_CHECKING:
    from lightning_memprec.memory.loop import TrainingLoop
    from lightning_memprec.memory.plan import ValidationLoader, ValidationPlan

__all__ = ["TimeLimit", "validate"]

# The first batch makes what stays (states of metrics), so what the second adds is what every batch adds. The third
# is traced with all that a whole validation keeps.
_BATCHES = 3
# A step that generates text runs its network hundreds of times. The verdict on the training must not wait for it.
_TIME_LIMIT_S = 30.0

_WITH_FAST_PATH = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
_FAST_PATH = Assumption(
    "fast_path",
    "In evaluation, PyTorch's own transformer layers take fused kernels (the fast path), which are not traced: "
    "validation is traced on their ordinary path. On a CPU the fast path needs more.",
    "torch/nn/modules/transformer.py",
)


class TimeLimit(TorchFunctionMode):
    """Ends the block with an error when it has run for too long."""

    def __init__(self, limit_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self._deadline:
            raise TraceError(f"it runs for more than {self._limit_s:g} seconds")
        return func(*args, **(kwargs or {}))


def validate(loop: TrainingLoop, plan: ValidationPlan, *, time_limit_s: float = _TIME_LIMIT_S) -> None:
    """Trace a validation after the steps of a loop, in the phase ``"validation"``.

    What the module or its metrics keep of every batch is counted for all batches of a validation. A fault ends the
    validation and is noted; what was recorded until then stays.

    Args:
        loop: The loop, its steps done.
        plan: The validation.
        time_limit_s: Seconds after which the validation is given up.
    """
    if any(isinstance(child, _WITH_FAST_PATH) for child in loop.module.modules()):
        loop.note(_FAST_PATH)
    try:
        with _validating(loop, plan), TimeLimit(time_limit_s):
            loop.hook("on_validation_start")
            loop.hook("on_validation_epoch_start")
            for index, loader in enumerate(plan.loaders):
                _run_loader(loop, loader, (index,) if len(plan.loaders) > 1 else ())
    except Exception as error:
        location = error_location(error)
        loop.note(
            Assumption(
                "validation",
                "Validation could not be traced to its end"
                f"{f' (at {location})' if location else ''}, so it may need more than is shown: "
                f"{type(error).__name__}: {error}".rstrip(".")
                + ".",
                "traced",
            )
        )


def _run_loader(loop: TrainingLoop, loader: ValidationLoader, number: tuple[int, ...]) -> None:
    """Trace some batches of a loader; ``number`` is its index, where there are several."""
    count = loader.num_batches
    live: list[int] = []
    kept: Tensor | None = None
    for index in range(_BATCHES if count is None else min(_BATCHES, count)):
        _step(loop, loader.batch, index, number)
        live.append(_live_bytes(loop))
        if index == 1:
            kept = _keep(loop, live[1] - live[0], count)
    del kept


def _step(loop: TrainingLoop, batch: Any, index: int, loader: tuple[int, ...]) -> None:
    batch = loop.transfer(batch, *loader)
    if not loop.is_lightning:
        with loop.forward_context():
            loss = loop.plan.loss
            if loss is None:
                loop.engine.forward(loop, lambda batch: call_with(loop.module, batch), batch)
            else:
                loop.engine.forward(loop, lambda batch: loss(loop.module, batch), batch)
        return
    loop.hook("on_validation_batch_start", batch, index, *loader)
    step: Any = loop.module.validation_step
    arguments = (index, *loader) if takes_index(step) else ()
    with loop.forward_context():
        output = loop.engine.forward(loop, step, batch, *arguments)
    loop.hook("on_validation_batch_end", output, batch, index, *loader)


def _live_bytes(loop: TrainingLoop) -> int:
    return sum(record.size_bytes for record in loop.recorder.events.storages if record.death == -1)


def _keep(loop: TrainingLoop, bytes_per_batch: int, count: int | None) -> Tensor | None:
    """Count what the batches that are not traced leave behind, in one piece."""
    if bytes_per_batch <= 0:
        return None
    size_bytes = bytes_per_batch * max((count or 0) - _BATCHES, 0)
    how_many = (
        f"{_BATCHES} batches, since their number is unknown" if count is None else f"all {count} batches"
    )
    loop.note(
        Assumption(
            "validation_keeps",
            f"Validation keeps {format_bytes(bytes_per_batch)} of every batch (outputs in a list, or states of "
            f"metrics). Counted for {how_many}; joining them takes as much again.",
            "traced",
            size_bytes or None,
        )
    )
    if not size_bytes:
        return None
    kept = torch.empty(size_bytes, dtype=torch.uint8, device=loop.device)
    loop.recorder.mark(kept, "temporaries")
    return kept


@contextmanager
def _validating(loop: TrainingLoop, plan: ValidationPlan) -> Iterator[None]:
    """Release the gradients and switch to evaluation, and back."""
    module = loop.module
    if not loop.hook("on_validation_model_zero_grad"):
        module.zero_grad()
    loop.recorder.enter_phase("validation", loop.step)
    trainer = getattr(module, "_trainer", None) if loop.is_lightning else None
    if trainer is not None:
        # The hook's default sets `self.trainer.model` to evaluation.
        vars(trainer).update(training=False, validating=True, model=module)
    modes = {child: child.training for child in module.modules()}
    if not loop.hook("on_validation_model_eval"):
        module.eval()
    try:
        inference_mode = plan.inference_mode and loop.engine.inference_mode
        with torch.inference_mode() if inference_mode else torch.no_grad():
            yield
    finally:
        for child, training in modes.items():
            child.training = training
