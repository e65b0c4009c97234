"""A training plan out of a parsed configuration."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_memprec._batch import BatchUnavailableError, largest_batch, parse_batch_spec
from lightning_memprec._master_options import master_options
from lightning_memprec._prepare import prepare_copy
from lightning_memprec._validation import plan_validation
from lightning_memprec.cli._config import RunConfig, UsageError
from lightning_memprec.cli._strategy import read_strategy
from lightning_memprec.memory.plan import MasterOptions, TrainingPlan, ValidationPlan
from lightning_memprec.memory.sharding.strategies import Strategy
from lightning_memprec.memory.stand_in import trainer_stand_in

__all__ = ["PlannedRun", "plan_run", "preflight_settings"]


@dataclass(frozen=True)
class PlannedRun:
    """A plan, and what was assumed to make it.

    Args:
        plan: The run.
        notes: Assumptions in words.
    """

    plan: TrainingPlan
    notes: tuple[str, ...]


def preflight_settings(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of a ``MemoryPreflight`` among the run's callbacks; empty if there is none."""
    callbacks = config.trainer.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if isinstance(callback, dict) and str(callback.get("class_path")).endswith(".MemoryPreflight"):
            return dict(callback.get("init_args") or {})
    return {}


def plan_run(
    config: RunConfig,
    *,
    device: str | None,
    batch_spec: Any = None,
    sample_batches: int = 8,
    num_devices: int | None = None,
) -> PlannedRun:
    """Describe the run of a configuration.

    Args:
        config: The parsed configuration.
        device: Device of the estimate; ``None`` follows the Trainer's accelerator.
        batch_spec: The batch in words; ``None`` reads the train loader.
        sample_batches: How many of the first batches of each loader to look at; the largest is taken.
        num_devices: Devices of a node, where the configuration does not decide.

    Raises:
        BatchUnavailableError: If no batch can be had.
        ValueError: If ``batch_spec`` cannot be read.
    """
    settings = config.trainer
    notes: list[str] = []
    if device is None:
        device = "cpu" if settings.get("accelerator") == "cpu" else "cuda"
    strategy = read_strategy(settings.get("strategy"))
    precision, masters = _precision(settings)
    about_devices: list[str] = []
    configured = _devices(settings.get("devices"), strategy, about_devices)
    if num_devices is None:
        num_devices = configured
        notes += about_devices
    plan = TrainingPlan(
        module=config.build_model,
        batch=None,
        optimizer=config.optimizer,
        precision=precision,
        masters=masters,
        device=device,
        strategy=strategy,
        num_devices=num_devices,
        num_nodes=_at_least_one(settings, "num_nodes"),
        accumulate_grad_batches=_at_least_one(settings, "accumulate_grad_batches"),
        gradient_clip_val=settings.get("gradient_clip_val"),
        gradient_clip_algorithm=str(settings.get("gradient_clip_algorithm") or "norm"),
    )
    trainer = trainer_stand_in(plan)
    for name in ("max_epochs", "max_steps"):
        if settings.get(name) is not None:
            setattr(trainer, name, settings[name])
    validation = None
    if batch_spec is not None:
        trainer.datamodule = None
        batch = parse_batch_spec(batch_spec)
        notes.append("Judged by the batch that was described. Validation is not judged: no data is read.")
    else:
        trainer.datamodule = config.build_data()
        source = _data_source(config, trainer)
        batch = _read_batch(source, sample_batches, notes)
        validation = _read_validation(source, settings, sample_batches, notes)
    prepare = functools.partial(prepare_copy, trainer=trainer, datamodule=trainer.datamodule)
    plan = replace(plan, batch=batch, validation=validation, trainer=trainer, prepare=prepare)
    return PlannedRun(plan, tuple(notes))


@contextmanager
def _readable() -> Iterator[None]:
    """Say of whatever the user's data raises what to do about it."""
    try:
        yield
    except BatchUnavailableError:
        raise
    except Exception as error:
        raise BatchUnavailableError(
            f"the data could not be read ({type(error).__name__}: {error}). "
            "Describe the batch by `--batch-spec`"
        ) from error


def _data_source(config: RunConfig, trainer: Any) -> Any:
    """Return what has the loaders, set up as the run would: the data module, or else the model."""
    with _readable():
        source = trainer.datamodule
        if source is not None:
            source.trainer = trainer
            source.prepare_data()
            source.setup("fit")
            return source
        with torch.device("meta"):
            source = config.build_model()
            source._trainer = trainer
            source.setup("fit")  # type: ignore[operator]
        return source


def _read_batch(source: Any, sample_batches: int, notes: list[str]) -> Any:
    with _readable():
        sample = largest_batch(source.train_dataloader(), count=sample_batches, streams=True)
    notes.append(f"Judged by {sample.describe('the train loader')}.")
    return sample.batch


def _read_validation(
    source: Any, settings: dict[str, Any], sample_batches: int, notes: list[str]
) -> ValidationPlan | None:
    limit = settings.get("limit_val_batches")
    loader = getattr(source, "val_dataloader", None)
    # Lightning's own method, which only raises, stands for a run without validation.
    if limit == 0 or loader is None or _is_lightnings_own(loader):
        return None
    try:
        return plan_validation(
            loader(),
            sample_batches=sample_batches,
            limit=limit,
            sanity_check=settings.get("num_sanity_val_steps") != 0,
            inference_mode=settings.get("inference_mode") is not False,
            streams=True,
        )
    except Exception as error:  # Whatever the user's data raises: the training is judged all the same.
        notes.append(f"Validation is not judged: {error}".rstrip(".") + ".")
        return None


def _is_lightnings_own(method: Any) -> bool:
    hooks = ("lightning.pytorch.core.hooks", "pytorch_lightning.core.hooks")
    return getattr(method, "__module__", "") in hooks


def _precision(settings: dict[str, Any]) -> tuple[str, MasterOptions]:
    plugins = settings.get("plugins") or []
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if not isinstance(plugin, dict):
            continue
        arguments = plugin.get("init_args") or {}
        if str(plugin.get("class_path")).endswith(".MasterWeightPrecision"):
            return arguments.get("precision") or "bf16-master", master_options(**arguments)
        if arguments.get("precision"):
            return str(arguments["precision"]), MasterOptions()
    return str(settings.get("precision") or "32-true"), MasterOptions()


def _at_least_one(settings: dict[str, Any], name: str) -> int:
    """Return a count of the Trainer's settings; the Trainer's own default is 1."""
    value = settings.get(name)
    if value is not None and value < 1:
        raise UsageError(f"`trainer.{name}` must be at least 1, got {value}. Correct the configuration.")
    return value or 1


def _devices(setting: Any, strategy: str | Strategy, notes: list[str]) -> int:
    if isinstance(setting, (list, tuple)):
        return len(setting)
    text = str(setting if setting is not None else "auto")
    if "," in text:
        return len([part for part in text.split(",") if part.strip()])
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text not in ("auto", "-1"):
        raise UsageError(
            f"`trainer.devices` must be a count, a list, 'auto' or -1, got {text!r}. Correct it."
        )
    if text == "auto" and strategy == "auto":
        notes.append(
            "`devices: auto` is taken as 1. Several would add DDP's buckets, as large as the gradients."
        )
        return 1
    notes.append(
        f"`devices: {text}` is taken as 2. If more share the model, each needs less: name their number."
    )
    return 2
