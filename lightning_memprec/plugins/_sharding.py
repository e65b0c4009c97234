"""Strategies that shard the model hold FP32 masters themselves; the plugin refuses them, with the line to use."""

from __future__ import annotations

from typing import Any

from lightning_memprec._lightning import misconfiguration

__all__ = ["refuse_sharding"]

# Strategies that hold FP32 masters themselves, and how to ask them to.
_INSTEAD = {
    "FSDPStrategy": 'FSDP keeps FP32 shards: use `Trainer(strategy="fsdp", precision="bf16-mixed")`',
    "ModelParallelStrategy": (
        "FSDP2 keeps FP32 shards: in `configure_model` use `fully_shard(module, "
        "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))`, and drop this plugin"
    ),
    "DeepSpeedStrategy": 'DeepSpeed keeps masters itself: use `Trainer(strategy="deepspeed", precision="bf16-mixed")`',
}


def refuse_sharding(module: Any) -> None:
    """Refuse a run under a strategy that shards the model.

    Args:
        module: The LightningModule; nothing is refused if it has no Trainer.

    Raises:
        MisconfigurationException: If the Trainer's strategy is, or derives from, one of them.
    """
    trainer = getattr(module, "_trainer", None)
    for kind in type(trainer.strategy).__mro__ if trainer is not None else ():
        if kind.__name__ in _INSTEAD:
            raise misconfiguration(
                trainer,
                f"`MasterWeightPrecision` cannot be used with `{kind.__name__}`, whose shards and checkpoints "
                f"know the model's own parameters only. {_INSTEAD[kind.__name__]}.",
            )
