"""Watch the loss scale of a run and say in words what its steps show."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_memprec._lightning import CallbackBase, misconfiguration
from lightning_memprec.callbacks._scaler_session import SavedScaler, ScalerSession, Settings
from lightning_memprec.scaling.errors import ScalerCollapseError
from lightning_memprec.scaling.health import ScalerHealth
from lightning_memprec.scaling.plot import plot_history
from lightning_memprec.scaling.saved_state import find_scaler_states

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from lightning_memprec._lightning import LightningModule, Trainer
    from lightning_memprec.scaling.record import Event

__all__ = ["GradScalerMonitor"]


class GradScalerMonitor(CallbackBase):
    """Watch scale, skipped steps, gradient norms and losses, and say what is wrong and what to do.

    Works with every precision plugin that has a `scaler`: `16-mixed`, FSDP's, and this package's `16-master`.
    Runs without one (bf16, FP32) are watched for non-finite losses and gradients and for rising norms. Watching
    changes nothing in the run and does not wait for the device on quiet steps. Only `on_collapse`, `min_scale`,
    `hold_schedule` and `import_scaler_state` act.

    Logged to every logger, every `every_n_steps` steps of an optimizer and at every event:

    | key | meaning |
    |---|---|
    | `memprec/grad_scaler/scale` | loss scale of the step |
    | `memprec/grad_scaler/skipped_count` | skipped steps so far, all optimizers |
    | `memprec/grad_scaler/skip_rate_fraction` | skipped part of the last `window` steps, without calibration |
    | `memprec/grad_scaler/growth_count` | how often the scale has grown |
    | `memprec/grad_scaler/grad_norm` | norm of the unscaled gradients before clipping |
    | `memprec/grad_scaler/param_norm_max` | largest norm of a parameter |
    | `memprec/grad_scaler/loss_is_finite` | 1 or 0 |
    | `memprec/grad_scaler/batch_idx` | batch of the step |
    | `memprec/grad_scaler/event_count` | events told so far |

    With several optimizers, norms and skips of number `i` are under `memprec/grad_scaler/optimizer_<i>/`.

    Args:
        every_n_steps: Look at all gradients and parameters, and log, every so many steps of an optimizer.
        low_scale_threshold: Below this loss scale, frequent skips count as exploding gradients.
        min_scale: Floor at which the loss scale is held. By default there is none, as in torch.
        window: Number of steps over which the rate of skips and the median norm are taken.
        on_collapse: What to do when the scale has collapsed: "warn", "stop" training in good order, or "raise"
            ScalerCollapseError.
        hold_schedule: Whether to hold learning-rate schedulers that Lightning steps after every batch when the
            optimizer skipped the step.
        import_scaler_state: Whether to take over the scaler state of a checkpoint that another precision plugin
            wrote.
        report_path: JSON file for the summary, the events and the history, written at the end of `fit`.

    Raises:
        ValueError: If an option is out of range or not one of its choices.
        MisconfigurationException: If a Trainer has more than one of these, in `setup`.

    Example::

        Trainer(precision="16-mixed", callbacks=[GradScalerMonitor()])
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        low_scale_threshold: float = 16.0,
        min_scale: float | None = None,
        window: int = 100,
        on_collapse: Literal["warn", "stop", "raise"] = "warn",
        hold_schedule: bool = False,
        import_scaler_state: bool = False,
        report_path: str | Path | None = None,
    ) -> None:
        super().__init__()
        for name, count in (("every_n_steps", every_n_steps), ("window", window)):
            if count < 1:
                raise ValueError(f"`{name}` must be at least 1, got {count}.")
        for name, scale in (("low_scale_threshold", low_scale_threshold), ("min_scale", min_scale)):
            if scale is not None and not (scale > 0 and math.isfinite(scale)):
                raise ValueError(f"`{name}` must be a finite number above 0, got {scale}.")
        if on_collapse not in ("warn", "stop", "raise"):
            raise ValueError(f"`on_collapse` must be 'warn', 'stop' or 'raise', got {on_collapse!r}.")
        self.every_n_steps = every_n_steps
        self.low_scale_threshold = low_scale_threshold
        self.min_scale = min_scale
        self.window = window
        self.on_collapse = on_collapse
        self.hold_schedule = hold_schedule
        self.import_scaler_state = import_scaler_state
        self.report_path = report_path
        self.health = self._new_health()
        self._session: ScalerSession | None = None
        self._saved: SavedScaler | None = None
        self._is_broken = False
        self._is_fitting = True

    @property
    def events(self) -> list[Event]:
        """What was told so far, oldest first."""
        return self.health.events

    def summary(self) -> str:
        """Put the run so far into words."""
        return self.health.summary()

    def plot(self, ax: Any = None) -> Any:
        """Draw scale, skipped steps and gradient norm over steps.

        Args:
            ax: Matplotlib axes; a new figure is made if ``None``.

        Returns:
            ``(figure, axes)``.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        return plot_history(self.health.history, ax)

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._session is not None:
            self._guarded(self._session.take_in, every=True)
        return self.health.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # `trainer.test(ckpt_path="best")` must not put the counts back to those of the best epoch.
        if self._is_fitting:
            self._guarded(self._restore, state_dict)

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._guarded(self._note_saved_scaler, trainer, checkpoint)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Two would take each other's place at the plugin, and act twice.
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, GradScalerMonitor) for callback in callbacks) > 1:
            message = "A Trainer takes one GradScalerMonitor, and this one has several. Keep one of them."
            raise misconfiguration(trainer, message)
        self._is_fitting = stage == "fit"
        if self._is_fitting:
            self.health = self._new_health()
            self._saved, self._is_broken = None, False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._guarded(self._start, trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._session is not None:
            self._session.watch.start_batch(batch_idx)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._session is not None:
            self._guarded(self._session.watch.before_backward, loss)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None and self._session.watch.is_order_checked:
            self._guarded(self._session.watch.after_backward)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._session is not None:
            self._guarded(self._session.watch.before_step, optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._session is not None:
            self._guarded(self._session.end_batch)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None:
            self._guarded(self._session.finish, wait=True)
        self._detach()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._session is not None:
            self._guarded(self._session.explain, exception)
            # After an error of the device the figures may never come.
            self._guarded(self._session.finish, wait=isinstance(exception, KeyboardInterrupt))
        self._detach()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._detach()
        self._is_fitting = True  # `load_state_dict` outside a Trainer restores.

    def _new_health(self) -> ScalerHealth:
        return ScalerHealth(self.low_scale_threshold, self.window, self.min_scale)

    def _restore(self, state: dict[str, Any]) -> None:
        health = self._new_health()
        try:
            health.load_state_dict(state)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            rank_zero_warn(
                f"`GradScalerMonitor` could not read its state in the checkpoint ({type(error).__name__}: {error}). "
                "Its counts start anew."
            )
        else:
            self.health = health

    def _note_saved_scaler(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        fresh = {} if scaler is None else scaler.state_dict()
        self._saved = SavedScaler(find_scaler_states(checkpoint), fresh)

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        settings = Settings(
            self.every_n_steps,
            self.min_scale,
            self.on_collapse,
            self.hold_schedule,
            self.import_scaler_state,
            self.report_path,
        )
        self._session = ScalerSession(trainer, pl_module, self.health, settings, self._saved, self._guarded)

    def _detach(self) -> None:
        if self._session is not None:
            self._session.detach()
            self._session = None

    def _guarded(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call what must not end a run when it fails; after a failure the run goes on unwatched."""
        if self._is_broken:
            return
        try:
            function(*args, **kwargs)
        except (ScalerCollapseError, Warning):  # Warnings are raised where the user asked for that.
            raise
        except Exception as error:
            self._is_broken = True
            rank_zero_warn(
                f"`GradScalerMonitor` failed and watches no longer: {type(error).__name__}: {error} "
                "Training goes on; options such as `min_scale` do not act any more."
            )
