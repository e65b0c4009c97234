"""How a configuration spreads its run over devices; the strategy itself is never built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_memprec.cli._config import UsageError
from lightning_memprec.memory.sharding.strategies import (
    DDP,
    FSDP,
    FullyShard,
    Strategy,
    ZeRO,
    resolve_strategy,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["read_strategy"]

_DDP_OPTIONS = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters", "bucket_cap_mb")
_ALONE = ("auto", "singledevice", "single_device")


def read_strategy(setting: Any) -> str | Strategy:
    """Read ``trainer.strategy``.

    Args:
        setting: A name, or a mapping with ``class_path`` and ``init_args``.

    Returns:
        The strategy, or a name that :func:`~lightning_memprec.memory.sharding.strategies.resolve_strategy` knows.

    Raises:
        UsageError: If it is not known.
    """
    given = isinstance(setting, dict)
    options: dict[str, Any] = dict(setting.get("init_args") or {}) if given else {}
    path = str(setting.get("class_path", "") if given else setting or "auto")
    name = path.rpartition(".")[2].removesuffix("Strategy").lower()
    if name in _ALONE:
        return "auto"
    if given and name == "ddp":
        return DDP(**{key: options[key] for key in _DDP_OPTIONS if options.get(key) is not None})
    if name in ("fsdp", "fsdp_cpu_offload"):
        sharding: Any = options.get("sharding_strategy") or "FULL_SHARD"
        return FSDP(
            # jsonargparse makes an enumeration of the name, the default's too.
            sharding_strategy=getattr(sharding, "name", sharding),
            wrap=_class_names(options.get("auto_wrap_policy")),
            prepare=_checkpointing(options),
            cpu_offload=bool(options.get("cpu_offload")) or name.endswith("offload"),
        )
    if name in ("modelparallel", "model_parallel"):
        return FullyShard(by_module=True, tensor_parallel_size=options.get("tensor_parallel_size") or "auto")
    if given and name == "deepspeed":
        return ZeRO(
            stage=options.get("stage") or 2,
            offload_optimizer=bool(options.get("offload_optimizer")),
            offload_parameters=bool(options.get("offload_parameters")),
        )
    try:
        resolve_strategy(name, 2)
    except ValueError as error:
        raise UsageError(f"`trainer.strategy` {path!r} is not followed. {error}") from error
    return name


def _class_names(policy: Any) -> tuple[str, ...]:
    """Return the classes of modules that get flat parameters of their own; without a policy, as in torch, none."""
    if not isinstance(policy, (list, tuple, set)):
        return ()
    return tuple(getattr(entry, "__name__", str(entry).rpartition(".")[2]) for entry in policy)


def _checkpointing(options: dict[str, Any]) -> Callable[[nn.Module], None] | None:
    """Return what wraps the modules whose activations are computed again, as ``FSDPStrategy`` does."""
    classes = options.get("activation_checkpointing_policy") or options.get("activation_checkpointing")
    names = _class_names(classes if isinstance(classes, (list, tuple, set)) else [classes])
    if not classes:
        return None

    def wrap(wrapped: nn.Module) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        apply_activation_checkpointing(wrapped, check_fn=lambda child: type(child).__name__ in names)

    return wrap
