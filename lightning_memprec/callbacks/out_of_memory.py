"""Say why a run died of memory: where, on which batch, what held it, and what would have fitted."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_memprec._files.atomic import write_json
from lightning_memprec._lightning import CallbackBase
from lightning_memprec.callbacks._post_mortem import Moment, examine, host_room
from lightning_memprec.callbacks._speaking import say
from lightning_memprec.memory.post_mortem import shortage_in
from lightning_memprec.memory.post_mortem_report import BatchHistory, PostMortem, report_text

if TYPE_CHECKING:
    from lightning_memprec._lightning import LightningModule, Trainer
    from lightning_memprec.memory.post_mortem import MemoryShortage

__all__ = ["OutOfMemoryReport"]


class OutOfMemoryReport(CallbackBase):
    """When a run dies of memory, add to its exception why, and write it to a file.

    The report tells the phase, the step and the user's line; the batch beside those before it; what was asked for and
    what was there, whether in pieces (fragmentation), in other processes, or not at all; what weights, gradients and
    optimizer states hold; what an estimate of the very step says; and which changes would have fitted. The exception
    stays what it is: it gains a note, which Python shows below the traceback (before Python 3.11 the text is printed),
    and an attribute `memprec_report` with all figures.

    While the run goes well, each hook notes in which phase it is, and each batch how many elements it has. Nothing is
    logged. Any fault in the report itself is told in one line and does not replace the exception. When the kernel ends
    the process (the out-of-memory killer of Linux), there is no exception and no report.

    Args:
        dirpath: Folder for the file. By default the Trainer's `default_root_dir`.
        remedies: Whether to estimate which changes would have fitted, in a child process and without device memory.
        time_limit_s: Seconds after which the search for them is given up.

    Raises:
        ValueError: If the time limit is not above zero.

    Example::

        Trainer(callbacks=[OutOfMemoryReport()])
    """

    def __init__(
        self, dirpath: str | Path | None = None, remedies: bool = True, time_limit_s: float = 60.0
    ) -> None:
        super().__init__()
        if time_limit_s <= 0:
            raise ValueError(f"`time_limit_s` must be above 0, got {time_limit_s}.")
        self.dirpath = dirpath
        self.remedies = remedies
        self.time_limit_s = time_limit_s
        self.report: PostMortem | None = None
        self._host_room_bytes: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._phase = "set-up"
        self._batch: Any = None
        self._batch_idx: int | None = None
        self._batches = BatchHistory()

    # -- where the run is -----------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.report = None
        self._forget()
        self._host_room_bytes = host_room()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_batch("loading a batch")

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._enter_batch("forward pass", batch, batch_idx)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self._phase = "backward pass"

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Unscaling and clipping follow; under manual optimization whatever the module does next.
        self._phase = "optimizer step" if pl_module.automatic_optimization else "forward pass"

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._phase = "optimizer step"

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches.add(batch)
        self._leave_batch("loading a batch")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_batch("sanity check" if trainer.sanity_checking else "validation")

    @override
    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._enter_batch(self._phase, batch, batch_idx)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._leave_batch(self._phase)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_batch("loading a batch")

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_batch("test")

    @override
    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._enter_batch("test", batch, batch_idx)

    @override
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._batches.add(batch)
        self._leave_batch("test")

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_batch("prediction")

    @override
    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._enter_batch("prediction", batch, batch_idx)

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._batches.add(batch)
        self._leave_batch("prediction")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._forget()

    def _enter_batch(self, phase: str, batch: Any, batch_idx: int) -> None:
        # The Trainer's own loop holds the batch for as long.
        self._phase, self._batch, self._batch_idx = phase, batch, batch_idx

    def _leave_batch(self, phase: str) -> None:
        self._phase, self._batch, self._batch_idx = phase, None, None

    # -- the end --------------------------------------------------------------------------------------------

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            shortage = shortage_in(exception)
            if shortage is None:
                return
            self.report = self._examine(trainer, pl_module, exception, shortage)
            with contextlib.suppress(Exception):  # The user's own class may refuse attributes.
                exception.memprec_report = self.report  # type: ignore[attr-defined]
            _show(exception, f"{report_text(self.report)}\n  {self._write(trainer, self.report)}")
        except Exception as error:
            _confess(trainer, error)
        finally:
            self._batch = None

    def _examine(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        exception: BaseException,
        shortage: MemoryShortage,
    ) -> PostMortem:
        compared = self._batches.compare(self._batch)
        moment = Moment(self._phase, self._batch, self._batch_idx, compared, self._host_room_bytes)
        time_limit_s = self.time_limit_s if self.remedies else None
        return examine(trainer, pl_module, exception, shortage, moment, time_limit_s=time_limit_s)

    def _write(self, trainer: Trainer, report: PostMortem) -> str:
        """Write the file, and say where it is."""
        # `trainer.log_dir` would ask all ranks, and the others may still be training.
        folder = Path(trainer.default_root_dir if self.dirpath is None else self.dirpath)
        path = folder / f"out_of_memory-rank{report.rank}-step{report.step}.json"
        try:
            write_json(path, report.to_dict())
        except OSError as error:
            return f"It could not be written to {path}: {error}."
        return f"In full: {path}"


def _show(exception: BaseException, text: str) -> None:
    """Write a note on an exception, which Python prints below the traceback; or print it."""
    if sys.version_info >= (3, 11):
        with contextlib.suppress(Exception):  # As above.
            exception.add_note(text)
            return
    print(text, file=sys.stderr)


def _confess(trainer: Trainer, error: Exception) -> None:
    with contextlib.suppress(Exception):
        text = f"{type(error).__name__}: {error}. The exception below is the run's own."
        say(trainer, "OutOfMemoryReport could not be made", text, warns=True, every_rank=True)
