"""MemoryPreflight beyond the training step: validation, the largest batch, what a checkpoint takes."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memprec._errors import MemoryOverflowError
from lightning_memprec.callbacks import MemoryPreflight

from .runs import NAMESPACES, Noisy, Stream, loader, make_module, make_trainer, make_watch, namespace

PLENTY = "1GiB"


def validation_step(self, batch, batch_idx):
    x, y = batch
    self.log("val", nn.functional.cross_entropy(self.net(x), y))


def large_loader(length=4096):
    return DataLoader(Noisy(length), batch_size=length)


def peaks(estimate):
    found = {}
    for phase in estimate.phases:
        found[phase.name] = max(found.get(phase.name, 0), phase.peak_allocated_bytes)
    return found


@pytest.mark.parametrize("name", NAMESPACES)
def test_large_validation_batch_is_refused(name, tmp_path):
    module = make_module(name, validation_step=validation_step)
    callback = MemoryPreflight(device_memory="1MiB", remedies=False, report_path=tmp_path / "report.json")
    with pytest.raises(
        MemoryOverflowError, match=r"The peak is in validation; .* Reduce the validation batch size"
    ):
        make_trainer(callback, name=name).fit(module, loader(), large_loader())
    assert callback.estimate.peak_phase.name == "validation"
    # Without it, the run fits.
    steps = peaks(callback.estimate)
    assert max(steps["forward"], steps["backward"], steps["optimizer_step"]) < 2**19
    report = json.loads((tmp_path / "report.json").read_text())
    assert {"validation", "sanity_validation", "checkpoint_save"} <= {
        phase["name"] for phase in report["estimate"]["phases"]
    }
    assert report["estimate"]["host"]["checkpoint_bytes"] > 0


@pytest.mark.parametrize(
    ("hooks", "options", "phases"),
    [
        ({}, {}, set()),
        ({"validation_step": validation_step}, {}, {"validation", "sanity_validation"}),
        ({"validation_step": validation_step}, {"num_sanity_val_steps": 0}, {"validation"}),
        ({"validation_step": validation_step}, {"limit_val_batches": 0}, set()),
    ],
    ids=["no step", "validation", "no sanity check", "no batches"],
)
def test_validation_is_judged_where_the_trainer_validates(hooks, options, phases):
    callback = MemoryPreflight(device_memory=PLENTY)
    with_step = bool(hooks)
    module = make_module(**hooks)
    make_trainer(callback, **options).fit(module, loader(), large_loader(64) if with_step else None)
    assert {"validation", "sanity_validation"} & set(peaks(callback.estimate)) == phases


def test_loaders_of_the_data_module_are_read():
    pl = namespace()

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return loader()

        def val_dataloader(self):
            return [large_loader(16), large_loader(512)]

    def two_loaders(self, batch, batch_idx, dataloader_idx=0):
        validation_step(self, batch, batch_idx)

    callback = MemoryPreflight(device_memory=PLENTY)
    make_trainer(callback).fit(make_module(validation_step=two_loaders), datamodule=Data())
    assert callback.verdict.when == "setup"
    assert peaks(callback.estimate)["validation"] > 512 * 64 * 4


def report_of(callback, module, *data, **options):
    """Fit, and return the notes of the report."""
    make_trainer(callback, **options).fit(module, *data)
    return " ".join(json.loads(callback.report_path.read_text())["notes"])


def test_validation_that_cannot_be_read_is_named(tmp_path):
    callback = MemoryPreflight(device_memory=PLENTY, report_path=tmp_path / "report.json")
    stream = Stream()
    notes = report_of(callback, make_module(validation_step=validation_step), loader(), loader(stream))
    assert "Validation is not judged: `Stream` is an `IterableDataset`" in notes
    assert callback.verdict.status == "fits"
    assert stream.opened == 2  # the sanity check and the epoch


class Texts(torch.utils.data.Dataset):
    """Sequences, the longest of which comes sixth."""

    lengths = (3, 9, 4, 2, 8, 50, 7, 6, 100)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.rand(self.lengths[index], 6), torch.zeros(self.lengths[index], dtype=torch.long)


def on_texts(self, batch, batch_idx):
    x, y = batch
    return nn.functional.cross_entropy(self.net(x), y)


@pytest.mark.parametrize(
    ("sample", "length", "words"),
    [
        (1, 3, "by the first batch of the train loader,"),
        (8, 50, "by the largest of the first 8 batches (index 5) of the train loader,"),
        (100, 100, "by the largest of the first 9 batches (index 8) of the train loader,"),
    ],
)
def test_largest_of_the_first_batches_is_judged(tmp_path, sample, length, words):
    callback = MemoryPreflight(
        device_memory=PLENTY, sample_batches=sample, report_path=tmp_path / "report.json"
    )
    texts = DataLoader(Texts(), batch_size=None)
    assert words in report_of(callback, make_module(training_step=on_texts), texts)
    # A transfer holds weights, states and gradients, and the batch.
    batch = length * (6 * 4 + 8)
    phases = {(p.name, p.step): p.peak_allocated_bytes for p in callback.estimate.phases}
    assert phases["batch_transfer", 0] == phases["setup", -1] + batch


@pytest.mark.parametrize("sample", [0, -1])
def test_bad_number_of_batches_is_named(sample):
    with pytest.raises(ValueError, match=f"`sample_batches` must be at least 1, got {sample}"):
        MemoryPreflight(sample_batches=sample)


def test_run_with_validation_is_bit_identical_with_and_without():
    def run(*callbacks):
        namespace().seed_everything(7)
        data = [Noisy(), Noisy()]
        module = make_module(validation_step=validation_step)
        watch = make_watch()
        trainer = make_trainer(*callbacks, watch, max_epochs=2)
        trainer.fit(module, loader(data[0], shuffle=True), loader(data[1]))
        tensors = [*watch.losses, *watch.batches, *module.parameters(), trainer.callback_metrics["val"]]
        return tensors, [(d.calls, d.seen) for d in data], torch.rand(1)

    plain, checked = run(), run(MemoryPreflight(device_memory=PLENTY))
    assert all(torch.equal(a, b) for a, b in zip(plain[0], checked[0], strict=True))
    assert plain[1:] == checked[1:]
