"""How a run is spread over devices, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from lightning_memprec.memory.precision import PrecisionPolicy

__all__ = [
    "DDP",
    "FSDP",
    "FullyShard",
    "ShardingStrategy",
    "Strategy",
    "ZeRO",
    "precision_under",
    "resolve_strategy",
]

_DTYPES = ("float32", "float16", "bfloat16")

ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"]


@dataclass(frozen=True, kw_only=True)
class DDP:
    """``torch.nn.parallel.DistributedDataParallel``: every device holds the whole model.

    Args:
        bucket_cap_mb: Size of a communication bucket in MiB; ``None`` is torch's 25.
        gradient_as_bucket_view: Whether gradients live inside the buckets instead of beside them.
        static_graph: Whether the same parameters are used in every step.
        find_unused_parameters: Whether DDP looks for parameters without a gradient.
        broadcast_buffers: Whether buffers are sent from rank zero before each forward pass.
    """

    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True


@dataclass(frozen=True, kw_only=True)
class FullyShard:
    """FSDP2, ``torch.distributed.fsdp.fully_shard``; Lightning's ``ModelParallelStrategy``.

    Args:
        wrap: Class names of the modules that are sharded on their own, beside the root; ``None`` takes the repeated
            blocks, see :func:`~lightning_memprec.memory.sharding.wrapping.repeated_blocks`.
        reshard_after_forward: Whether gathered weights are released after forward, or the size of the groups to which
            they are sharded then; ``None`` is torch's default: all but the root's.
        param_dtype: Dtype of weights while they are gathered, such as ``"bfloat16"``; ``None`` keeps theirs.
        reduce_dtype: Dtype in which gradients are reduced; ``None`` takes theirs.
        cpu_offload: Whether shards, gradients and optimizer states live in host memory.
        tensor_parallel_size: Devices that split each layer; the module's own ``configure_model`` has to do it.
            ``"auto"`` is all devices of a node, Lightning's default.
        by_module: Whether the module's ``configure_model`` calls ``fully_shard``, as Lightning's strategy asks for.
    """

    wrap: tuple[str, ...] | None = None
    reshard_after_forward: bool | int | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    cpu_offload: bool = False
    tensor_parallel_size: int | Literal["auto"] = 1
    by_module: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and value not in _DTYPES:
                raise ValueError(f"`{name}` must be one of {', '.join(_DTYPES)}, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class FSDP:
    """``torch.distributed.fsdp.FullyShardedDataParallel``, Lightning's ``FSDPStrategy``.

    Args:
        sharding_strategy: Name in ``torch.distributed.fsdp.ShardingStrategy``. The hybrid ones shard inside a node.
        wrap: Class names of the modules with flat parameters of their own, beside the root; ``None`` takes the repeated
            blocks, see :func:`~lightning_memprec.memory.sharding.wrapping.repeated_blocks`. ``()`` wraps the root only,
            as FSDP does without a policy.
        policy: An ``auto_wrap_policy`` of torch, used in place of ``wrap``.
        prepare: Called on the wrapped module, for example to checkpoint activations.
        mixed_precision: ``torch.distributed.fsdp.MixedPrecision``; ``None`` follows the precision, as Lightning does.
        cpu_offload: Whether shards, gradients and optimizer states live in host memory.
        options: Further keywords of ``FullyShardedDataParallel``.
    """

    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    wrap: tuple[str, ...] | None = None
    policy: Any = None
    prepare: Callable[[nn.Module], None] | None = None
    mixed_precision: Any = None
    cpu_offload: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.sharding_strategy not in get_args(ShardingStrategy):
            raise ValueError(
                f"`sharding_strategy` must be one of {', '.join(get_args(ShardingStrategy))}, "
                f"got {self.sharding_strategy!r}."
            )


@dataclass(frozen=True, kw_only=True)
class ZeRO:
    """DeepSpeed's ZeRO, Lightning's ``DeepSpeedStrategy``: modelled, since it needs no DeepSpeed.

    Sizes are numbers of elements; the defaults are DeepSpeed's.

    Args:
        stage: What the ranks share (arXiv 1910.02054): 1 optimizer states and masters, 2 also gradients, 3 also
            parameters.
        offload_optimizer: Whether masters, optimizer states and reduced gradients live in host memory.
        offload_parameters: Whether the shards of the parameters live in host memory too; stage 3.
        reduce_bucket_size: Elements of a bucket of gradients.
        allgather_bucket_size: Elements gathered at a time after the step; stages 1 and 2.
        overlap_comm: Whether gradients are reduced while backward goes on, which takes a second bucket.
        contiguous_gradients: Whether gradients are copied to a bucket as they come.
        max_live_parameters: Elements that may stay gathered; stage 3.
        prefetch_bucket_size: Elements gathered ahead; stage 3.
        param_persistence_threshold: Parameters smaller than this are never released; stage 3.
        build_sharded: Whether the model is built in shards (``deepspeed.zero.Init``), which spares every rank's host
            the whole of it; stage 3.
    """

    stage: Literal[1, 2, 3] = 2
    offload_optimizer: bool = False
    offload_parameters: bool = False
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    max_live_parameters: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    build_sharded: bool = True

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ValueError(f"`stage` must be 1, 2 or 3, got {self.stage!r}.")
        if self.offload_parameters and self.stage != 3:
            raise ValueError(f"`offload_parameters` needs stage 3, got {self.stage}.")


Strategy = DDP | FullyShard | FSDP | ZeRO

# Lightning's names (`StrategyRegistry` of Lightning 2.6). Its DeepSpeed strategy sets both buckets to 2e8.
_NAMED: dict[str, Strategy] = {
    **{f"ddp{suffix}": DDP() for suffix in ("", "_spawn", "_fork", "_notebook")},
    **{
        f"ddp{suffix}_find_unused_parameters_{value}": DDP(find_unused_parameters=value == "true")
        for suffix in ("", "_spawn", "_fork", "_notebook")
        for value in ("false", "true")
    },
    "fsdp": FSDP(),
    "fsdp_cpu_offload": FSDP(cpu_offload=True),
    "fsdp2": FullyShard(),
    "modelparallel": FullyShard(),
    **{
        name: ZeRO(
            stage=stage,  # type: ignore[arg-type]
            offload_optimizer="offload" in name,
            offload_parameters=name == "deepspeed_stage_3_offload",
            reduce_bucket_size=200_000_000,
            allgather_bucket_size=200_000_000,
            overlap_comm=True,
        )
        for name, stage in (
            ("deepspeed", 2),
            ("deepspeed_stage_1", 1),
            ("deepspeed_stage_2", 2),
            ("deepspeed_stage_2_offload", 2),
            ("deepspeed_stage_3", 3),
            ("deepspeed_stage_3_offload", 3),
        )
    },
}


def resolve_strategy(strategy: str | Strategy, devices: int) -> Strategy | None:
    """Return the strategy of a run; ``None`` if every device works for itself.

    Args:
        strategy: A strategy, or Lightning's name of one. ``"auto"`` is DDP where there are several devices.
        devices: Devices of all nodes.

    Raises:
        ValueError: If the name is unknown.

    Example:
        >>> resolve_strategy("auto", 1), resolve_strategy("auto", 2)
        (None, DDP(bucket_cap_mb=None, gradient_as_bucket_view=False, static_graph=False, ...))
    """
    if not isinstance(strategy, str):
        return strategy
    if strategy == "auto":
        return DDP() if devices > 1 else None
    if strategy == "single_device":
        return None
    if strategy not in _NAMED:
        raise ValueError(
            f"Unknown strategy {strategy!r}. Choose one of: auto, single_device, {', '.join(sorted(_NAMED))}."
        )
    return _NAMED[strategy]


def precision_under(strategy: Strategy | None, policy: PrecisionPolicy) -> PrecisionPolicy:
    """Return what a precision means under a strategy: DeepSpeed's engine keeps half weights instead of autocasting.

    Args:
        strategy: How the run is spread.
        policy: What the precision means elsewhere.
    """
    if isinstance(strategy, ZeRO) and policy.autocast_dtype is not None:
        return replace(policy, parameter_dtype=policy.autocast_dtype, autocast_dtype=None)
    return policy
