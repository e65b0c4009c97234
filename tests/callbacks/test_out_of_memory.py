"""Runs that die of memory: what their exception gains, and what it stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memprec.callbacks.out_of_memory import OutOfMemoryReport
from lightning_memprec.memory.post_mortem_report import PostMortem

from .runs import NAMESPACES, loader, make_module, make_trainer, make_watch, namespace

# More than any machine has; the allocator refuses it at once.
TOO_MUCH = 2**60
HAS_NOTES = sys.version_info >= (3, 11)


def run_out(*args, **kwargs):
    torch.empty(TOO_MUCH, dtype=torch.uint8)


class Late:
    """Runs out at the second call."""

    def __init__(self, hook):
        self.hook, self.calls = hook, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 2:
            run_out()
        return self.hook(*args, **kwargs) if self.hook else None


class ExplodingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        run_out()
        return gradient


def step_of(module, batch):
    return nn.functional.cross_entropy(module.net(batch[0]), batch[1])


def in_forward(module, batch, batch_idx):
    if batch_idx == 1:
        run_out()
    return step_of(module, batch)


def in_backward(module, batch, batch_idx):
    loss = step_of(module, batch)
    return ExplodingBackward.apply(loss) if batch_idx == 1 else loss


def in_update(module, epoch, batch_idx, optimizer, closure):
    optimizer.step(closure)
    if batch_idx == 1:
        run_out()


def in_validation(module, batch, batch_idx):
    if not module.trainer.sanity_checking:
        run_out()


def fail(trainer, module, **options):
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory") as caught:
        trainer.fit(module, loader(), **options)
    return caught.value


PHASES = {
    "forward": ("forward pass", 1, 1, {"training_step": in_forward}, {}),
    "backward": ("backward pass", 1, 1, {"training_step": in_backward}, {}),
    "update": ("optimizer step", 1, 1, {"optimizer_step": in_update}, {}),
    "validation": ("validation", 4, 0, {"validation_step": in_validation}, {"limit_val_batches": 1}),
    "sanity": ("sanity check", 0, 0, {"validation_step": run_out}, {"limit_val_batches": 1}),
    "loading": ("loading a batch", 1, None, {"transfer_batch_to_device": None}, {}),
    "setup": ("set-up", 0, None, {"configure_optimizers": run_out}, {}),
}


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("case", PHASES)
def test_phase_step_and_batch_are_told(case, name, tmp_path):
    phase, step, batch_idx, hooks, options = PHASES[case]
    module = make_module(name, **{key: value for key, value in hooks.items() if value})
    if case == "loading":
        module.transfer_batch_to_device = Late(lambda batch, device, index: batch)
    callback = OutOfMemoryReport(tmp_path, remedies=False)
    trainer = make_trainer(callback, name=name, **options)
    error = fail(trainer, module, val_dataloaders=loader() if "validation_step" in hooks else None)
    report = callback.report
    # Lightning counts a step when its optimizer hook returns.
    assert (report.phase, report.batch_idx) == (phase, batch_idx)
    assert report.step == step
    assert report.location.startswith(__file__)
    assert report.shortage.requested_bytes == TOO_MUCH
    assert error.memprec_report is report


def test_a_checkpoint_that_takes_too_much_is_told(tmp_path):
    pl = namespace()
    module = make_module(on_save_checkpoint=run_out)
    saving = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    callback = OutOfMemoryReport(tmp_path, remedies=False)
    fail(make_trainer(callback, saving, enable_checkpointing=True), module)
    assert callback.report.phase == "saving a checkpoint"


def test_exception_keeps_its_type_and_gains_a_note_and_a_file(tmp_path, capsys):
    callback = OutOfMemoryReport(tmp_path, remedies=False)
    error = fail(make_trainer(callback), make_module(training_step=in_forward))
    assert type(error) is RuntimeError
    assert "you tried to allocate" in str(error)
    path = tmp_path / "out_of_memory-rank0-step1.json"
    plain = json.loads(path.read_text())
    text = error.__notes__[0] if HAS_NOTES else capsys.readouterr().err
    assert len(getattr(error, "__notes__", [0])) == 1
    assert text.startswith("Out of memory on cpu: forward pass, after 1 optimizer step, batch 1 of epoch 0.")
    assert text.startswith(plain["text"])
    assert str(path) in text
    assert plain["held"]["parameters"] == 4 * (6 * 64 + 64 + 64 * 3 + 3)
    # Adam keeps two moments a weight and one 4-byte step count for each of the four tensors.
    assert plain["held"]["optimizer states"] == 2 * plain["held"]["parameters"] + 4 * 4
    assert plain["batch"].endswith("as large as the one before.")


def test_what_would_have_fitted_is_estimated_without_running_the_step(tmp_path):
    limited = 4 * 2**20

    def step(module, batch, batch_idx):
        if not batch[0].is_meta and type(module.trainer).__name__ == "Trainer":
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of "
                f"{limited / 2**20:.2f} MiB of which 0 bytes is free. Including non-PyTorch memory, this process has "
                "4.00 MiB memory in use. Of the allocated memory 3.00 MiB is allocated by PyTorch, and 0 bytes is "
                "reserved by PyTorch but unallocated."
            )
        hidden = batch[0][:, None, :].expand(-1, 4096, -1) * module.net[0].weight.sum()
        return hidden.exp().sigmoid().tanh().exp().mean() + step_of(module, batch)

    module = make_module(training_step=step)
    callback = OutOfMemoryReport(tmp_path)
    data = loader([(torch.randn(6), i % 3) for i in range(64)])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        make_trainer(callback).fit(module, data)
    report = callback.report
    assert report.capacity_bytes == limited
    assert report.predicted.minimum_device_bytes > limited
    assert report.remedies
    assert all(remedy.fits == (remedy.need_bytes <= limited) for remedy in report.remedies)
    text = " ".join((caught.value.__notes__[0] if HAS_NOTES else "").split())
    assert not HAS_NOTES or "Predicted:" in text
    assert report.shortage.device == "cuda:0"


def test_other_exceptions_pass_untouched(tmp_path):
    def wrong(module, batch, batch_idx):
        raise KeyError("label")

    callback = OutOfMemoryReport(tmp_path)
    with pytest.raises(KeyError) as caught:
        make_trainer(callback).fit(make_module(training_step=wrong), loader())
    assert callback.report is None
    assert not getattr(caught.value, "__notes__", [])
    assert not list(tmp_path.iterdir())


def test_a_fault_in_the_report_does_not_replace_the_exception(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise LookupError("our fault")

    monkeypatch.setattr("lightning_memprec.callbacks.out_of_memory.examine", broken)
    error = fail(make_trainer(OutOfMemoryReport(tmp_path)), make_module(training_step=in_forward))
    assert type(error) is RuntimeError
    assert not getattr(error, "__notes__", [])


class Silent(RuntimeError):
    def __str__(self):
        raise LookupError("no text")


class Strict(MemoryError):
    """Takes neither attributes nor notes."""

    def __setattr__(self, name, value):
        if name == "memprec_report":
            raise TypeError(name)
        super().__setattr__(name, value)

    def add_note(self, note):
        raise TypeError(note)


class OfTwo(Exception):
    def __init__(self, first, second):
        super().__init__(first)
        self.second = second


def from_another():
    try:
        run_out()
    except RuntimeError as error:
        raise OfTwo("first", 2) from error


def in_silence():
    raise Silent("CUDA out of memory")


def strictly():
    raise Strict("Unable to allocate 2.00 GiB for an array")


@pytest.mark.parametrize(
    ("fails", "kind", "args", "told"),
    [
        (from_another, OfTwo, ("first",), True),
        (in_silence, Silent, ("CUDA out of memory",), False),
        (strictly, Strict, ("Unable to allocate 2.00 GiB for an array",), True),
    ],
    ids=["cause", "no text", "strict"],
)
@pytest.mark.parametrize("hook", ["training_step", "validation_step"])
def test_exceptions_of_any_class_come_out_as_they_went_in(hook, fails, kind, args, told, tmp_path, capsys):
    callback = OutOfMemoryReport(tmp_path, remedies=False)
    module = make_module(**{hook: lambda *_: fails()})
    with pytest.raises(kind) as caught:
        make_trainer(callback, limit_val_batches=1).fit(
            module, loader(), loader() if hook == "validation_step" else None
        )
    assert type(caught.value) is kind
    assert caught.value.args == args
    assert (caught.value.__cause__ is not None) == (fails is from_another)
    assert (callback.report is not None) == told
    if kind is Strict:  # Its report is printed instead.
        assert "2.00 GiB asked for" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_costs_only_the_file(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    callback = OutOfMemoryReport(blocked, remedies=False)
    error = fail(make_trainer(callback), make_module(training_step=in_forward))
    assert callback.report is not None
    assert not HAS_NOTES or "could not be written" in error.__notes__[0]


def test_a_second_run_begins_anew(tmp_path):
    callback = OutOfMemoryReport(tmp_path, remedies=False)
    fail(make_trainer(callback), make_module(training_step=in_forward))
    make_trainer(callback).fit(make_module(), loader())
    assert callback.report is None


def test_a_run_is_the_same_with_the_callback(tmp_path):
    def losses(*callbacks):
        pl = namespace()
        pl.seed_everything(1, verbose=False)
        watch = make_watch()
        make_trainer(watch, *callbacks).fit(make_module(), loader())
        return torch.stack(watch.losses)

    assert torch.equal(losses(), losses(OutOfMemoryReport(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_no_batch_is_kept_alive(tmp_path):
    callback = OutOfMemoryReport(tmp_path, remedies=False)
    fail(make_trainer(callback), make_module(training_step=in_forward))
    assert callback._batch is None


def test_manual_optimization_comes_back_to_the_forward_pass(tmp_path):
    def step(module, batch, batch_idx):
        loss = step_of(module, batch)
        module.manual_backward(loss)
        run_out()

    module = make_module(training_step=step)
    module.automatic_optimization = False
    callback = OutOfMemoryReport(tmp_path, remedies=False)
    fail(make_trainer(callback), module)
    assert callback.report.phase == "forward pass"


@pytest.mark.parametrize(("method", "phase"), [("test", "test"), ("predict", "prediction")])
def test_evaluation_outside_fit_is_told_too(method, phase, tmp_path):
    module = make_module(**{f"{method}_step": run_out})
    callback = OutOfMemoryReport(tmp_path)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        getattr(make_trainer(callback), method)(
            module, loader(), verbose=False
        ) if method == "test" else getattr(make_trainer(callback), method)(module, loader())
    assert isinstance(callback.report, PostMortem)
    assert callback.report.phase == phase


@pytest.mark.parametrize("limit", [0, -1.0])
def test_a_time_limit_must_be_above_zero(limit):
    with pytest.raises(ValueError, match="`time_limit_s` must be above 0"):
        OutOfMemoryReport(time_limit_s=limit)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits address space")
def test_a_process_that_really_runs_out_tells_why(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "out_of_memory.py"
    command = [sys.executable, str(example), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stderr
    (path,) = tmp_path.iterdir()
    plain = json.loads(path.read_text())
    assert plain["phase"] in ("forward pass", "backward pass")
    assert "the largest so far, 100 % more elements" in plain["batch"]
    assert plain["capacity_bytes"] > 0
    assert plain["text"].splitlines()[0] in done.stderr
    assert "RuntimeError" in done.stderr
