"""Half precision: autocast, or half weights with FP32 masters in one of three ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_memprec._devices import find_device
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.precision import resolve_precision
from lightning_memprec.memory.remedies.change import Change
from lightning_memprec.memory.remedies.snippet import Code, setting

__all__ = ["precisions"]

_TOPIC = frozenset({"precision"})


def precisions(plan: TrainingPlan) -> Iterator[Change]:
    """Yield the precisions that need less than the plan's own."""
    precision = resolve_precision(plan.precision)
    # Cards before Ampere have no native bfloat16.
    spec = None if plan.device in ("cpu", "cuda") else find_device(plan.device)
    half = "bf16" if spec is None or spec.native_bf16 else "16"
    if precision.name == "32-true":
        yield Change(
            "mixed_precision",
            "mixed precision",
            f'Trainer(precision="{half}-mixed")',
            "matrix products in half precision",
            lambda p: replace(p, precision=f"{half}-mixed"),
            topics=_TOPIC,
            code=setting("precision", f"{half}-mixed"),
        )
    if precision.parameter_dtype is None:
        yield Change(
            "master_weights",
            "half-precision weights with FP32 masters",
            f'Trainer(plugins=[MasterWeightPrecision("{half}-master")]), without `precision`',
            "forward and backward in half precision",
            lambda p: replace(p, precision=f"{half}-master"),
            topics=_TOPIC | {"masters"},
            code=_plugin(f"{half}-master"),
        )
    name = precision.name if precision.master_weights else f"{half}-master"
    may = precision.master_weights or precision.parameter_dtype is None
    # Gradients of several micro-batches do not add up in half: the plugin refuses.
    if not may or plan.accumulate_grad_batches > 1:
        return
    if not plan.masters.low_memory:
        yield Change(
            "master_weights_low_memory",
            "half-precision weights with FP32 masters, stepped in chunks",
            f'Trainer(plugins=[MasterWeightPrecision("{name}", low_memory=True)]), without `precision`',
            "forward and backward in half precision, more and smaller optimizer kernels",
            lambda p: replace(p, precision=name, masters=replace(p.masters, low_memory=True)),
            exact=precision.master_weights,
            topics=frozenset({"precision", "masters", "optimizer", "accumulation"}),
            code=_plugin(name, "low_memory"),
        )
    # A scaler, and clipping, must see all gradients before the first step: the plugin refuses.
    if not plan.masters.step_in_backward and name.startswith("bf16") and not plan.gradient_clip_val:
        yield Change(
            "master_weights_step_in_backward",
            "half-precision weights with FP32 masters, stepped within backward",
            f'Trainer(plugins=[MasterWeightPrecision("{name}", step_in_backward=True)]), without `precision`',
            "forward and backward in half precision, no clipping, no accumulation, no DDP",
            lambda p: replace(
                p, precision=name, masters=replace(p.masters, low_memory=False, step_in_backward=True)
            ),
            exact=precision.master_weights,
            topics=frozenset({"precision", "masters", "optimizer", "accumulation"}),
            code=_plugin(name, "step_in_backward"),
        )


def _plugin(name: str, option: str | None = None) -> Code:
    """Write the plugin with FP32 masters; it takes the place of the Trainer's ``precision``."""
    arguments: dict[str, str | bool] = {"precision": name, **({option: True} if option else {})}
    call = f'MasterWeightPrecision("{name}"{f", {option}=True" if option else ""})'
    values = [{"class_path": "lightning_memprec.MasterWeightPrecision", "init_args": arguments}]
    return Code(
        {"plugins": (f"[{call}]", values), "precision": ("None", None)},
        imports=("from lightning_memprec import MasterWeightPrecision",),
    )
