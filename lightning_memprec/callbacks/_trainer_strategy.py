"""How a Trainer spreads its run over devices, read from the options of its own strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from lightning_memprec.memory.sharding.strategies import DDP, FSDP, FullyShard, Strategy, ZeRO

__all__ = ["strategy_of"]

# Keywords of `DistributedDataParallel` that decide what it needs.
_DDP_OPTIONS = (
    "bucket_cap_mb",
    "gradient_as_bucket_view",
    "static_graph",
    "find_unused_parameters",
    "broadcast_buffers",
)
# What `FSDP` holds in fields of its own, or the engine sets itself.
_OWN_OPTIONS = (
    "auto_wrap_policy",
    "cpu_offload",
    "device_id",
    "mixed_precision",
    "sharding_strategy",
    "process_group",
)
# Of the section `zero_optimization` in DeepSpeed's configuration.
_ZERO_OPTIONS = {
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "overlap_comm": "overlap_comm",
    "contiguous_gradients": "contiguous_gradients",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
}


def strategy_of(trainer: Any) -> Strategy | None:
    """Return how a Trainer's strategy spreads the run; ``None`` if every device works for itself.

    Strategies are told by the names of their classes, base classes included: those of both namespaces count, and
    DeepSpeed's without DeepSpeed.

    Args:
        trainer: Trainer inside ``fit``.
    """
    readers: dict[str, Callable[[Any], Strategy]] = {
        "DeepSpeedStrategy": _read_deepspeed,  # It derives from DDPStrategy.
        "FSDPStrategy": _read_fsdp,
        "ModelParallelStrategy": _read_model_parallel,
        "DDPStrategy": _read_ddp,
    }
    names = {base.__name__ for base in type(trainer.strategy).__mro__}
    for name, read in readers.items():
        if name in names:
            return read(trainer.strategy)
    return None


def _read_ddp(strategy: Any) -> DDP:
    options = {name: value for name, value in strategy._ddp_kwargs.items() if name in _DDP_OPTIONS}
    return DDP(**options)


def _read_fsdp(strategy: Any) -> FSDP:
    keywords = {name: value for name, value in strategy.kwargs.items() if name not in _OWN_OPTIONS}
    mesh = keywords.pop("device_mesh", None)
    if mesh is not None:
        # A mesh of the real ranks; the trace makes one of its own.
        keywords["device_mesh"] = tuple(mesh) if isinstance(mesh, tuple) else tuple(mesh.mesh.shape)
    return FSDP(
        sharding_strategy=strategy.sharding_strategy.name,
        wrap=(),
        policy=strategy.kwargs.get("auto_wrap_policy"),
        prepare=functools.partial(_checkpoint_activations, strategy._activation_checkpointing_kwargs),
        mixed_precision=strategy.mixed_precision_config,
        cpu_offload=bool(strategy.cpu_offload is not None and strategy.cpu_offload.offload_params),
        options=tuple(keywords.items()),
    )


def _checkpoint_activations(keywords: Mapping[str, Any], wrapper: Any) -> None:
    if keywords:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        apply_activation_checkpointing(wrapper, **keywords)


def _read_model_parallel(strategy: Any) -> FullyShard:
    size = strategy._tensor_parallel_size
    return FullyShard(
        tensor_parallel_size=strategy.num_processes if size == "auto" else int(size), by_module=True
    )


def _read_deepspeed(strategy: Any) -> ZeRO | DDP:
    section: Mapping[str, Any] = (strategy.config or {}).get("zero_optimization") or {}
    stage = int(section.get("stage", 0))
    if stage == 0:
        return DDP()
    options = {
        ours: section[theirs]
        for theirs, ours in _ZERO_OPTIONS.items()
        if isinstance(section.get(theirs), (int, float))  # "auto" is set by others than Lightning.
    }
    return ZeRO(
        stage=stage,  # type: ignore[arg-type]
        offload_optimizer=_is_offloaded(section.get("offload_optimizer")),
        offload_parameters=stage == 3 and _is_offloaded(section.get("offload_param")),
        **options,
    )


def _is_offloaded(section: Mapping[str, Any] | None) -> bool:
    return section is not None and section.get("device", "none") not in (None, "none")
