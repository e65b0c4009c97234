"""The forms of `report_path`, and the progress that is shown while a child process traces."""

from __future__ import annotations

import functools
import io
import os
import pickle
import pty
import sys

import pytest
from torch.cuda import _memory_viz as viz

from lightning_memprec import MemoryPreflight
from lightning_memprec._progress import Progress
from lightning_memprec.callbacks._child import isolated
from lightning_memprec.report import read_report

from .runs import loader, make_module, namespace


def fit(callback, **options):
    trainer = namespace().Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback], **options,
    )  # fmt: skip
    trainer.fit(make_module(), loader())
    return callback


def test_a_page_a_snapshot_and_json(tmp_path):
    for name in ("run.html", "run.pickle", "run.json"):
        callback = fit(
            MemoryPreflight(device_memory="1GiB", remedies=False, report_path=str(tmp_path / name))
        )
    page = (tmp_path / "run.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "FITS" in page
    report = read_report(tmp_path / "run.json")
    assert report.estimate == callback.estimate
    assert report.verdict == callback.verdict
    assert "total_allocated" in viz.segsum(pickle.loads((tmp_path / "run.pickle").read_bytes()))


def test_a_run_without_an_estimate_has_a_page_that_says_why(tmp_path):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum() * float(self.net(batch[0]).sum().detach())

    path = tmp_path / "run.html"
    trainer = namespace().Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[MemoryPreflight(on_error="off", report_path=path)],
    )  # fmt: skip
    trainer.fit(make_module(training_step=training_step), loader())
    assert "UNDETERMINED: The step asks for the value of a tensor" in path.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
def test_the_parent_speaks_while_the_child_works():
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        progress = Progress("tracing", stream=stream, delay_s=0)
        # Answers when it is told that the parent has spoken.
        assert isolated(functools.partial(os.read, *_pipe_filled_by(progress)), progress=progress) == b"x"
        shown = ""
        while not shown.endswith("s\r\x1b[K"):
            shown += os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "tracing ... " in shown


def _pipe_filled_by(progress):
    reader, writer = os.pipe()
    tick = progress.tick

    def told():
        tick()
        os.write(writer, b"x")

    progress.tick = told
    return reader, 1


def test_a_trainers_output_is_the_same_without_a_terminal(monkeypatch):
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(Progress.__init__, "__kwdefaults__", {"stream": None, "delay_s": 0.0})
    fit(MemoryPreflight(device_memory="1GiB", remedies=False))
    assert "traces the run" not in errors.getvalue()
    assert "\x1b[K" not in errors.getvalue()
