"""``probe_memory``: what a run needs, measured on real steps with small batches and extrapolated.

For models that a trace refuses: their steps read values, call kernels of their own, or are compiled.
"""

from __future__ import annotations

import gc
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_memprec._devices import find_device
from lightning_memprec._errors import MemPrecError, TraceError
from lightning_memprec._isolation import unchanged
from lightning_memprec._user_state import unchanged_globals
from lightning_memprec.memory._location import error_location
from lightning_memprec.memory.loop import TrainingLoop
from lightning_memprec.memory.optimizers import state_tensors
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.precision import PrecisionPolicy, resolve_precision
from lightning_memprec.memory.probe_batch import cut, samples_in, with_contents
from lightning_memprec.memory.probe_fit import Measurement, extrapolate, is_settled
from lightning_memprec.memory.probe_meter import CpuMeter, CudaMeter, Watch
from lightning_memprec.memory.probe_restore import parts_of, untouched, untouched_optimizers
from lightning_memprec.memory.probe_result import measured_estimate
from lightning_memprec.memory.result import MemoryEstimate
from lightning_memprec.memory.tree import tensors_in

__all__ = ["probe_memory", "probe_plan"]

# Larger sizes are only tried while they still change the answer, and only for so long.
_TIME_LIMIT_S = 60.0


def probe_memory(
    module: nn.Module,
    batch: Any,
    *,
    optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    precision: str = "32-true",
    device: str = "cuda",
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str = "norm",
    steps: int = 2,
    batch_size: int | None = None,
) -> MemoryEstimate:
    """Measure what one device needs for a training run, by real steps with one, two and a few samples.

    For a module that :func:`~lightning_memprec.estimate_memory` cannot trace. Its own ``training_step``, backward pass
    and optimizer run on the device, in the order of Lightning's loop; what depends on the batch is told from what does
    not by comparing batch sizes. Afterwards weights, buffers, gradients, modes, hooks, attributes and random
    generators are put back bit for bit.

    Args:
        module: Module or LightningModule. It is run itself, not a copy.
        batch: A batch with real contents, of which the first samples are used.
        optimizer: As for ``estimate_memory``.
        loss: As for ``estimate_memory``.
        precision: Lightning's name.
        device: ``"cuda"`` or ``"cpu"``; it must be there. The name of a device is kept in the result and measured on
            the GPU of this machine, or on its CPU if it has none.
        accumulate_grad_batches: Micro-batches per optimizer step.
        gradient_clip_val: Threshold of gradient clipping.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        steps: Optimizer steps to run for each size. Two show optimizer states beside activations.
        batch_size: Samples of the batch to extrapolate to. Default: as many as ``batch`` has.

    Returns:
        The estimate, sizes in bytes. Its ``assumptions`` begin with the sizes that were measured and the range in
        which the result lies.

    Raises:
        TraceError: If the step fails on real tensors too, or memory runs out with the smallest batch.
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> from lightning_memprec.memory.probe import probe_memory
        >>> module, batch = torch.nn.Linear(64, 64), torch.randn(32, 64)
        >>> estimate = probe_memory(module, batch, optimizer=torch.optim.Adam, device="cpu")
        >>> estimate.breakdown.parameters_bytes == 4 * (64 * 64 + 64)
        True
        >>> module.weight.grad is None
        True
    """
    plan = TrainingPlan(
        module=module,
        batch=batch,
        optimizer=optimizer,
        loss=loss,
        precision=precision,
        device=device,
        accumulate_grad_batches=accumulate_grad_batches,
        gradient_clip_val=gradient_clip_val,
        gradient_clip_algorithm=gradient_clip_algorithm,
        steps=steps,
    )
    classes = {type(child) for child in module.modules()} if isinstance(module, nn.Module) else ()
    with unchanged_globals(*classes):
        return probe_plan(plan, batch_size=batch_size)


def probe_plan(
    plan: TrainingPlan, *, batch_size: int | None = None, time_limit_s: float = _TIME_LIMIT_S
) -> MemoryEstimate:
    """Probe a :class:`~lightning_memprec.memory.plan.TrainingPlan`; see :func:`probe_memory`.

    Args:
        plan: The run. Its validation is not measured.
        batch_size: Samples of the batch to extrapolate to. Default: those of the plan's batch.
        time_limit_s: No larger size is tried after so many seconds.
    """
    policy = resolve_precision(plan.precision)
    batch = with_contents(plan.make_batch())
    size = _check(plan, policy, batch, batch_size)
    device = torch.device("cuda" if plan.device != "cpu" and torch.cuda.is_available() else "cpu")
    with _ordinary_state(device):
        points = _measure_sizes(replace(plan, batch=batch), policy, device, size, time_limit_s)
    result = extrapolate(points, size or points[-1].size)
    return measured_estimate(plan, policy, device, points, result)


def _check(plan: TrainingPlan, policy: PrecisionPolicy, batch: Any, batch_size: int | None) -> int | None:
    """Refuse what cannot be probed; return the wanted batch size."""
    if not isinstance(plan.module, nn.Module):
        raise TypeError(
            f"A probe runs a real `nn.Module`, got a `{type(plan.module).__name__}`. Build it first."
        )
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`device='cuda'` needs a CUDA device, and there is none. Pass `device='cpu'`.")
    if plan.device not in ("cpu", "cuda"):
        find_device(plan.device)
    if policy.master_weights:
        raise ValueError(
            f"`precision={plan.precision!r}` cannot be probed. Probe '32-true', which takes no less."
        )
    for name, least in (("steps", 1), ("accumulate_grad_batches", 1)):
        if getattr(plan, name) < least:
            raise ValueError(f"`{name}` must be at least {least}, got {getattr(plan, name)!r}.")
    lazy = [name for name, parameter in plan.module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"`{lazy[0]}` has no shape yet, to which a probe could put it back. Run one forward pass first."
        )
    return _wanted_size(samples_in(batch), batch_size)


def _wanted_size(samples: int | None, batch_size: int | None) -> int | None:
    if samples == 0:
        raise ValueError("The batch has no samples. Pass one with at least one.")
    if batch_size is None:
        return samples
    if batch_size < 1 or samples is None:
        raise ValueError(
            f"`batch_size` must be at least 1 and needs a batch of tensors, got {batch_size!r} for "
            f"{samples or 'no'} samples."
        )
    return batch_size


def _measure_sizes(
    plan: TrainingPlan,
    policy: PrecisionPolicy,
    device: torch.device,
    wanted: int | None,
    time_limit_s: float,
) -> list[Measurement]:
    """Measure one, two, four … samples until a further size would change nothing."""
    if wanted is None:  # Nothing to cut.
        return [_measure(plan, policy, device, 1)]
    deadline = time.monotonic() + time_limit_s
    points: list[Measurement] = []
    refusal: TraceError | None = None
    for size in _sizes(min(wanted, samples_in(plan.batch) or 1)):
        started = time.monotonic()
        try:
            points.append(_measure(plan, policy, device, size))
        except TraceError as error:
            if points or (refusal and time.monotonic() > deadline):
                break
            refusal = (
                error  # Batch norm refuses one sample; a state kept between steps all sizes but its own.
            )
            continue
        except torch.OutOfMemoryError as error:
            if not points:
                raise TraceError(
                    f"Memory ran out with a batch of {size} already. Use a larger device or a smaller model."
                ) from error
            break
        now = time.monotonic()
        if is_settled(points, wanted) or (len(points) >= 2 and now + 2 * (now - started) > deadline):
            break
    if not points and refusal is not None:
        raise refusal
    return points


def _sizes(largest: int) -> list[int]:
    return [*itertools.takewhile(lambda size: size < largest, (2**k for k in itertools.count())), largest]


def _measure(plan: TrainingPlan, policy: PrecisionPolicy, device: torch.device, size: int) -> Measurement:
    """Run the steps of a plan for real with some samples; leave everything as it was."""
    module = plan.module
    assert isinstance(module, nn.Module)
    with _reported_faults(size), unchanged(), untouched(module, plan.optimizer):
        for parameter in module.parameters():  # First: `to` would change the gradients themselves.
            parameter.grad = None
        if plan.prepare is not None:
            plan.prepare(module)
        module.to(device)
        if policy.parameter_dtype is not None:
            module.to(policy.parameter_dtype)
        return _run(replace(plan, batch=cut(plan.batch, size)), policy, device, size)


def _run(plan: TrainingPlan, policy: PrecisionPolicy, device: torch.device, size: int) -> Measurement:
    module = plan.module
    assert isinstance(module, nn.Module)
    meter = CudaMeter(device) if device.type == "cuda" else CpuMeter()
    watch = Watch(meter, lambda: (_gradients(module), _bytes_of(_states(loop.optimizers))))
    loop = TrainingLoop(plan, module, watch, policy, _Autocast(device), device)  # type: ignore[arg-type]
    parameters_bytes, buffers_bytes = _bytes_of(module.parameters()), _bytes_of(module.buffers())
    inputs_bytes = _bytes_of(tensors_in(plan.batch))
    # Lightning's `configure_model` may have made parameters that are gone again when the probe is over.
    total = sum(p.numel() for p in module.parameters())
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    loop.configure()
    with untouched_optimizers(loop.optimizers):
        # A batch that is on its device already is not copied there, so that no meter would see it.
        there = _bytes_of(t for t in tensors_in(plan.batch) if t.device.type == device.type)
        meter.start(parameters_bytes + buffers_bytes + there + _bytes_of(_states(loop.optimizers)))
        try:
            loop.run()
        finally:
            phases = watch.stop()
    return Measurement(
        size=size,
        phases=phases,
        parameters_bytes=parameters_bytes,
        buffers_bytes=buffers_bytes,
        inputs_bytes=inputs_bytes,
        total_parameters=total,
        trainable_parameters=trainable,
    )


class _Autocast:
    """The real autocast, in place of the one that a trace emulates."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def context(self, dtype: torch.dtype, *, cache_enabled: bool) -> torch.autocast:
        return torch.autocast(self._device.type, dtype, cache_enabled=cache_enabled)


def _states(optimizers: list[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for _, tensor in state_tensors(optimizer):
            yield tensor


def _gradients(module: nn.Module) -> int:
    return _bytes_of(p.grad for p in module.parameters() if p.grad is not None)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind tensors, each counted once."""
    storages = {}
    for tensor in tensors:
        for part in parts_of(tensor):
            storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


@contextmanager
def _ordinary_state(device: torch.device) -> Iterator[None]:
    """Train as usual, in silence; and keep the garbage collector from freeing cycles at chance instants."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # So that its generators are known, and put back.
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")  # The real run gives the user's own warnings, once.
            yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _reported_faults(size: int) -> Iterator[None]:
    """Turn whatever user code raises into one error that says where; out of memory stays what it is."""
    try:
        yield
    except (MemPrecError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        location = error_location(error)
        raise TraceError(
            f"The training step could not be probed with {size} sample{'s' if size > 1 else ''} because it raised "
            f"{type(error).__name__}{f' at {location}' if location else ''}: {str(error).rstrip('.')}. "
            "Check that the step runs on a small batch."
        ) from error
