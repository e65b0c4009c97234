"""Quantize a model after ``fit``, measure what that costs, and export it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_memprec._isolation import unchanged
from lightning_memprec._lightning import CallbackBase, misconfiguration
from lightning_memprec.callbacks._ptq_checks import first_problem, mode_of
from lightning_memprec.callbacks._ptq_copy import Source, averaging_callback
from lightning_memprec.callbacks._ptq_evaluation import loaders_of
from lightning_memprec.callbacks._ptq_limit import Attempt, change_of, table_of
from lightning_memprec.callbacks._ptq_session import Monitor, PhaseError, Session
from lightning_memprec.callbacks._trainer_plan import is_sharded
from lightning_memprec.quantization.methods import resolve
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.smoothing import check_smoothing

if TYPE_CHECKING:
    from lightning_memprec._lightning import LightningModule, Trainer
    from lightning_memprec.quantization.report import QuantizationReport

__all__ = ["PostTrainingQuantization"]

# Parts of a data loader that may change while it is read.
_STATEFUL = ("dataset", "sampler", "batch_sampler", "generator", "collate_fn")
_CHOICES = {
    "mode": (None, "min", "max"),
    "degradation": ("relative", "absolute"),
    "source": ("best", "last", "averaged"),
    "format": ("compressed-tensors", "bitsandbytes"),
    "batch_norm": ("keep", "fold", "retune"),
}


class PostTrainingQuantization(CallbackBase):
    """Export an int8 copy of the model at the end of ``fit``.

    A copy of the best weights, in FP32, is validated with the Trainer's own validation loaders and the module's
    own `validation_step`, quantized, validated again and written. The run's module, optimizer, logged metrics
    and checkpoints stay as they are. After `fit`: `report`, `path` (`None` if nothing was written),
    `metrics_before`, `metrics_after`, `attempts`.

    Nothing is exported by a run that ends with an exception or is interrupted, and `fast_dev_run` writes no file.

    Logged once to every logger, at the end of training:

    | key | meaning |
    |---|---|
    | `memprec/quantization/float_bytes` | parameters and buffers of the float copy |
    | `memprec/quantization/int8_bytes` | the same of the quantized copy |
    | `memprec/quantization/kept_layers` | layers left in floating point to hold the limit |
    | `memprec/quantization/<metric>_before` | each validation metric of the float copy |
    | `memprec/quantization/<metric>_after` | the same of the quantized copy |

    Args:
        method: "weight_only", "absmax", "zeropoint", "vectorwise", "llm_int8", "layer_wise", "gptq", "obq",
            "adaquant", "zeroquant", "brecq", or a registered method.
        dirpath: Folder for the export. By default that of the checkpoints, else the Trainer's root folder.
        filename: Name of the export: one file if it ends in ".safetensors", a Lightning checkpoint if it ends in
            ".ckpt", else a folder that Hugging Face Transformers can open if the model is one of its own.
        format: Keys of the tensors, "compressed-tensors" or "bitsandbytes".
        submodule: Name of the part to quantize and export, such as "model". By default the whole module.
        source: Weights to take: "best" checkpoint (the last weights if there is none), "last", or "averaged".
        monitor: Validation metric to judge by. By default that of the checkpoint callback.
        mode: Whether a larger ("max") or smaller ("min") metric is better. By default as the ModelCheckpoint or
            EarlyStopping that monitors the same metric has it; without one, a limit needs it.
        max_degradation: Largest loss of the metric. Above it nothing is exported. By default there is no limit.
        degradation: Whether the loss counts "relative" to the metric before, or "absolute".
        max_kept_layers: How many of the worst layers may stay in floating point to hold the limit.
        calibration_batches: Training batches for methods that learn from data; validation batches to find outliers
            for "llm_int8", and to order layers by the error of their output where there is a limit.
        include: Names, patterns or classes of layers to quantize. By default all that can be.
        exclude: Names, patterns or classes of layers to leave in floating point.
        scheme: Parts of the method to override, such as {"bits": 4, "group_size": 64}.
        method_options: Options of a method that learns, such as {"act_order": true}.
        mask: Key of the batch's mask, 1 for tokens and 0 for padding, which then does not count. By default
            "attention_mask" where a batch has it.
        batch_norm: "fold" lets convolutions take over the factors of the batch norms behind them first, "retune"
            measures their statistics anew after quantization, "keep" leaves them.
        smoothing: Move what one static scale cannot hold from the inputs of linear layers into their weights, by this
            strength, such as 0.8. Needs scheme={"activations": "static"}. By default nothing is moved.

    Raises:
        ValueError: If an argument is not one of its choices or out of range.

    Example::

        Trainer(callbacks=[PostTrainingQuantization(monitor="val_acc", mode="max", max_degradation=0.01)])
    """

    def __init__(
        self,
        method: str = "weight_only",
        dirpath: str | Path | None = None,
        filename: str = "int8",
        format: Literal["compressed-tensors", "bitsandbytes"] = "compressed-tensors",
        submodule: str | None = None,
        source: Source = "best",
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        max_degradation: float | None = None,
        degradation: Literal["relative", "absolute"] = "relative",
        max_kept_layers: int = 8,
        calibration_batches: int = 32,
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        scheme: dict[str, Any] | None = None,
        method_options: dict[str, Any] | None = None,
        mask: str | None = None,
        batch_norm: Literal["keep", "fold", "retune"] = "keep",
        smoothing: float | None = None,
    ) -> None:
        super().__init__()
        parts = [field.name for field in fields(Scheme)]
        unknown = [key for key in scheme or () if key not in parts]
        if unknown:
            raise ValueError(f"`scheme` has no parts {unknown}. Choose among: {', '.join(parts)}.")
        chosen = resolve(method, scheme or {}, method_options)
        if smoothing is not None:
            check_smoothing(smoothing, chosen.scheme)
        for name, value in (
            ("mode", mode),
            ("degradation", degradation),
            ("source", source),
            ("format", format),
            ("batch_norm", batch_norm),
        ):
            if value not in _CHOICES[name]:
                raise ValueError(f"`{name}` must be one of {list(_CHOICES[name])}, got {value!r}.")
        if max_degradation is not None and not max_degradation >= 0:
            raise ValueError(f"`max_degradation` must be at least 0, got {max_degradation!r}. Try 0.01.")
        for name, number, least in (
            ("max_kept_layers", max_kept_layers, 0),
            ("calibration_batches", calibration_batches, 1),
        ):
            if number < least:
                raise ValueError(f"`{name}` must be at least {least}, got {number!r}.")
        if not filename or Path(filename).name != filename:
            raise ValueError(f"`filename` must be a name without folders, got {filename!r}. Use `dirpath`.")
        self.method = method
        self.dirpath = dirpath
        self.filename = filename
        self.format = format
        self.submodule = submodule
        self.source = source
        self.monitor = monitor
        self.mode = mode
        self.max_degradation = max_degradation
        self.degradation = degradation
        self.max_kept_layers = max_kept_layers
        self.calibration_batches = calibration_batches
        self.include = include
        self.exclude = exclude
        self.scheme = dict(scheme or {})
        self.method_options = dict(method_options or {})
        self.mask = mask
        self.batch_norm: Literal["keep", "fold", "retune"] = batch_norm
        self.smoothing = smoothing
        self._reset()

    def _reset(self) -> None:
        self.report: QuantizationReport | None = None
        self.path: Path | None = None
        self.metrics_before: dict[str, float] = {}
        self.metrics_after: dict[str, float] = {}
        self.attempts: list[Attempt] = []
        self._monitor_seen = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._reset()
        if self.source == "averaged" and averaging_callback(trainer) is None:
            raise misconfiguration(
                trainer,
                "`source='averaged'`, but no callback averages the weights. Add Lightning's `WeightAveraging` or"
                " `StochasticWeightAveraging`, or choose `source='best'`.",
            )
        if self.max_degradation is None:
            return
        monitor = self._monitor(trainer)
        if monitor is None:
            raise misconfiguration(
                trainer, "`max_degradation` needs a metric. Give `monitor`, the name of a validation metric."
            )
        if monitor.mode is None:
            raise misconfiguration(
                trainer,
                f"`max_degradation` needs to know whether a larger or a smaller `{monitor.name}` is better, and no"
                " ModelCheckpoint or EarlyStopping monitors it. Give `mode='max'` or `mode='min'`.",
            )
        if not trainer.enable_validation:
            raise misconfiguration(
                trainer,
                "`max_degradation` needs a validation, and this run has none. Add a validation loader and"
                " `validation_step`, or drop the limit.",
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not in `setup`: the module may build its layers in its own.
        if is_sharded(trainer):
            return
        problem = first_problem(trainer, pl_module, self) if trainer.is_global_zero else ""
        problem = trainer.strategy.broadcast(problem)
        if problem:
            raise misconfiguration(trainer, problem)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is None or self._monitor_seen or trainer.state.fn != "fit":
            return
        known = sorted(trainer.callback_metrics)
        if trainer.sanity_checking and not known:
            return  # Some modules log nothing there.
        self._monitor_seen = True
        if self.monitor not in known:
            rank_zero_warn(
                f"`PostTrainingQuantization` monitors `{self.monitor}`, which is not among the metrics so far: {known}."
                " Correct `monitor`, or log that metric in `validation_step`."
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_sharded(trainer):
            rank_zero_warn(
                f"`PostTrainingQuantization` cannot gather a model from `{type(trainer.strategy).__name__}`. Quantize"
                " a checkpoint with `lightning-memprec quantize`."
            )
            return
        loaders = loaders_of(trainer)
        data = [getattr(loader, name, None) for loader in loaders for name in _STATEFUL]
        # Not the loaders themselves: connections to workers that were closed must not be put back.
        skip = (trainer, self, pl_module, *loaders)
        try:
            with unchanged(*data, getattr(trainer, "datamodule", None), skip=skip):
                problem = self._export(Session(trainer, pl_module, self))
        except Exception as error:  # The run itself is done and sound.
            problem = str(error) if isinstance(error, PhaseError) else f"{type(error).__name__}: {error}"
        if problem:
            rank_zero_warn(f"`PostTrainingQuantization` exported nothing: {problem}")

    def _export(self, session: Session) -> str:
        """Measure, quantize, measure again and write; return why nothing was written, or nothing."""
        trainer = session.trainer
        monitor = self._monitor(trainer)
        self.metrics_before = session.validate_float(monitor)
        for attempt in session.attempts(monitor):
            self.attempts.append(attempt)
        chosen = self.attempts[-1]
        self.report, self.metrics_after = chosen.report, chosen.metrics
        self._log(trainer, chosen)
        if monitor is not None and not self._holds(chosen):
            table = table_of(self.attempts, monitor.name, self.metrics_before[monitor.name])
            return (
                f"the {self.degradation} degradation of `{monitor.name}` is {chosen.degradation:.4g}, above the limit"
                f" {self.max_degradation:g}. Raise `max_kept_layers`, try another method, or raise the limit.\n{table}"
            )
        if not getattr(trainer, "fast_dev_run", False):
            self.path = session.write(chosen)
            name, mode = (None, None) if monitor is None else (monitor.name, monitor.mode)
            change = change_of(chosen, self.metrics_before, name, mode)
            rank_zero_info(f"Int8 model from {session.weights_from}: {self.path} ({change})")
        return ""

    def _holds(self, attempt: Attempt) -> bool:
        if self.max_degradation is None or attempt.degradation is None:
            return self.max_degradation is None
        return attempt.degradation <= self.max_degradation

    def _monitor(self, trainer: Trainer) -> Monitor | None:
        name = self.monitor or getattr(trainer.checkpoint_callback, "monitor", None)
        return None if name is None else Monitor(name, self.mode or mode_of(trainer, name), self.degradation)

    def _log(self, trainer: Trainer, chosen: Attempt) -> None:
        metrics: dict[str, float] = {
            "float_bytes": chosen.report.bytes_before,
            "int8_bytes": chosen.report.bytes_after,
            "kept_layers": len(chosen.kept),
        }
        metrics |= {f"{name}_before": value for name, value in self.metrics_before.items()}
        metrics |= {f"{name}_after": value for name, value in self.metrics_after.items()}
        for logger in trainer.loggers:
            logger.log_metrics(
                {f"memprec/quantization/{name}": value for name, value in metrics.items()},
                step=trainer.global_step,
            )
