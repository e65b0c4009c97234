"""``estimate_memory``: what one device needs for a training run, without the device."""

from __future__ import annotations

import gc
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memprec._devices import DeviceSpec, find_device
from lightning_memprec._errors import MemPrecError, TraceError
from lightning_memprec._isolation import unchanged
from lightning_memprec._user_state import unchanged_globals
from lightning_memprec.memory import assumptions as _assumptions
from lightning_memprec.memory._location import error_location
from lightning_memprec.memory.analysis import analyse
from lightning_memprec.memory.autocast import AutocastEmulation
from lightning_memprec.memory.cpu_semantics import cpu_kernel_allocations, cpu_kernels
from lightning_memprec.memory.cuda_recorder import CudaRecorder
from lightning_memprec.memory.cuda_semantics import cuda_kernels, cuda_optimizer_defaults
from lightning_memprec.memory.evaluation import validate
from lightning_memprec.memory.events import MemoryEvents
from lightning_memprec.memory.execution import execution_notes
from lightning_memprec.memory.host import save_checkpoint, weights_bytes
from lightning_memprec.memory.interpose import Interposer
from lightning_memprec.memory.loop import TrainingLoop
from lightning_memprec.memory.master import cast_to_half
from lightning_memprec.memory.meta_copy import meta_copy, move_to_meta
from lightning_memprec.memory.modules import track_modules
from lightning_memprec.memory.observe.residual import calibrated
from lightning_memprec.memory.optimizer_overrides import follow_overrides, unchanged_overrides
from lightning_memprec.memory.phases import with_outer_phases, with_reserved
from lightning_memprec.memory.plan import TrainingPlan, ValidationLoader, ValidationPlan
from lightning_memprec.memory.precision import PrecisionPolicy, resolve_precision
from lightning_memprec.memory.redirect import (
    DeviceRedirect,
    checkpoints_on_any_device,
    modules_moved_back,
    no_device_calls,
)
from lightning_memprec.memory.reserve import allocator_reserve
from lightning_memprec.memory.result import HostMemory, MemoryEstimate
from lightning_memprec.memory.sharding.build import engine_of, load
from lightning_memprec.memory.sharding.engine import Engine
from lightning_memprec.memory.sharding.offload import split_host
from lightning_memprec.memory.sharding.strategies import Strategy, precision_under, resolve_strategy
from lightning_memprec.memory.trace import Recorder

__all__ = ["estimate_memory", "estimate_plan"]

# Smallest block of the CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
_CUDA_BLOCK_BYTES = 512
_LONGEST_QUOTE = (
    500  # Characters of an error of the user's: some list every tensor. The whole one is its cause.
)
_SEMANTICS = Interposer("AutocastIPU")
_DEFAULT_COMPUTE_CAPABILITY = (8, 0)


def estimate_memory(
    module: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    precision: str = "32-true",
    device: str = "cuda",
    strategy: str | Strategy = "auto",
    num_devices: int = 1,
    num_nodes: int = 1,
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str = "norm",
    steps: int = 2,
    validation_batch: Any = None,
) -> MemoryEstimate:
    """Estimate what one device needs for a training run, by tracing the run without storage.

    The module's own ``training_step``, backward pass and optimizer run in the order of Lightning's loop on
    tensors that have shapes but no contents. The module, its random state and its hooks stay untouched.

    Args:
        module: Module, LightningModule, or a zero-argument callable that builds one. A callable is built
            without storage, so that a model of any size can be estimated on a laptop.
        batch: One training batch: a tree of real or ``meta`` tensors, or a zero-argument function that
            returns one. Give the largest batch of the run.
        optimizer: Callable from parameters to an optimizer. Default: the module's ``configure_optimizers``;
            without one, no optimizer runs.
        loss: Callable ``(module, batch) -> scalar tensor``. Default: ``training_step``; without one, the
            output's ``.loss``, else the sum of its floating tensors. A mapping is passed to the module as
            keywords, a sequence as positional arguments.
        precision: Lightning's name, or ``"bf16-master"``/``"16-master"``.
        device: ``"cuda"``, a name from the catalogue such as ``"A100-80GB"``, or ``"cpu"``.
        strategy: Lightning's name of the strategy, such as ``"ddp"``, ``"fsdp"`` or ``"deepspeed_stage_3"``, or its
            options, see :mod:`~lightning_memprec.memory.sharding.strategies`. The figures are one device's share.
        num_devices: Devices per node.
        num_nodes: Number of nodes.
        accumulate_grad_batches: Micro-batches per optimizer step.
        gradient_clip_val: Threshold of gradient clipping.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        steps: Optimizer steps to trace. Two show optimizer states beside activations.
        validation_batch: One validation batch, as for ``batch``. The module's own ``validation_step`` is traced on
            it after the steps; a module without one is called as in training, without gradients. Default: no
            validation.

    Returns:
        The estimate; sizes in bytes.

    Raises:
        TraceError: If the step cannot be traced; the message says why and what to do.
        DataDependentError: If the step reads values that only real weights or data could give.
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> from lightning_memprec import estimate_memory
        >>> estimate = estimate_memory(
        ...     lambda: torch.nn.Linear(1024, 1024),
        ...     torch.empty(8, 1024),
        ...     optimizer=torch.optim.Adam,
        ...     device="cpu",
        ... )
        >>> estimate.breakdown.parameters_bytes == 4 * (1024 * 1024 + 1024)
        True
    """
    # A preflight traces in a child process; here the user's own process does.
    classes = {type(child) for child in module.modules()} if isinstance(module, nn.Module) else ()
    with unchanged_globals(*classes):
        return estimate_plan(
            TrainingPlan(
                module=module,
                batch=batch,
                optimizer=optimizer,
                loss=loss,
                precision=precision,
                device=device,
                strategy=strategy,
                num_devices=num_devices,
                num_nodes=num_nodes,
                accumulate_grad_batches=accumulate_grad_batches,
                gradient_clip_val=gradient_clip_val,
                gradient_clip_algorithm=gradient_clip_algorithm,
                steps=steps,
                validation=_validation_on(validation_batch),
            )
        )


def estimate_plan(plan: TrainingPlan) -> MemoryEstimate:
    """Estimate a :class:`~lightning_memprec.memory.plan.TrainingPlan`; see :func:`estimate_memory`."""
    _check(plan)
    strategy = resolve_strategy(plan.strategy, plan.num_devices * plan.num_nodes)
    policy = precision_under(strategy, resolve_precision(plan.precision))
    load(strategy)
    spec = None if plan.device in ("cpu", "cuda") else find_device(plan.device)
    with _reported_faults(), _untouched_state():
        recorder, module, loop, host = _trace(plan, policy, spec, strategy)
        events, host = _without_offloaded(recorder.events, loop.engine, host)
    on_cpu = plan.device == "cpu"
    granularity_bytes = 1 if on_cpu else _CUDA_BLOCK_BYTES
    analysis = analyse(
        events,
        granularity_bytes=granularity_bytes,
        module_types={name: type(child).__name__ for name, child in module.named_modules()},
    )
    trainable_parameters, total_parameters = loop.engine.count(module)
    outside_bytes, notes = _assumptions.collect(plan, spec, loop)
    phases, live = analysis.phases, analysis.peak_bytes
    allocated, reserved, minimum = live, live, live
    if not on_cpu:
        reserve = allocator_reserve(events, live)
        allocated, reserved, minimum = (
            reserve.peak_allocated_bytes,
            reserve.peak_reserved_bytes,
            reserve.minimum_bytes,
        )
        phases = with_reserved(phases, reserve)
        notes = (*notes, reserve.assumption)
    phases = with_outer_phases(
        phases,
        events,
        granularity_bytes=granularity_bytes,
        sanity_check=plan.validation is not None and plan.validation.sanity_check,
    )
    estimate = MemoryEstimate(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        minimum_reserved_bytes=minimum,
        outside_allocator_bytes=outside_bytes,
        breakdown=analysis.breakdown,
        peak_phase=analysis.peak_phase,
        phases=phases,
        by_module=analysis.by_module,
        timeline=analysis.timeline,
        assumptions=notes,
        device=plan.device if spec is None else spec.name,
        precision=policy.name,
        steps=plan.steps,
        trainable_parameters=trainable_parameters,
        total_parameters=total_parameters,
        host=host,
        # A copy: the module's own death, which follows, is no part of the run.
        events=replace(events, order=list(events.order)),
    )
    return calibrated(estimate, plan.calibration)


def _without_offloaded(
    events: MemoryEvents, engine: Engine, host: HostMemory | None
) -> tuple[MemoryEvents, HostMemory | None]:
    """Move what is offloaded from the device to the host."""
    on_host = engine.on_host(events)
    if not on_host:
        return events, host
    events, offloaded_bytes = split_host(events, on_host)
    return events, None if host is None else replace(host, offloaded_bytes=offloaded_bytes)


def _validation_on(batch: Any) -> ValidationPlan | None:
    return None if batch is None else ValidationPlan(loaders=(ValidationLoader(batch),))


def _check(plan: TrainingPlan) -> None:
    for name in ("steps", "accumulate_grad_batches", "num_devices", "num_nodes"):
        value = getattr(plan, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
    if plan.gradient_clip_algorithm not in ("norm", "value"):
        raise ValueError(
            f"`gradient_clip_algorithm` must be 'norm' or 'value', got {plan.gradient_clip_algorithm!r}."
        )
    if not isinstance(plan.module, nn.Module) and not callable(plan.module):
        raise TypeError(
            f"`module` must be an `nn.Module` or build one, got a `{type(plan.module).__name__}`."
        )


def _trace(
    plan: TrainingPlan, policy: PrecisionPolicy, spec: DeviceSpec | None, strategy: Strategy | None
) -> tuple[Recorder, nn.Module, TrainingLoop, HostMemory | None]:
    on_cpu = plan.device == "cpu"
    capability = spec.compute_capability if spec is not None else _DEFAULT_COMPUTE_CAPABILITY
    recorder = Recorder(cpu_kernel_allocations) if on_cpu else CudaRecorder(capability)
    device_type: Literal["cpu", "cuda"] = "cpu" if on_cpu else "cuda"
    redirect = DeviceRedirect(device_type, recorder.known)
    autocast = AutocastEmulation(device_type)
    _SEMANTICS.use(cpu_kernels() if on_cpu else cuda_kernels(capability))
    with ExitStack() as stack:
        stack.callback(recorder.originals.put_back)
        if not on_cpu:
            stack.enter_context(cuda_optimizer_defaults())
        stack.enter_context(no_device_calls(capability))
        stack.enter_context(modules_moved_back())
        stack.enter_context(checkpoints_on_any_device())
        stack.enter_context(autocast)
        stack.enter_context(_SEMANTICS.active())
        stack.enter_context(redirect)
        stack.enter_context(recorder)
        engine = stack.enter_context(engine_of(strategy, plan, redirect.device, recorder, redirect))
        module = _prepared_copy(plan, recorder, engine)
        setup_bytes = weights_bytes(module)
        if policy.parameter_dtype is not None:
            _convert(module, plan, policy.parameter_dtype, with_masters=policy.master_weights)
        recorder.restart()
        engine.place(module, recorder)
        loop = TrainingLoop(plan, module, recorder, policy, autocast, redirect.device, engine)
        with track_modules(module, recorder) as names:
            recorder.events.modules = names
            loop.configure()
            loop.run()
            if plan.validation is not None:
                validate(loop, plan.validation)
            host = save_checkpoint(loop, setup_bytes)
    # A copy loses what `module.compile()` left.
    for traced in (module, plan.module):
        if isinstance(traced, nn.Module):
            for note in execution_notes(traced):
                loop.note(note)
    for note in redirect.answers.assumptions:
        loop.note(note)
    if isinstance(recorder, CudaRecorder):
        loop.note(recorder.assumption())
    return recorder, module, loop, host


def _convert(module: nn.Module, plan: TrainingPlan, dtype: torch.dtype, *, with_masters: bool) -> None:
    if with_masters:
        (plan.masters.cast or cast_to_half)(module, dtype)
    else:
        module.to(dtype)


def _prepared_copy(plan: TrainingPlan, recorder: Recorder, engine: Engine) -> nn.Module:
    if isinstance(plan.module, nn.Module):
        module = meta_copy(plan.module, recorder.meta_twin, plan.shared)
        follow_overrides(plan.module, module)
    else:
        with torch.device("meta"):
            module = plan.module()
        if not isinstance(module, nn.Module):
            raise TypeError(f"`module` must build an `nn.Module`, but returned a `{type(module).__name__}`.")
        if any(not p.is_meta for p in module.parameters()):
            module = meta_copy(module, recorder.meta_twin, plan.shared)
    engine.prepare(module)
    if plan.prepare is not None:
        with engine.building():
            plan.prepare(module)
        move_to_meta(module, recorder.meta_twin)
    return module


@contextmanager
def _reported_faults() -> Iterator[None]:
    """Turn whatever user code raises inside a trace into one error that says where."""
    try:
        yield
    except MemPrecError:
        raise
    except Exception as error:
        location = error_location(error)
        said = textwrap.shorten(str(error), _LONGEST_QUOTE, placeholder=" …").rstrip(".")
        raise TraceError(
            f"The training step could not be traced because it raised {type(error).__name__}"
            f"{f' at {location}' if location else ''}: {said}. "
            "If the step runs on real tensors, measure a few real steps: `probe_memory`, or "
            "`MemoryPreflight(probe=True)`."
        ) from error


@contextmanager
def _untouched_state() -> Iterator[None]:
    """Keep random generators and the garbage collector as they were, whatever the trace does."""
    collecting = gc.isenabled()
    # A collection in mid-trace would move deaths of cyclic garbage about and make two traces differ.
    gc.disable()
    try:
        with unchanged(), unchanged_overrides(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The real run gives the user's own warnings, once.
            yield
    finally:
        if collecting:
            gc.enable()
