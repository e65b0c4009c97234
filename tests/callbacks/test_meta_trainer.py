from __future__ import annotations

import copy
import math

import pytest
import torch

from lightning_memprec.callbacks import MemoryPreflight
from lightning_memprec.callbacks._meta_trainer import MetaTrainer

from .runs import NAMESPACES, Noisy, Stream, loader, make_module, make_trainer, namespace


@pytest.mark.parametrize("name", NAMESPACES)
def test_reads_reach_the_trainer_and_writes_do_not(name):
    trainer = make_trainer(name=name, max_epochs=7)
    stand_in = MetaTrainer(trainer)
    assert stand_in.max_epochs == 7
    stand_in.should_stop = True
    stand_in.strategy.root_device = "elsewhere"
    stand_in.optimizers = [1]
    assert stand_in.should_stop
    assert not trainer.should_stop
    assert trainer.strategy.root_device == torch.device("cpu")
    assert trainer.optimizers == []
    with pytest.raises(AttributeError):
        stand_in.no_such_thing  # noqa: B018


@pytest.mark.parametrize("name", NAMESPACES)
def test_loggers_checkpoints_and_collectives_do_nothing(name, tmp_path):
    import importlib

    logger = importlib.import_module(f"{name}.loggers").CSVLogger(tmp_path)
    stand_in = MetaTrainer(make_trainer(name=name, logger=logger))
    stand_in.logger.log_metrics({"a": 1.0})
    stand_in.logger.experiment.add_scalar("a", 1.0)
    stand_in.save_checkpoint(tmp_path / "x.ckpt")
    stand_in.strategy.barrier()
    tensor = torch.ones(2, device="meta")
    assert stand_in.strategy.reduce(tensor) is tensor
    assert stand_in.strategy.broadcast("x") == "x"
    assert stand_in.strategy.all_gather(tensor) is tensor
    assert not list(tmp_path.rglob("*.*"))


def test_stand_in_is_shared_by_copies():
    stand_in = MetaTrainer(make_trainer())
    assert copy.deepcopy({"t": stand_in})["t"] is stand_in
    assert copy.copy(stand_in).max_epochs == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_epochs": 3, "accumulate_grad_batches": 3},
        {"max_epochs": 3, "limit_train_batches": 2},
        {"max_epochs": 3, "limit_train_batches": 0.5},
        {"max_epochs": 3, "max_steps": 5},
        {"max_epochs": -1, "max_steps": 5},
        {"max_epochs": -1},
    ],
)
def test_step_counts_are_those_of_the_trainer(options):
    found = {}

    def configure_optimizers(self):
        found["real"] = self.trainer.estimated_stepping_batches, self.trainer.num_training_batches
        raise StopIteration

    trainer = make_trainer(**{"max_steps": -1, **options})
    stand_in = MetaTrainer(trainer, loader())
    with pytest.raises(StopIteration):
        trainer.fit(make_module(configure_optimizers=configure_optimizers), loader())
    steps, batches = found["real"]
    assert stand_in.estimated_stepping_batches == steps
    # Where no steps are counted by batches, the real Trainer has not looked at the loader yet.
    assert batches in (stand_in.num_training_batches, math.inf)


def test_stream_has_no_known_length():
    stand_in = MetaTrainer(make_trainer(max_epochs=1, max_steps=9), loader(Stream()))
    assert stand_in.num_training_batches == math.inf
    assert stand_in.estimated_stepping_batches == 9


def test_modules_inside_the_module_log_nowhere():
    pl = namespace()

    class Inner(pl.LightningModule):
        def forward(self, x):
            if self.trainer.max_epochs == 1:
                self.log("inner", x.mean())
            return x

    class Outer(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner, self.layer = Inner(), torch.nn.Linear(6, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(self.inner(batch[0])).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = MemoryPreflight(device_memory="1GiB", stop_after=True)
    make_trainer(callback).fit(Outer(), loader())
    assert callback.verdict.when == "setup"
    assert callback.verdict.status == "fits"


def test_compiled_module_is_judged_as_it_was_before():
    plain, compiled = (MemoryPreflight(device_memory="1GiB", stop_after=True) for _ in range(2))
    make_trainer(plain).fit(make_module(), loader())
    make_trainer(compiled).fit(torch.compile(make_module(), backend="eager"), loader(Noisy()))
    assert compiled.verdict.when == "setup"
    assert compiled.estimate.peak_allocated_bytes == plain.estimate.peak_allocated_bytes
