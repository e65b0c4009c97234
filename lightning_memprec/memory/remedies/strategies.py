"""Several devices, and the machine's own memory: DDP's buckets, FSDP, DeepSpeed's ZeRO, offload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_memprec._errors import MemPrecError
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.precision import resolve_precision
from lightning_memprec.memory.remedies.change import Change, need_of
from lightning_memprec.memory.remedies.snippet import Code, instance, setting
from lightning_memprec.memory.sharding.strategies import DDP, FSDP, Strategy, ZeRO, resolve_strategy
from lightning_memprec.memory.sharding.wrapping import repeated_blocks

__all__ = ["ZERO_NAMES", "more_devices", "strategies"]

# From the cheapest to that which needs least. Lightning registers each under this name.
_ZERO = (
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3_offload",
)
ZERO_NAMES = tuple(name.removeprefix("deepspeed_").replace("stage", "zero") for name in _ZERO)
# What Lightning 2.6's precision plugins for FSDP and DeepSpeed take.
_SHARDED_PRECISIONS = ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
_TOPICS = frozenset({"strategy", "masters"})
# What is offloaded is stepped by the CPU.
_OFFLOAD_TOPICS = _TOPICS | {"optimizer"}
# The cards of one machine, at most.
_COUNTS = (2, 4, 8)


def strategies(plan: TrainingPlan, model: nn.Module | None, *, thorough: bool) -> Iterator[Change]:
    """Yield the ways to share more between the devices of a run, and to leave states to the machine's memory.

    Args:
        plan: The run.
        model: Its module, to look at.
        thorough: Whether to offer DeepSpeed where it is not installed.
    """
    devices = plan.num_devices * plan.num_nodes
    given = resolve_strategy(plan.strategy, devices)
    if isinstance(given, DDP) and devices > 1 and not given.gradient_as_bucket_view:
        yield _gradients_in_buckets(given)
    if plan.device == "cpu" or resolve_precision(plan.precision).name not in _SHARDED_PRECISIONS:
        return
    if devices > 1 and isinstance(given, DDP | FSDP) and _takes_fsdp(plan):
        yield from _fully_sharded(plan, model, given, devices)
    if thorough or isinstance(given, ZeRO) or find_spec("deepspeed") is not None:
        yield from _zero(plan, given, devices)


def more_devices(plan: TrainingPlan, model: nn.Module | None, budget_bytes: int) -> Iterator[Change]:
    """Yield FSDP over as many devices as are enough, for a run on one.

    Args:
        plan: The run.
        model: Its module, to look at.
        budget_bytes: What each device offers.
    """
    precise = resolve_precision(plan.precision).name in _SHARDED_PRECISIONS
    alone = plan.num_devices * plan.num_nodes == 1 and resolve_strategy(plan.strategy, 1) is None
    if plan.device == "cpu" or not (alone and precise and _takes_fsdp(plan)):
        return
    strategy, code = _fsdp(model)

    def apply(p: TrainingPlan, count: int) -> TrainingPlan:
        return replace(p, strategy=strategy, num_devices=count)

    def is_enough(count: int) -> bool:
        need = need_of(apply(plan, count))
        return need is not None and need.device_bytes <= budget_bytes

    count = next(filter(is_enough, _COUNTS), _COUNTS[-1])
    yield Change(
        "more_devices",
        f"FSDP over {count} devices",
        f"Trainer(devices={count}, {_written(code)})",
        f"{count - 1} more of them; a batch on each, so that {count} times as many samples make a step",
        lambda p: apply(p, count),
        topics=_TOPICS,
        code=setting("devices", count) | code,
    )


def _takes_fsdp(plan: TrainingPlan) -> bool:
    """Lightning's FSDP refuses to clip by norm."""
    return not plan.gradient_clip_val or plan.gradient_clip_algorithm == "value"


def _gradients_in_buckets(given: DDP) -> Change:
    code = instance(
        "strategy", "lightning.pytorch.strategies.DDPStrategy", {"gradient_as_bucket_view": ("True", True)}
    )
    return Change(
        "gradient_as_bucket_view",
        "gradients inside DDP's buckets",
        f"Trainer({_written(code)})",
        "",
        lambda p: replace(p, strategy=replace(given, gradient_as_bucket_view=True)),
        exact=True,
        topics=_TOPICS,
        code=code,
    )


def _fully_sharded(
    plan: TrainingPlan, model: nn.Module | None, given: DDP | FSDP, devices: int
) -> Iterator[Change]:
    # In half precision Lightning's FSDP also gathers weights and reduces gradients in half.
    policy = resolve_precision(plan.precision)
    exact = policy.name == "32-true" or isinstance(given, FSDP)
    half = "" if exact else "; gradients are reduced in half precision"
    if isinstance(given, DDP):
        strategy, code = _fsdp(model)
        yield Change(
            "fully_sharded",
            f"FSDP over the {devices} devices",
            f"Trainer({_written(code)})",
            f"weights are gathered block by block{half}",
            lambda p: replace(p, strategy=strategy),
            exact=exact,
            topics=_TOPICS,
            code=code,
        )
    base, code = _fsdp(model, offload=True)
    if isinstance(given, FSDP):
        if given.cpu_offload:
            return
        base = replace(given, cpu_offload=True)
        code = instance(
            "strategy", "lightning.pytorch.strategies.FSDPStrategy", {"cpu_offload": ("True", True)}
        )
        code |= Code(remarks=("Keep the other arguments of your FSDPStrategy.",))
    yield Change(
        "fully_sharded_offload",
        f"FSDP over the {devices} devices with offload",
        f"Trainer({_written(code)})",
        f"weights come from the machine's memory block by block, and its CPU steps the optimizer{half}",
        lambda p: replace(p, strategy=base),
        exact=exact,
        topics=_OFFLOAD_TOPICS,
        code=code,
    )


def _fsdp(model: nn.Module | None, *, offload: bool = False) -> tuple[FSDP, Code]:
    """Return FSDP that wraps the model's repeated blocks, and how to write it."""
    classes = {type(block) for block in repeated_blocks(model)} if model is not None else set()
    # What is defined inside a function cannot be imported.
    named = sorted((c for c in classes if "<locals>" not in c.__qualname__), key=lambda c: c.__qualname__)
    arguments: dict[str, tuple[str, Any]] = {}
    imports = tuple(f"from {cls.__module__} import {cls.__qualname__.partition('.')[0]}" for cls in named)
    if named:
        arguments["auto_wrap_policy"] = (
            f"{{{', '.join(cls.__qualname__ for cls in named)}}}",
            [f"{cls.__module__}.{cls.__qualname__}" for cls in named],
        )
    if offload:
        arguments["cpu_offload"] = ("True", True)
    code = instance("strategy", "lightning.pytorch.strategies.FSDPStrategy", arguments, imports)
    if len(named) < len(classes) or model is None:
        code |= Code(remarks=("Name all classes of your blocks in `auto_wrap_policy`.",))
    wrap = tuple(sorted(cls.__name__ for cls in classes)) if model is not None else None
    return FSDP(wrap=wrap, cpu_offload=offload), code


def _zero(plan: TrainingPlan, given: Strategy | None, devices: int) -> Iterator[Change]:
    if plan.gradient_clip_val and plan.gradient_clip_algorithm == "value":  # Lightning's DeepSpeed refuses.
        return
    if not (given is None or isinstance(given, DDP | ZeRO)):
        return
    policy = resolve_precision(plan.precision)
    ladder = dict(zip(_ZERO, ZERO_NAMES, strict=True))
    if isinstance(given, ZeRO):
        ladder = {key: ladder[key] for key in _ZERO[_rung(given) + 1 :]}
    elif devices == 1:  # There is nobody to share with.
        ladder = {key: name for key, name in ladder.items() if "offload" in key}
    autocasts = policy.autocast_dtype is not None and not isinstance(given, ZeRO)
    for key, name in ladder.items():
        strategy, code = _zero_strategy(key, given)
        offload = strategy.offload_optimizer
        costs = (
            "needs DeepSpeed",
            "weights are gathered module by module" if strategy.stage == 3 else "",
            "the CPU steps the optimizer" if offload else "",
            "all weights in half precision" if autocasts else "",
        )
        yield Change(
            name,
            f"DeepSpeed ZeRO stage {strategy.stage}{' with offload' if offload else ''}"
            f"{f' over the {devices} devices' if devices > 1 else ''}",
            f"Trainer({_written(code)})" + (", and DeepSpeedCPUAdam for the optimizer" if offload else ""),
            "; ".join(filter(None, costs)),
            lambda p, strategy=strategy: _with_zero(p, strategy),  # type: ignore[misc]
            exact=not autocasts,
            topics=_OFFLOAD_TOPICS if offload else _TOPICS,
            code=code,
        )


def _rung(given: ZeRO) -> int:
    """Return where on the ladder a run is already."""
    return given.stage + 1 if given.offload_optimizer and given.stage > 1 else given.stage - 1


def _zero_strategy(key: str, given: Strategy | None) -> tuple[ZeRO, Code]:
    strategy = resolve_strategy(key, 1)
    assert isinstance(strategy, ZeRO)
    code = setting("strategy", key)
    if isinstance(given, ZeRO):  # With the options that it has.
        strategy = replace(
            given,
            stage=strategy.stage,
            offload_optimizer=strategy.offload_optimizer,
            offload_parameters=strategy.offload_parameters,
        )
        arguments = {
            name: (repr(value), value)
            for name in ("stage", "offload_optimizer", "offload_parameters")
            if (value := getattr(strategy, name))
        }
        code = instance("strategy", "lightning.pytorch.strategies.DeepSpeedStrategy", arguments)
        code |= Code(remarks=("Keep the other arguments of your DeepSpeedStrategy.",))
    if strategy.offload_optimizer:
        code |= Code(
            remarks=("In configure_optimizers: deepspeed.ops.adam.DeepSpeedCPUAdam in place of Adam.",)
        )
    return strategy, code


def _with_zero(plan: TrainingPlan, strategy: ZeRO) -> TrainingPlan:
    if not strategy.offload_optimizer:
        return replace(plan, strategy=strategy)
    return replace(plan, strategy=strategy, adapt_optimizer=_for_cpu)


def _for_cpu(optimizer: Optimizer) -> Optimizer:
    """DeepSpeed refuses to step other optimizers than its own on the CPU (``zero_force_ds_cpu_optimizer``)."""
    if type(optimizer) not in (Adam, AdamW):
        raise MemPrecError(
            f"DeepSpeed has no optimizer for the CPU in place of `{type(optimizer).__name__}`."
        )
    return optimizer


def _written(code: Code) -> str:
    return ", ".join(f"{name}={expression}" for name, (expression, _) in code.trainer.items())
