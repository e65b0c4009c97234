"""How a configuration spreads its run over devices; the strategy itself is never built."""

from __future__ import annotations

from typing import Any

from lightning_memprec.cli._config import UsageError
from lightning_memprec.memory.sharding.strategies import (
    DDP,
    FSDP,
    FullyShard,
    Strategy,
    ZeRO,
    resolve_strategy,
)

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
        return FSDP(
            sharding_strategy=options.get("sharding_strategy") or "FULL_SHARD",
            wrap=_class_names(options.get("auto_wrap_policy")),
            cpu_offload=bool(options.get("cpu_offload")) or name.endswith("offload"),
        )
    if name in ("modelparallel", "model_parallel"):
        return FullyShard(by_module=True)
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
    return tuple(str(entry).rpartition(".")[2] for entry in policy)
