"""The estimate that a probe's measurements make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lightning_memprec._devices import find_device
from lightning_memprec._units import format_bytes
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.precision import PrecisionPolicy
from lightning_memprec.memory.probe_fit import Extrapolation, Measurement
from lightning_memprec.memory.probe_meter import Phase
from lightning_memprec.memory.result import Assumption, Breakdown, MemoryEstimate, PhasePeak

__all__ = ["measured_estimate", "words_of"]

_NAME = "measured"


def words_of(sizes: list[int], wanted: int) -> str:
    """Say what was measured and how far it was extrapolated.

    Example:
        >>> words_of([1, 2, 4], 64)
        'measured at batch 1, 2 and 4, extrapolated to 64'
    """
    last = str(sizes[-1])
    listed = f"{', '.join(map(str, sizes[:-1]))} and {last}" if len(sizes) > 1 else last
    return f"measured at batch {listed}" + (f", extrapolated to {wanted}" if wanted > sizes[-1] else "")


def measured_estimate(
    plan: TrainingPlan,
    policy: PrecisionPolicy,
    device: torch.device,
    points: Sequence[Measurement],
    result: Extrapolation,
) -> MemoryEstimate:
    """Put a probe's result into the form of an estimate.

    Args:
        plan: The run.
        policy: Its precision.
        device: Where it was measured.
        points: What was measured, smallest size first.
        result: What follows for the wanted batch.
    """
    peak = result.peak
    highest: dict[tuple[str, int], Phase] = {}
    for phase in sorted(result.phases, key=lambda phase: phase.peak_bytes):
        highest[phase.name, phase.step] = phase
    keys = dict.fromkeys((phase.name, phase.step) for phase in result.phases)
    phases = tuple(PhasePeak(*key, highest[key].peak_bytes, highest[key].reserved_bytes) for key in keys)
    spec = None if plan.device in ("cpu", "cuda") else find_device(plan.device)
    return MemoryEstimate(
        peak_allocated_bytes=peak.peak_bytes,
        peak_reserved_bytes=max(phase.reserved_bytes or phase.peak_bytes for phase in result.phases),
        minimum_reserved_bytes=peak.peak_bytes,
        outside_allocator_bytes=0 if spec is None else spec.context_bytes,
        breakdown=_parts(points[-1], result),
        peak_phase=PhasePeak(peak.name, peak.step, peak.peak_bytes, peak.reserved_bytes),
        phases=phases,
        by_module=(),
        timeline=(),
        assumptions=tuple(_notes(plan, device, points, result)),
        device=plan.device if spec is None else spec.name,
        precision=policy.name,
        steps=plan.steps,
        trainable_parameters=points[-1].trainable_parameters,
        total_parameters=points[-1].total_parameters,
    )


def _parts(point: Measurement, result: Extrapolation) -> Breakdown:
    """Divide the peak: what was walked over is known, the rest are activations and temporaries."""
    gradients, states = result.peak.held
    inputs = point.inputs_bytes * result.size // point.size
    fixed = point.parameters_bytes + point.buffers_bytes + gradients + states
    return Breakdown(
        parameters_bytes=point.parameters_bytes,
        buffers_bytes=point.buffers_bytes,
        gradients_bytes=gradients,
        optimizer_states_bytes=states,
        inputs_bytes=inputs,
        activations_bytes=max(0, result.peak.peak_bytes - fixed - inputs),
    )


def _notes(
    plan: TrainingPlan, device: torch.device, points: Sequence[Measurement], result: Extrapolation
) -> Iterator[Assumption]:
    words = words_of([point.size for point in points], result.size)
    text = words[0].upper() + words[1:]
    if result.size > points[-1].size:
        if result.is_checked:
            low, high = format_bytes(result.lowest_bytes), format_bytes(result.highest_bytes)
            words = "agree" if low == high else f"give {low} to {high}"
            text += f": other fits through these points {words}."
        else:
            text += ": whether memory grows in a straight line could not be checked."
    else:
        text += "."
    yield Assumption(_NAME, text, _NAME)
    yield Assumption(
        "measured_parts",
        "Gradients and optimizer states are those that were there when the phase of the peak began. All that came "
        "later in it, or is no tensor of the module's, counts as activations.",
        _NAME,
    )
    if device.type == "cuda":
        yield Assumption(
            "measured_cache", "The need leaves the allocator no cache and no fragmentation.", _NAME
        )
    elif plan.device != "cpu":
        yield Assumption(
            "measured_on_cpu",
            f"Measured on the CPU of this machine: other kernels run on `{plan.device}`, and their workspaces, "
            "the allocator's rounding and its cache are not in the figures.",
            _NAME,
        )
    if plan.num_devices * plan.num_nodes > 1:
        yield Assumption(
            "measured_alone", "One process was measured: buffers of the strategy are not counted."
        )
    if plan.validation is not None:
        yield Assumption("measured_training", "Validation was not measured.")
