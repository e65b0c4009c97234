"""What each event means and what to do about it: one table, from which every message is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_memprec.scaling.record import Event

__all__ = ["DIAGNOSES", "Diagnosis", "make_event"]


@dataclass(frozen=True)
class Diagnosis:
    """The words for one kind of event.

    Args:
        severity: ``"info"`` for what is normal, ``"warning"`` for what needs a person.
        seen: What was seen; names in braces are filled with the event's figures.
        means: What that means.
        remedies: What to do first, second, third; empty if nothing.
    """

    severity: Literal["info", "warning"]
    seen: str
    means: str
    remedies: tuple[str, ...] = ()


_BF16 = "train in bf16 where the hardware has it: its range is that of FP32 and it needs no scaler"

DIAGNOSES: dict[str, Diagnosis] = {
    "calibration": Diagnosis(
        "info",
        "Steps skipped at the start: {skips}. The loss scale settled at {scale:g}.",
        "That is normal: the scaler starts high and halves until no gradient overflows.",
    ),
    "probing": Diagnosis(
        "info",
        "The loss scale grew to {scale:g}, and {held} steps later a step was skipped.",
        "That is healthy: after a run of good steps the scaler tries a larger scale, and takes it back.",
    ),
    "isolated_skip": Diagnosis(
        "info",
        "Steps skipped in a row: {skips}, from batch {skipped_batch_idx} of epoch {skipped_epoch} on (loss "
        "{loss:g}, first non-finite gradient: {culprit}). The scale of {scale:g} had held for {held} steps before.",
        "A rare skip is harmless: the weights stayed as they were.",
        ("if it comes back, look at the samples of batch {skipped_batch_idx}",),
    ),
    "exploding": Diagnosis(
        "warning",
        "The loss scale is {scale:g} and {rate:.0%} of the last {window} steps were skipped; the scale's fall "
        "began at batch {first_batch_idx} of epoch {first_epoch} (first non-finite gradient: {culprit}). Skipped "
        "steps have no finite gradient norm; the largest measured on the others so far is {norm:g}.",
        "Gradients overflow FP16 although they are hardly scaled: they are exploding.",
        (
            "lower the learning rate or lengthen its warm-up",
            "clip the gradients, for example `Trainer(gradient_clip_val=1.0)`",
            "look at the data of batch {first_batch_idx} of epoch {first_epoch}, where it began",
        ),
    ),
    "range_insufficient": Diagnosis(
        "warning",
        "The loss scale fell to {scale:g}, below 1 (first non-finite gradient: {culprit}).",
        "Gradients overflow FP16 even when they are scaled down: its range does not suffice. Weights that "
        "were pretrained in bf16 often do this.",
        (_BF16, "keep the layer of `{culprit}` in FP32", "lower the learning rate and clip the gradients"),
    ),
    "collapse": Diagnosis(
        "warning",
        "The loss scale has collapsed to {scale:g}; its fall began at step {first_skip}.",
        "Scaled gradients underflow to zero, and at a scale of exactly 0 unscaling makes NaN of them after the "
        "check for overflow: NaN is written into the weights.",
        (
            "end the run and go back to a checkpoint from before step {first_skip}",
            "find what made every step fail: a NaN in the loss, in the weights, or in the data",
            "set a floor with `min_scale`, or " + _BF16,
        ),
    ),
    "stuck_at_floor": Diagnosis(
        "warning",
        "{skips} steps in a row were skipped at the floor of {scale:g}; the scale's fall began at step {first_skip}.",
        "The run stands still: no step is taken any more. Only the floor keeps the scale from collapsing.",
        (
            "end the run and go back to a checkpoint from before step {first_skip}",
            "find what made every step fail: a NaN in the loss, in the weights, or in the data",
            "set a lower `min_scale`, or " + _BF16,
        ),
    ),
    "non_finite_loss": Diagnosis(
        "warning",
        "The loss is {loss} at batch {bad_batch_idx} of epoch {epoch} (first non-finite gradient: {culprit}).",
        "The forward pass overflowed or the batch holds bad values. Scaling the loss cannot help.{unguarded}",
        (
            "look at the samples of batch {bad_batch_idx}: NaN, inf, empty targets",
            "compute exponentials, logarithms and norms in FP32, or " + _BF16,
            "lower the learning rate",
        ),
    ),
    "loss_stays_non_finite": Diagnosis(
        "warning",
        "The loss has not been finite for {consecutive} steps in a row, since step {first_step}.",
        "This will not heal: the weights hold NaN or the forward pass overflows for every batch.",
        (
            "end the run and go back to a checkpoint from before step {first_step}",
            "check the weights for NaN: `any(p.isnan().any() for p in model.parameters())`",
            "restart with a lower learning rate and clipped gradients, or " + _BF16,
        ),
    ),
    "non_finite_gradients": Diagnosis(
        "warning",
        "The gradient norm is {norm} while the loss is {loss:g} (first non-finite gradient: {culprit}).",
        "There is no loss scaler in this run to skip the step: the weights were updated with it.",
        (
            "go back to the last checkpoint",
            "clip the gradients and lower the learning rate",
            "compute the layer of `{culprit}` in FP32",
        ),
    ),
    "norm_rising": Diagnosis(
        "warning",
        "The gradient norm is {norm:g}, {ratio:.0f} times the median of the last {window} norms, for "
        "{consecutive} norms in a row.",
        "Training is becoming unstable; overflows and a rising loss come next.",
        (
            "lower the learning rate",
            "clip the gradients",
            "look at the data around batch {first_batch_idx} of epoch {first_epoch}, where it began",
        ),
    ),
    "underflow": Diagnosis(
        "warning",
        "Every gradient is exactly 0 at scale {scale:g} while the loss is {loss:g}.",
        "Gradients underflow (FP16 holds nothing below 6e-8), or the loss does not depend on the weights.",
        (
            "check that the loss still depends on the trained parameters",
            "start the scaler higher, for example `GradScaler(init_scale=2.0**16)`, or set `min_scale`",
            _BF16,
        ),
    ),
    "growth_shared": Diagnosis(
        "info",
        "{optimizers} optimizers step per batch, and each step counts towards the scaler's growth interval.",
        "The interval of {growth_interval} steps is over after {growth_batches} batches.",
        ("for the usual interval, pass a scaler with `growth_interval={growth_wanted}`",),
    ),
    "scheduler_on_skip": Diagnosis(
        "info",
        "The learning-rate scheduler advanced although the optimizer skipped the step.",
        "Lightning steps the scheduler after every batch; each skipped step takes one off the schedule.",
        ("pass `hold_schedule=True` to hold the scheduler on skipped steps",),
    ),
    "floor_held": Diagnosis(
        "warning",
        "The loss scale would have fallen to {scale:g} and was held at the floor of {min_scale:g}.",
        "Steps will be skipped until the gradients fit at this scale.",
        ("lower the learning rate", "clip the gradients", _BF16),
    ),
    "clip_before_unscale": Diagnosis(
        "warning",
        "Gradients were clipped while they were multiplied by the loss scale of {scale:g}.",
        "After unscaling, the step is {scale:g} times too small.",
        (
            "clip in the hook `on_before_optimizer_step`, where gradients are unscaled",
            "or use automatic optimization with `Trainer(gradient_clip_val=...)`",
        ),
    ),
    "raw_backward": Diagnosis(
        "warning",
        "The optimizer stepped on gradients from a backward pass that did not go through Lightning.",
        "If it was `loss.backward()`, the loss was not scaled, and the gradients are divided by the scale all the "
        "same: the step is too small.",
        ("call `self.manual_backward(loss)` instead of `loss.backward()`",),
    ),
    "second_unscale": Diagnosis(
        "warning",
        "`unscale_` was called a second time for the same step.",
        "Lightning unscales the gradients itself in `optimizer.step()`.",
        (
            "remove your call of `scaler.unscale_`",
            "read or clip gradients in the hook `on_before_optimizer_step`, where they are unscaled",
        ),
    ),
    "fp16_gradients": Diagnosis(
        "warning",
        "The scaler met FP16 gradients, which it refuses to unscale.",
        "The parameters themselves are in FP16, so small updates would be lost.",
        (
            "keep the parameters in FP32 and use `precision='16-mixed'`",
            "or keep FP32 master weights beside an FP16 model with `MasterWeightPrecision('16-master')`",
        ),
    ),
    "no_gradients": Diagnosis(
        "warning",
        "No parameter of the optimizer has a gradient.",
        "The scaler has nothing to check for overflow.",
        (
            "step an optimizer only after a backward pass through its parameters",
            "check for frozen parameters and a detached loss",
        ),
    ),
    "scale_reset": Diagnosis(
        "warning",
        "The checkpoint holds a loss scale of {saved_scale:g} under `{key}`, but this run's `{plugin}` did "
        "not read it and starts at {scale:g}.",
        "Lightning finds a scaler's state by the class name of the precision plugin, and this is another.",
        (
            "pass `import_scaler_state=True` to take the saved state over",
            "or resume with the plugin that wrote the checkpoint",
        ),
    ),
    "scale_imported": Diagnosis(
        "info",
        "The loss scale of {saved_scale:g} was taken over from the checkpoint's `{key}`; this run starts at {scale:g}.",
        "The scaler goes on where the other precision plugin left it, within its own bounds.",
    ),
    "no_scaler_in_fp16": Diagnosis(
        "warning",
        "This run trains in pure FP16 without a loss scaler.",
        "Gradients below 6e-8 vanish, those above 65504 overflow, and small updates of weights are lost.",
        (
            "use `precision='16-mixed'`",
            "or keep FP32 master weights and a scaler with `MasterWeightPrecision('16-master')`",
            _BF16,
        ),
    ),
}


class _Figures(dict[str, object]):
    """Figures by name; one that is missing or unknown reads "unknown" whatever its format."""

    def __missing__(self, key: str) -> _Unknown:
        return _Unknown()


class _Unknown:
    def __format__(self, spec: str) -> str:
        return "unknown"


def make_event(
    kind: str, step: int, batch_idx: int | None, figures: dict[str, float | int | str | None]
) -> Event:
    """Put an event into words.

    Args:
        kind: A key of :data:`DIAGNOSES`.
        step: Optimizer step.
        batch_idx: Batch, ``None`` outside the training loop.
        figures: The numbers and names that the words need.

    Raises:
        KeyError: If there is no such kind.

    Example:
        >>> print(make_event("calibration", 3, 3, {"skips": 3, "scale": 8192.0}).message)
        Steps skipped at the start: 3. The loss scale settled at 8192. That is normal: the scaler starts high and \
halves until no gradient overflows.
    """
    diagnosis = DIAGNOSES[kind]
    known = {"batch_idx": batch_idx, **figures}
    values = _Figures({name: value for name, value in known.items() if value is not None})
    parts = [diagnosis.seen, diagnosis.means]
    if len(diagnosis.remedies) == 1:
        parts.append(f"What to do: {diagnosis.remedies[0]}.")
    elif diagnosis.remedies:
        numbered = "; ".join(f"({number}) {text}" for number, text in enumerate(diagnosis.remedies, 1))
        parts.append(f"What to do: {numbered}.")
    return Event(kind, diagnosis.severity, step, batch_idx, " ".join(parts).format_map(values), dict(figures))
