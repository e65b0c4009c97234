"""The steps of quantization after ``fit``, each taken by all ranks or by none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_memprec._files.atomic import write_json
from lightning_memprec._lightning import namespace_of
from lightning_memprec.callbacks._ptq_checks import export_path
from lightning_memprec.callbacks._ptq_copy import choose_weights, copy_with, off_limits, reset_metrics
from lightning_memprec.callbacks._ptq_evaluation import fresh_loader, validate_copy
from lightning_memprec.callbacks._ptq_limit import Attempt, degradation_of, search
from lightning_memprec.callbacks._ranks import gather
from lightning_memprec.quantization.checkpoint import save_quantized
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.methods import resolve

if TYPE_CHECKING:
    from lightning_memprec._lightning import LightningModule, Trainer
    from lightning_memprec.callbacks.post_training_quantization import PostTrainingQuantization
    from lightning_memprec.quantization.report import QuantizationReport

__all__ = ["Monitor", "PhaseError", "Session"]

T = TypeVar("T")


class PhaseError(Exception):
    """A step failed on some rank; the message says why. All ranks raise it."""


@dataclass(frozen=True)
class Monitor:
    """The metric to judge by.

    Args:
        name: Its name among the validation metrics.
        mode: Whether larger or smaller is better; ``None`` if unknown, in a run without a limit.
        degradation: How its loss is counted.
    """

    name: str
    mode: Literal["min", "max"] | None
    degradation: Literal["relative", "absolute"]


def _together(function: Callable[..., T], *args: Any) -> T:
    """Call a function on every rank; if it fails on one, fail on all."""
    value: T | None = None
    problem = ""
    try:
        value = function(*args)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problem = next(filter(None, gather(problem)), "")
    if problem:
        raise PhaseError(problem)
    return value  # type: ignore[return-value]


class Session:
    """One export.

    Args:
        trainer: The Trainer in ``on_train_end``.
        module: Its module, which is not touched.
        options: The callback with the user's arguments.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, options: PostTrainingQuantization) -> None:
        self.trainer, self.module, self.options = trainer, module, options
        self._weights, self.weights_from = _together(choose_weights, trainer, module, options.source)
        self._before: dict[str, float] = {}
        self._copy: LightningModule | None = None

    def validate_float(self, monitor: Monitor | None) -> dict[str, float]:
        """Validate the float copy.

        Raises:
            PhaseError: If that fails, or if there is a limit and the monitored metric is not among the results.
        """
        self._copy = _together(copy_with, self.module, self._weights, self.trainer)
        self._before = self._validate(self._copy)
        limited = self.options.max_degradation is not None
        if monitor is not None and limited and monitor.name not in self._before:
            logged = f"is not among the validation metrics {sorted(self._before)}"
            problem = logged if self._before else "was not logged, since the validation logged nothing"
            raise PhaseError(f"`{monitor.name}` {problem}. Correct `monitor` or the validation.")
        return self._before

    def attempts(self, monitor: Monitor | None) -> Iterator[Attempt]:
        """Quantize and measure, with more and more layers kept in floating point until the limit holds."""
        limit = self.options.max_degradation

        def attempt(kept: tuple[str, ...]) -> Attempt:
            return self._attempt(kept, monitor)

        if limit is None:
            yield attempt(())
        else:
            yield from search(attempt, limit, self.options.max_kept_layers)

    def _attempt(self, kept: tuple[str, ...], monitor: Monitor | None) -> Attempt:
        # The first attempt takes the copy that was validated in floating point.
        copied = self._copy if not kept else _together(copy_with, self.module, self._weights, self.trainer)
        assert copied is not None
        # Ranks saw other batches: the weights and the order of layers of rank zero hold for all.
        report = gather(_together(self._quantize, copied, kept))[0]
        _share(copied)
        metrics = self._validate(copied)
        self._copy = copied
        degradation = None
        if monitor is not None and monitor.mode is not None and monitor.name in self._before:
            before, after = self._before[monitor.name], metrics[monitor.name]
            degradation = degradation_of(before, after, monitor.mode, monitor.degradation)
        return Attempt(kept, report, metrics, degradation)

    def _validate(self, copied: LightningModule) -> dict[str, float]:
        """Validate a copy; the mean over ranks of what each measured."""
        with off_limits(self.module):
            metrics = _together(validate_copy, self.trainer, copied)
        ranks = gather(metrics)
        return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in metrics}

    def _part(self, module: nn.Module) -> nn.Module:
        return module.get_submodule(self.options.submodule or "")

    def _quantize(self, copied: LightningModule, kept: tuple[str, ...]) -> QuantizationReport:
        options = self.options
        copied.to(self.trainer.strategy.root_device)
        batches = self._batches(copied, ranking=not kept)
        with off_limits(self.module):
            report = quantize_(
                self._part(copied),
                options.method,
                include=options.include,
                exclude=[*(options.exclude or []), *kept] or None,
                calibration=batches,
                forward=self._forward(copied),
                # Ranks see other outliers; columns of their own would give their layers other shapes.
                exact_outliers=None if self.trainer.world_size == 1 else False,
                method_options=options.method_options,
                mask=options.mask,
                batch_norm=options.batch_norm,
                smoothing=options.smoothing,
                **options.scheme,
            )
        reset_metrics(copied)  # Calibration has updated those of `validation_step`.
        if not kept and not report.quantized:
            raise ValueError(
                f"no layer of the `{type(copied).__name__}` was quantized. Layers of torch can be (linear, convolution,"
                " embedding, attention, recurrent), those that other packages write anew cannot; look at `include`,"
                " `exclude` and `submodule`"
            )
        return report

    def _batches(self, copied: LightningModule, *, ranking: bool) -> list[tuple[Any, ...]] | None:
        """Return arguments of ``validation_step``: batches to learn from, or else to measure layers and outliers.

        What is learned comes from training data. What is only measured comes from validation data, which
        ``validation_step`` takes in any case.
        """
        method = resolve(self.options.method, self.options.scheme)
        # Outliers are looked for in each attempt: their exact columns are part of the result.
        measures = method.scheme.outlier_threshold is not None or (
            ranking and self.options.max_degradation is not None
        )
        learns = method.needs_calibration or method.solver is not None or self.options.batch_norm == "retune"
        if learns:
            loop: Any = self.trainer.fit_loop
        elif measures and self._before:
            loop = self.trainer.fit_loop.epoch_loop.val_loop
        else:
            return None
        loader = fresh_loader(loop)
        several = len(loader.flattened) > 1 and loop is not self.trainer.fit_loop
        batches: list[tuple[Any, ...]] = []
        for batch, index, loader_index in itertools.islice(iter(loader), self.options.calibration_batches):
            batch = copied.on_before_batch_transfer(batch, loader_index)
            batch = copied.transfer_batch_to_device(batch, self.trainer.strategy.root_device, loader_index)
            batch = copied.on_after_batch_transfer(batch, loader_index)
            batches.append((batch, index, loader_index) if several else (batch, index))
        return batches

    def _forward(self, copied: LightningModule) -> Callable[[nn.Module, Any], Any]:
        has_step = (
            type(copied).validation_step is not namespace_of(self.trainer).LightningModule.validation_step
        )

        def forward(_: nn.Module, arguments: tuple[Any, ...]) -> Any:
            if not has_step:
                raise ValueError(
                    f"{self.options.method!r} runs batches through `validation_step`, which the module lacks. Add it,"
                    " or choose 'weight_only'."
                )
            vars(copied).update(log=_drop, log_dict=_drop)
            try:
                return copied.validation_step(*arguments)
            finally:
                del copied.log, copied.log_dict

        return forward

    def write(self, attempt: Attempt) -> Path:
        """Write the model that was measured last, and the report beside it; rank zero does."""
        target = export_path(self.trainer, self.options.dirpath, self.options.filename)
        path: Path = self.trainer.strategy.broadcast(target)

        def save() -> None:
            assert self._copy is not None
            if self.trainer.is_global_zero:
                entries = self._entries() if path.suffix == ".ckpt" else None
                save_quantized(
                    self._part(self._copy), path, format=self.options.format, checkpoint_entries=entries
                )
                write_json(self._report_path(path), self._summary(attempt))

        _together(save)
        return path

    @staticmethod
    def _report_path(path: Path) -> Path:
        if path.suffix in (".safetensors", ".ckpt"):
            return path.with_suffix(".report.json")
        return path / "quantization_report.json"

    def _summary(self, attempt: Attempt) -> dict[str, Any]:
        return {
            "weights": self.weights_from,
            "metrics_before": self._before,
            "metrics_after": attempt.metrics,
            "kept_in_floating_point": list(attempt.kept),
            **attempt.report.to_dict(),
        }

    def _entries(self) -> dict[str, Any]:
        """Return what Lightning's ``load_from_checkpoint`` wants; hyperparameters as far as they are plain."""
        hyperparameters = {key: value for key, value in dict(self.module.hparams).items() if _is_plain(value)}
        return {
            "pytorch-lightning_version": namespace_of(self.trainer).__version__,
            "epoch": self.trainer.current_epoch,
            "global_step": self.trainer.global_step,
            "hyper_parameters": hyperparameters,
        }


def _drop(*args: Any, **kwargs: Any) -> None:
    pass


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _share(module: nn.Module) -> None:
    """Give every rank the quantized weights of rank zero: methods that learn saw other data on each."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in {id(t): t for t in module.state_dict(keep_vars=True).values()}.values():
            dist.broadcast(tensor.data, src=0)
