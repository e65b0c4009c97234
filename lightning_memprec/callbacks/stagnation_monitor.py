"""Measure how many updates half-precision weights lose, or would lose."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_memprec._lightning import CallbackBase
from lightning_memprec.callbacks._speaking import say
from lightning_memprec.master_weights.stagnation import count_lost_updates, count_unchanged, sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lightning_memprec._lightning import LightningModule, Trainer

__all__ = ["StagnationMonitor"]

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_SAMPLE = 2**16  # Elements of one tensor: a share is then known to 0.2 % (one standard error), at any size.
_LOST, _AVOIDED = "lost_update_ratio", "avoided_loss_ratio"


@dataclass
class _Snapshot:
    """A sample of one parameter before the step."""

    parameter: Tensor
    before: Tensor
    has_gradient: Tensor | None  # None: a wide weight, whose update is read off.


@dataclass
class _Tally:
    lost: float = 0.0
    intended: float = 0.0
    ratios: list[tuple[int, float]] = field(default_factory=list)


class StagnationMonitor(CallbackBase):
    """Measure how many updates half-precision weights lose, and say whether the run needs FP32 masters.

    On each measured step a sample of every weight that an optimizer holds is compared before and after.

    - Half-precision weights (bf16-true, 16-true): the share of elements with a gradient that the step left
      unchanged. An optimizer that keeps what was rounded away elsewhere (Kahan summation) loses less than that.
    - FP32 weights (32-true, mixed precision, master weights): the share of elements whose update would have
      been rounded away, had the weights been in `dtype`.

    The run itself is not changed. Measured steps copy up to 65,536 elements of each tensor; the others cost
    nothing. At the end of `fit` the result is said in words. Checkpoints hold what was measured, so that a run that
    is resumed goes on counting.

    Logged to every logger, and in `trainer.callback_metrics`, after each measured step:

    | key | meaning |
    |---|---|
    | `memprec/stagnation/lost_update_ratio` | share of updates of half-precision weights that changed nothing |
    | `memprec/stagnation/avoided_loss_ratio` | share of updates of FP32 weights that half weights would lose |

    Args:
        every_n_steps: Measure each n-th optimizer step.
        dtype: The half precision against which FP32 weights are held, "bfloat16" or "float16".

    Raises:
        ValueError: If `every_n_steps` is below 1 or `dtype` is not one of its choices.

    Example::

        Trainer(precision="bf16-true", callbacks=[StagnationMonitor(every_n_steps=50)])
    """

    def __init__(self, every_n_steps: int = 100, dtype: Literal["bfloat16", "float16"] = "bfloat16") -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be at least 1, got {every_n_steps!r}.")
        if dtype not in _HALVES:
            raise ValueError(f"`dtype` must be 'bfloat16' or 'float16', got {dtype!r}.")
        self.every_n_steps = every_n_steps
        self.dtype = dtype
        self._snapshots: dict[int, list[_Snapshot]] = {}
        self._tallies: dict[str, _Tally] = {}
        self._warned = False
        self._is_fitting = True
        self._reset()

    @property
    def history(self) -> dict[str, list[tuple[int, float]]]:
        """Measured shares by name (`lost_update_ratio`, `avoided_loss_ratio`), each with its step."""
        return {name: list(tally.ratios) for name, tally in self._tallies.items() if tally.ratios}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {name: asdict(tally) for name, tally in self._tallies.items()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # `trainer.test(ckpt_path="best")` must not put the counts back to those of the best epoch.
        if not self._is_fitting:
            return
        try:
            self._tallies = {name: _tally(state_dict[name]) for name in self._tallies}
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            rank_zero_warn(
                f"`StagnationMonitor` could not read its state in the checkpoint ({type(error).__name__}: {error}). "
                "Its counts start anew."
            )

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_fitting = stage == "fit"
        if self._is_fitting:
            self._reset()  # Before a checkpoint is restored.

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_fitting = True  # `load_state_dict` outside a Trainer restores.

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # An optimizer that evaluates its closure again (LBFGS) comes here several times in one step.
        if (trainer.global_step + 1) % self.every_n_steps or id(optimizer) in self._snapshots:
            return
        self._snapshots[id(optimizer)] = []
        try:
            self._snapshots[id(optimizer)] = list(_snapshots(optimizer))
        except Exception as error:
            self._warn(error)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._snapshots:
            return
        counts = torch.zeros(4)
        try:
            for snapshot in [s for snapshots in self._snapshots.values() for s in snapshots]:
                half = snapshot.has_gradient is not None
                counts[slice(0, 2) if half else slice(2, 4)] += self._count(snapshot).cpu()
        except Exception as error:
            self._warn(error)
        self._snapshots = {}
        # Also after a fault: every rank takes part. Shards (FSDP) differ from rank to rank.
        counts = trainer.strategy.reduce(counts.to(trainer.strategy.root_device), reduce_op="sum")
        self._add(trainer, pl_module, dict(zip((_LOST, _AVOIDED), counts.view(2, 2).tolist(), strict=True)))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        say(trainer, "StagnationMonitor", self.in_words())

    def in_words(self) -> str:
        """Say what was measured and what to do."""
        lost, avoided = self._tallies[_LOST], self._tallies[_AVOIDED]
        sentences = []
        if lost.intended:
            sentences.append(
                f"{lost.lost / lost.intended:.1%} of the updates of half-precision weights changed nothing "
                f"(measured on {len(lost.ratios)} steps). FP32 master weights keep them."
            )
        if avoided.intended:
            sentences.append(
                f"{avoided.lost / avoided.intended:.1%} of the updates of FP32 weights would have been lost with "
                f"weights in {self.dtype} (measured on {len(avoided.ratios)} steps)."
            )
        return " ".join(sentences) or (
            f"No update was measured. Is `every_n_steps={self.every_n_steps}` longer than the run?"
        )

    def _reset(self) -> None:
        self._snapshots = {}
        self._tallies = {_LOST: _Tally(), _AVOIDED: _Tally()}
        self._warned = False

    def _count(self, snapshot: _Snapshot) -> Tensor:
        """Return lost and intended updates of one parameter, the sample scaled up to all of its elements."""
        after = sample(snapshot.parameter, _SAMPLE)
        if snapshot.has_gradient is None:
            counts = count_lost_updates(snapshot.before, after, _HALVES[self.dtype])
        else:
            counts = count_unchanged(snapshot.before, after, snapshot.has_gradient)
        return torch.stack(counts).float() * (snapshot.parameter.numel() / max(after.numel(), 1))

    def _add(self, trainer: Trainer, pl_module: LightningModule, counts: Mapping[str, list[float]]) -> None:
        metrics = {}
        for name, (lost, intended) in counts.items():
            if intended:
                tally = self._tallies[name]
                tally.lost += lost
                tally.intended += intended
                tally.ratios.append((trainer.global_step, lost / intended))
                metrics[f"memprec/stagnation/{name}"] = lost / intended
        if not metrics:
            return
        # The loggers below get them at any step; Lightning's own way there is only open every `log_every_n_steps`.
        pl_module.log_dict(metrics, on_step=True, on_epoch=False, logger=False)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(f"`StagnationMonitor` could not measure: {type(error).__name__}: {error}")


def _tally(state: Mapping[str, Any]) -> _Tally:
    ratios = [(int(step), float(ratio)) for step, ratio in state["ratios"]]
    return _Tally(float(state["lost"]), float(state["intended"]), ratios)


def _snapshots(optimizer: Any) -> Iterator[_Snapshot]:
    for group in optimizer.param_groups:
        if float(group.get("lr", 1.0)) == 0.0:
            continue  # A warm-up's first step intends no update.
        for parameter in group["params"]:
            if parameter.dtype in (torch.float32, torch.float64):
                yield _Snapshot(parameter, sample(parameter, _SAMPLE), None)
            elif parameter.dtype in _HALVES.values() and parameter.grad is not None:
                has_gradient = sample(parameter.grad, _SAMPLE) != 0
                yield _Snapshot(parameter, sample(parameter, _SAMPLE), has_gradient)
