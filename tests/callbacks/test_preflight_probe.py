"""A preflight that measures where it cannot trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memprec._errors import DataDependentError, MemoryOverflowError, TraceError
from lightning_memprec.callbacks import MemoryPreflight
from lightning_memprec.callbacks._probe import hook_with_probe_after, is_time_to_probe

from .runs import NAMESPACES, Noisy, Stream, loader, make_module, make_trainer, make_watch, namespace

PLENTY = "1GiB"


def untraceable(module, batch, batch_idx):
    x, y = batch
    out = module.net(x)
    if float(out.detach().mean()) > 1e9:  # Only real weights can tell.
        out = out * 2
    loss = nn.functional.cross_entropy(out, y)
    module.log("loss", loss)
    return loss


def fit(callback, *callbacks, data=None, name="lightning.pytorch", **options):
    namespace(name).seed_everything(1, verbose=False)
    module = make_module(name, training_step=untraceable)
    trainer = make_trainer(callback, *callbacks, name=name, **options)
    trainer.fit(module, loader() if data is None else data)
    return module, trainer


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_run_that_cannot_be_traced_is_measured_when_that_is_allowed(name, capsys):
    callback = MemoryPreflight(device_memory=PLENTY, probe=True)
    _, trainer = fit(callback, name=name)
    assert callback.verdict.status == "fits"
    assert callback.verdict.when == "setup"
    assert trainer.global_step == 4
    weights = 4 * (6 * 64 + 64 + 64 * 3 + 3)
    assert callback.estimate.breakdown.parameters_bytes == weights
    assert callback.estimate.breakdown.optimizer_states_bytes == 2 * weights + 4 * 4
    text = " ".join(capsys.readouterr().out.split())
    assert "measured at batch 1, 2 and 4, extrapolated to 8" in text
    assert "Measured because tracing failed: " in text


def test_without_leave_nothing_is_measured():
    callback = MemoryPreflight(device_memory=PLENTY)
    with pytest.warns(UserWarning, match="could not estimate this run"):
        fit(callback)
    assert callback.verdict.status == "undetermined"


def test_what_can_be_traced_is_traced():
    callback = MemoryPreflight(device_memory=PLENTY, probe=True)
    make_trainer(callback).fit(make_module(), loader())
    assert callback.estimate.events is not None


def test_a_run_that_cannot_fit_is_refused_by_what_was_measured():
    callback = MemoryPreflight(device_memory="1KiB", probe=True)
    with pytest.raises(MemoryOverflowError, match="Training needs about"):
        fit(callback)


def test_loaders_that_open_only_once_are_measured_on_the_first_batch():
    callback = MemoryPreflight(device_memory=PLENTY, probe=True)
    data = Stream()
    _, trainer = fit(callback, data=loader(data))
    assert callback.verdict.status == "fits"
    assert callback.verdict.when == "on_train_batch_start"
    assert trainer.global_step == 2


@pytest.mark.parametrize("in_place", [False, True], ids=["child", "in place"])
def test_a_run_is_the_same_with_the_probe(in_place, monkeypatch):
    def train(*callbacks):
        watch = make_watch()
        module, _ = fit(watch, *callbacks, data=loader(Noisy(), shuffle=True))
        return torch.stack(watch.losses), torch.cat(watch.batches), copy.deepcopy(module.state_dict())

    plain = train()
    if in_place:  # As on a GPU, or where a process cannot fork.
        for module in ("_probe", "memory_preflight"):
            path = f"lightning_memprec.callbacks.{module}.isolated"
            monkeypatch.setattr(path, lambda function, **_: function())
    callback = MemoryPreflight(device_memory=PLENTY, probe=True)
    watched = train(callback)
    assert callback.verdict.status == "fits"
    assert torch.equal(plain[0], watched[0])
    assert torch.equal(plain[1], watched[1])
    assert all(torch.equal(value, watched[2][key]) for key, value in plain[2].items())


def test_a_step_that_fails_for_real_is_told():
    def broken(module, batch, batch_idx):
        raise KeyError("label")

    callback = MemoryPreflight(device_memory=PLENTY, probe=True)
    module = make_module(training_step=broken)
    with pytest.warns(UserWarning, match="could not be probed") as told, pytest.raises(KeyError):
        make_trainer(callback).fit(module, loader())
    assert not any("probe=True" in str(warning.message) for warning in told)  # It was given already.


def test_parameters_made_in_configure_model_are_counted():
    def configure_model(module):
        if not hasattr(module, "late"):
            module.late = nn.Linear(6, 6)

    callback = MemoryPreflight(device_memory=PLENTY, probe=True)
    module = make_module(training_step=untraceable, configure_model=configure_model)
    make_trainer(callback).fit(module, loader())
    assert callback.verdict.when == "setup"  # Not outdated at the start of training.
    assert callback.estimate.total_parameters == sum(p.numel() for p in module.parameters())


DATA_DEPENDENT, OTHER = DataDependentError("reads a value"), TraceError("no")


@pytest.mark.parametrize(
    ("hook", "error", "device", "now", "later"),
    [
        ("setup", DATA_DEPENDENT, "cpu", True, None),
        ("setup", DATA_DEPENDENT, "cuda", False, "on_train_batch_start"),
        ("setup", OTHER, "cpu", False, "on_fit_start"),
        ("on_fit_start", OTHER, "cuda", False, "on_train_batch_start"),
        ("on_train_batch_start", OTHER, "cpu", True, None),
        ("on_train_batch_start", OTHER, "cuda", True, None),
    ],
    ids=["cpu reads", "gpu reads", "cpu other", "gpu other", "cpu last", "gpu last"],
)
def test_a_probe_waits_for_the_last_hook_that_could_trace_and_for_the_device(hook, error, device, now, later):
    assert is_time_to_probe(hook, error, device) is now
    assert hook_with_probe_after(hook, error, device) == later
