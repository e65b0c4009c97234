from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

from lightning_memprec._errors import MemoryOverflowError
from lightning_memprec._units import parse_bytes
from lightning_memprec.callbacks import MemoryPreflight

from .runs import NAMESPACES, Noisy, Stream, loader, make_module, make_trainer, make_watch, namespace

TINY = "1KiB"
PLENTY = "1GiB"


def fit(callback, module=None, data=None, **options):
    module = make_module() if module is None else module
    trainer = make_trainer(callback, **options)
    trainer.fit(module, loader() if data is None else data)
    return trainer


@pytest.mark.parametrize("name", NAMESPACES)
def test_run_that_cannot_fit_is_refused_before_training(name):
    module = make_module(name)
    before = copy.deepcopy(module.state_dict())
    callback = MemoryPreflight(device_memory=TINY)
    trainer = make_trainer(callback, name=name)
    with pytest.raises(MemoryOverflowError, match=r"Training needs about .* offers 1\.00 KiB") as caught:
        trainer.fit(module, loader())
    assert caught.value.capacity_bytes == 1024
    assert caught.value.estimate is callback.estimate
    assert callback.verdict.status == "overflow"
    assert callback.verdict.when == "setup"
    assert trainer.global_step == 0
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", NAMESPACES)
def test_run_that_fits_trains(name):
    callback = MemoryPreflight(device_memory=PLENTY)
    trainer = make_trainer(callback, name=name)
    trainer.fit(make_module(name), loader())
    assert callback.verdict.status == "fits"
    assert trainer.global_step == 4


def test_largest_batch_is_found_for_runs_that_fit_and_runs_that_do_not(tmp_path):
    path = tmp_path / "report.json"
    roomy = MemoryPreflight(device_memory=PLENTY, report_path=path)
    fit(roomy)
    largest = json.loads(path.read_text())["verdict"]["largest_batch"]
    # How far the search comes in its few seconds depends on the machine.
    assert largest["size"] == roomy.largest_batch_size >= largest["given_size"]
    assert largest["need_bytes"] <= 0.95 * 1024**3
    small = roomy.estimate.minimum_device_bytes - 1
    tight = MemoryPreflight(device_memory=small, safety_margin=0.0, on_overflow="off")
    fit(tight)
    assert tight.largest_batch_size is None or tight.largest_batch_size < largest["given_size"]
    quiet = MemoryPreflight(device_memory=PLENTY, remedies=False)
    fit(quiet)
    assert quiet.largest_batch_size is None


def test_need_counts_weights_and_adam_moments():
    callback = MemoryPreflight(device_memory=PLENTY)
    fit(callback)
    weights = 4 * (6 * 64 + 64 + 64 * 3 + 3)
    parts = callback.estimate.breakdown
    assert parts.parameters_bytes == weights
    # Adam keeps two moments a weight and one 4-byte step count for each of the four tensors.
    assert parts.optimizer_states_bytes == 2 * weights + 4 * 4


@pytest.mark.parametrize("action", ["warn", "off"])
def test_overflow_is_only_reported_when_asked(action, recwarn):
    callback = MemoryPreflight(device_memory=TINY, on_overflow=action, remedies=False)
    trainer = fit(callback)
    assert trainer.global_step == 4
    assert callback.verdict.status == "overflow"
    assert any("Training needs about" in str(w.message) for w in recwarn) == (action == "warn")


def test_safety_margin_counts_as_taken():
    probe = MemoryPreflight(device_memory=PLENTY)
    fit(probe)
    capacity = probe.estimate.peak_device_bytes + 1
    fit(MemoryPreflight(device_memory=capacity, safety_margin=0.0))
    with pytest.raises(MemoryOverflowError, match="less than the safety margin"):
        fit(MemoryPreflight(device_memory=capacity, safety_margin=0.1, remedies=False))


def test_without_capacity_the_estimate_is_given_and_the_run_goes_on():
    callback = MemoryPreflight()
    trainer = fit(callback)
    assert callback.verdict.status == "undetermined"
    assert callback.verdict.need_bytes == callback.estimate.peak_device_bytes > 0
    assert trainer.global_step == 4


def test_catalogue_device_sets_the_capacity():
    callback = MemoryPreflight(device="a100 80gb")
    fit(callback)
    assert callback.verdict.status == "fits"
    assert callback.verdict.capacity_bytes > parse_bytes("78GiB")
    assert callback.estimate.device == "A100-80GB"


def test_stop_after_ends_the_run_in_good_order():
    callback = MemoryPreflight(device_memory=PLENTY, stop_after=True)
    trainer = fit(callback)
    assert callback.verdict.status == "fits"
    assert trainer.global_step == 0
    assert trainer.state.finished


def global_random_state():
    import random

    import numpy as np

    return random.random(), float(np.random.rand()), torch.rand(1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("budget", [None, PLENTY])
def test_run_is_bit_identical_with_and_without(workers, budget):
    def run(*callbacks):
        namespace().seed_everything(7)
        module, dataset = make_module(), Noisy()
        options = {"generator": torch.Generator().manual_seed(5)} if workers == 0 else {}
        data = loader(dataset, shuffle=True, num_workers=workers, **options)
        watch = make_watch()
        make_trainer(*callbacks, watch, max_epochs=2).fit(module, data)
        tensors = [*watch.losses, *watch.batches, *module.parameters()]
        return tensors, dataset, global_random_state()

    plain, plain_data, plain_random = run()
    callback = MemoryPreflight(device_memory=budget)
    checked, checked_data, checked_random = run(callback)
    assert callback.verdict.when == "setup"
    assert len(plain) == 8 + 8 + 4
    assert all(torch.equal(a, b) for a, b in zip(plain, checked, strict=True))
    assert plain_random == checked_random
    assert plain_data.calls == checked_data.calls
    assert plain_data.seen == checked_data.seen


def test_stream_is_opened_once_and_judged_by_its_first_batch():
    stream = Stream()
    callback = MemoryPreflight(device_memory=PLENTY)
    fit(callback, data=loader(stream))
    assert stream.opened == 1
    assert callback.verdict.status == "fits"
    assert callback.verdict.when == "on_train_batch_start"


def test_stream_with_described_batch_is_judged_in_setup():
    stream = Stream()
    callback = MemoryPreflight(device_memory=PLENTY, batch_spec=["float32[8, 6]", "int64[8] = 1"])
    fit(callback, data=loader(stream))
    assert callback.verdict.when == "setup"
    assert callback.verdict.status == "fits"
    reference = MemoryPreflight(device_memory=PLENTY)
    fit(reference)
    assert callback.estimate.peak_allocated_bytes == reference.estimate.peak_allocated_bytes


def test_data_made_in_the_modules_setup_is_judged_in_on_fit_start():
    def setup(self, stage):
        self.data = Noisy()

    module = make_module(setup=setup, train_dataloader=lambda self: loader(self.data))
    callback = MemoryPreflight(device_memory=PLENTY)
    make_trainer(callback).fit(module)
    assert callback.verdict.when == "on_fit_start"
    assert callback.verdict.status == "fits"


def test_layers_made_in_setup_and_configure_model_are_counted_before_they_exist():
    def setup(self, stage):
        self.head = torch.nn.Linear(3, 50)

    def configure_model(self):
        self.tail = torch.nn.Linear(3, 70)

    module = make_module(setup=setup, configure_model=configure_model)
    callback = MemoryPreflight(device_memory=TINY, remedies=False)
    with pytest.raises(MemoryOverflowError):
        fit(callback, module)
    assert callback.estimate.total_parameters == 643 + 200 + 280
    assert not hasattr(module, "head")


def test_every_logger_is_told(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    loggers = [CSVLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="b")]
    fit(MemoryPreflight(device_memory=PLENTY), logger=loggers)
    for logger in loggers:
        header, *rows = (tmp_path / logger.name / "version_0" / "metrics.csv").read_text().splitlines()
        first = dict(zip(header.split(","), rows[0].split(","), strict=True))
        assert float(first["memprec/preflight/parameters_bytes"]) == 4 * 643
        assert float(first["memprec/preflight/capacity_bytes"]) == 1024**3
        assert float(first["memprec/preflight/headroom_bytes"]) > 0


def test_trace_logs_nothing_and_touches_no_trainer_state(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    calls = []

    def training_step(self, batch, batch_idx):
        self.logger.log_metrics({"mine": 1.0})
        self.trainer.should_stop = self.trainer.max_epochs < 0
        self.all_gather(torch.ones(2))
        return self.net(batch[0]).sum()

    class Counting(CSVLogger):
        def log_metrics(self, metrics, step=None):
            calls.extend(metrics)

    module = make_module(training_step=training_step)
    fit(MemoryPreflight(device_memory=PLENTY), module, logger=[Counting(tmp_path)])
    assert calls.count("mine") == 4


def value_dependent(self, batch, batch_idx):
    loss = self.net(batch[0]).sum()
    return loss if loss.item() else None


def test_step_that_reads_values_is_reported_and_trained_all_the_same():
    callback = MemoryPreflight(device_memory=TINY)
    with pytest.warns(UserWarning, match=r"could not estimate this run: .*test_memory_preflight\.py:\d+"):
        trainer = fit(callback, make_module(training_step=value_dependent))
    assert callback.verdict.status == "undetermined"
    assert trainer.global_step == 4


def test_faults_can_be_hidden_or_raised():
    fit(MemoryPreflight(on_error="off"), make_module(training_step=value_dependent))
    with pytest.raises(RuntimeError, match="value of a tensor"):
        fit(MemoryPreflight(on_error="raise"), make_module(training_step=value_dependent))


def test_step_that_raises_keeps_its_own_error():
    def training_step(self, batch, batch_idx):
        raise KeyError("mine")

    with pytest.warns(UserWarning, match="could not"), pytest.raises(KeyError, match="mine"):
        fit(MemoryPreflight(), make_module(training_step=training_step))


def test_optimizer_none_is_estimated_without_states():
    callback = MemoryPreflight(device_memory=PLENTY)
    with pytest.warns(UserWarning, match="no optimizer"):
        fit(callback, make_module(configure_optimizers=lambda self: None))
    assert callback.estimate.breakdown.optimizer_states_bytes == 0


def test_empty_loader_ends_without_verdict(recwarn):
    class Empty(Noisy):
        def __len__(self):
            return 0

    callback = MemoryPreflight()
    fit(callback, data=loader(Empty()))
    assert any("could not estimate this run" in str(w.message) for w in recwarn)
    assert callback.verdict.status == "undetermined"


def test_batches_of_none_are_reported(recwarn):
    data = loader(collate_fn=lambda samples: None)
    fit(MemoryPreflight(device_memory=PLENTY), data=data)
    assert any("no batch came to hand" in str(w.message) for w in recwarn)


def test_each_fit_is_judged_anew():
    callback = MemoryPreflight(device_memory=PLENTY)
    trainer = make_trainer(callback)
    trainer.fit(make_module(), loader())
    first = callback.estimate
    trainer.fit_loop.max_epochs = 2
    trainer.fit(make_module(), loader())
    assert callback.estimate is not first
    assert callback.estimate.peak_allocated_bytes == first.peak_allocated_bytes


def test_only_fit_is_judged():
    def validation_step(self, batch, batch_idx):
        pass

    callback = MemoryPreflight(device_memory=TINY)
    module = make_module(validation_step=validation_step, test_step=validation_step)
    trainer = make_trainer(callback)
    trainer.validate(module, loader())
    trainer.test(module, loader())
    assert callback.verdict is None


def test_fast_dev_run_and_sanity_check():
    def validation_step(self, batch, batch_idx):
        pass

    callback = MemoryPreflight(device_memory=PLENTY)
    trainer = make_trainer(callback, fast_dev_run=True)
    trainer.fit(make_module(validation_step=validation_step), loader(), loader())
    assert callback.verdict.status == "fits"
    trainer = make_trainer(callback)
    trainer.fit(make_module(validation_step=validation_step), loader(), loader())
    assert callback.verdict.when == "setup"


def test_resumed_run_is_judged(tmp_path):
    trainer = make_trainer(max_epochs=1)
    trainer.fit(make_module(), loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    callback = MemoryPreflight(device_memory=PLENTY)
    resumed = make_trainer(callback, max_epochs=2)
    resumed.fit(make_module(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert callback.verdict.when == "setup"
    assert resumed.global_step == 8


def test_learning_rate_tuner_runs_beside_it():
    from lightning.pytorch.tuner import Tuner

    callback = MemoryPreflight(device_memory=PLENTY)
    trainer = make_trainer(callback, max_epochs=20)
    module = make_module()
    module.lr = 0.1
    Tuner(trainer).lr_find(module, loader(), num_training=3)
    trainer.fit(module, loader())
    assert callback.verdict.status == "fits"


def test_model_frozen_after_setup_is_judged_again():
    pl = namespace()

    class Freeze(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            pl_module.net[0].requires_grad_(False)

    callback = MemoryPreflight(device_memory=PLENTY)
    trainer = make_trainer(callback, Freeze())
    trainer.fit(make_module(), loader())
    assert callback.verdict.when == "on_train_start"
    assert callback.estimate.trainable_parameters == 64 * 3 + 3


def test_transfer_hooks_of_the_data_module_are_traced():
    pl = namespace()

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return loader()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0].repeat(4, 1), batch[1].repeat(4)

    callback, plain = MemoryPreflight(device_memory=PLENTY), MemoryPreflight(device_memory=PLENTY)
    make_trainer(callback).fit(make_module(), datamodule=Data())
    fit(plain)
    assert callback.verdict.when == "setup"
    assert callback.estimate.breakdown.inputs_bytes > plain.estimate.breakdown.inputs_bytes


def test_schedule_over_all_steps_does_not_open_the_data():
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        self.seen = [*getattr(self, "seen", []), steps]
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]

    module = make_module(configure_optimizers=configure_optimizers)
    callback = MemoryPreflight(device_memory=PLENTY)
    fit(callback, module, max_epochs=2, accumulate_grad_batches=3)
    assert callback.verdict.when == "setup"
    assert module.seen == [4]


def test_report_is_written(tmp_path):
    path = tmp_path / "deep" / "preflight.json"
    callback = MemoryPreflight(device_memory=PLENTY, report_path=path)
    fit(callback)
    report = json.loads(path.read_text())
    assert report["verdict"]["status"] == "fits"
    assert report["estimate"]["peak_device_bytes"] == callback.estimate.peak_device_bytes
    assert list(path.parent.iterdir()) == [path]


def test_report_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    callback = MemoryPreflight(device_memory=PLENTY, report_path=tmp_path / "file" / "report.json")
    with pytest.warns(UserWarning, match="could not report"):
        trainer = fit(callback)
    assert trainer.global_step == 4


def test_report_without_rich_is_plain_text(monkeypatch, caplog):
    from lightning_memprec.callbacks import _outcome

    monkeypatch.setattr(_outcome, "is_installed", lambda package: False)
    with caplog.at_level("INFO"):
        fit(MemoryPreflight(device_memory=PLENTY))
    assert "FITS" in caplog.text
    assert "Judged in `setup` by the first batch of the train loader" in caplog.text


def test_refusal_survives_pickling():
    with pytest.raises(MemoryOverflowError) as caught:
        fit(MemoryPreflight(device_memory=TINY, remedies=False))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert copied.capacity_bytes == 1024
    assert copied.estimate.peak_device_bytes == caught.value.estimate.peak_device_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "H900"}, "H900"),
        ({"device_memory": "24 gigs"}, "24 gigs"),
        ({"device_memory": 0}, "larger than 0"),
        ({"safety_margin": 1.0}, "safety_margin"),
        ({"on_overflow": "explode"}, "on_overflow"),
        ({"on_error": "explode"}, "on_error"),
        ({"batch_spec": "floaty[3]"}, "floaty"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MemoryPreflight(**options)
