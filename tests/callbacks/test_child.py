"""What the analysis does stays in a child process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memprec import MemoryPreflight, TraceError
from lightning_memprec._errors import DataDependentError
from lightning_memprec.callbacks import _child
from lightning_memprec.callbacks._child import isolated

from .runs import namespace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")

pl = namespace()
CACHE = {}
TEACHER = nn.Linear(8, 8)


@functools.lru_cache
def cached_mask(size, device):
    return torch.ones(size, size, device=device).triu()


def masked(module, batch):
    return module.net(batch) @ cached_mask(8, batch.device)


def positions(module, batch):
    if "positions" not in CACHE:
        CACHE["positions"] = torch.arange(8.0, device=batch.device)
    return module.net(batch) + CACHE["positions"]


def averaged_teacher(module, batch):
    with torch.no_grad():
        for kept, new in zip(TEACHER.parameters(), module.net.parameters(), strict=True):
            kept.mul_(0.9).add_(new.to(kept.device), alpha=0.1)
        target = TEACHER(batch)
    return module.net(batch) - target


def shrunk_batch(module, batch):
    return module.net(batch.sub_(0.5))


def counted(module, batch):
    type(module).steps += 1
    return module.net(batch) * type(module).steps


class Model(pl.LightningModule):
    steps = 0

    def __init__(self, step):
        super().__init__()
        self.net = nn.Linear(8, 8)
        self.step = step
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.step(self, batch).square().mean()
        self.losses.append(loss.item() if not loss.is_meta else None)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def losses_of(step, callbacks):
    pl.seed_everything(1, verbose=False)
    cached_mask.cache_clear()
    CACHE.clear()
    Model.steps = 0
    with torch.no_grad():
        for parameter in TEACHER.parameters():
            parameter.fill_(0.5)
    model = Model(step)
    options = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, enable_progress_bar=False, callbacks=callbacks, **options
    )
    # Identity collation hands out the dataset's own storage.
    trainer.fit(model, DataLoader(list(torch.randn(3, 4, 8)), batch_size=None))
    return model.losses, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(params=["forked", "in_process"])
def any_process(request, monkeypatch):
    """With a child process and where none can be had."""
    if request.param == "in_process":

        def refuse():
            raise OSError

        monkeypatch.setattr(os, "fork", refuse)


@pytest.mark.usefixtures("any_process")
@pytest.mark.parametrize("step", [masked, positions, averaged_teacher, shrunk_batch, counted])
def test_state_outside_the_module_is_what_it_would_be(step):
    losses, weights = losses_of(step, [])
    callback = MemoryPreflight(on_error="off")
    watched, watched_weights = losses_of(step, [callback])
    assert watched == losses
    assert torch.equal(watched_weights, weights)


def exits(module, batch):
    if batch.is_meta or not isinstance(module, Model):
        sys.exit(3)
    try:
        float(module.net(batch).detach().sum())
    except RuntimeError:
        sys.exit(1)
    return module.net(batch)


@pytest.mark.usefixtures("any_process")
@pytest.mark.filterwarnings("ignore:`MemoryPreflight` could not estimate this run")
def test_a_step_that_would_exit_in_a_trace_does_not_end_the_run():
    callback = MemoryPreflight()
    losses, _ = losses_of(exits, [callback])
    assert len(losses) == 3
    assert callback.verdict.status == "undetermined"


AUTOGRAD_WITH_THREADS = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from lightning_memprec.callbacks._child import isolated

with FakeTensorMode():  # As torch.compile does; backward passes on an accelerator start threads too.
    torch.ones(1, requires_grad=True).clone().backward()

def differentiate():
    x = torch.ones(1, requires_grad=True)
    try:
        (2 * x).backward()
    except RuntimeError:
        return "swallowed"
    return x.grad.item()

print(isolated(differentiate))
"""


def test_where_autograd_refuses_to_work_in_a_child_it_works_here():
    command = [sys.executable, "-c", AUTOGRAD_WITH_THREADS]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "2.0"


@pytest.fixture
def a_child(monkeypatch):
    """A child process, even if another test has started autograd's threads in this one."""
    monkeypatch.setattr(_child, "autograd_runs", lambda: True)


@pytest.mark.usefixtures("a_child")
def test_result_comes_back_and_changes_do_not():
    kept = []
    assert isolated(lambda: kept.append(1) or os.getpid()) != os.getpid()
    assert kept == []


@pytest.mark.usefixtures("a_child")
@pytest.mark.parametrize("error", [ValueError("no"), DataDependentError("why", "here.py:3")])
def test_errors_come_back_whole(error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        isolated(fail)
    assert vars(caught.value) == vars(error)
    assert caught.value.args == error.args


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("text")
        self.function = lambda: None


@pytest.mark.usefixtures("a_child")
@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), Unpicklable()])
def test_what_cannot_come_back_is_named(error):
    def fail():
        raise error

    with pytest.raises(TraceError, match=type(error).__name__):
        isolated(fail)


@pytest.mark.usefixtures("a_child")
def test_a_child_that_hangs_is_ended():
    with pytest.raises(TraceError, match=r"more than 0\.5 seconds"):
        isolated(lambda: time.sleep(60), time_limit_s=0.5)


@pytest.mark.usefixtures("a_child")
def test_a_child_that_dies_is_reported():
    with pytest.raises(TraceError, match="died"):
        isolated(lambda: os._exit(9))
