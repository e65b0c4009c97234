from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml

from lightning_memprec.cli import estimate, precision
from lightning_memprec.scaling.short_run import MODES

EXAMPLES = Path(__file__).parents[2] / "examples" / "cli"

PROGRAM = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel, BoringDataModule
import torch

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        print("user text")
        loss = (self.layer(batch) ** 2).mean()
        self.log("loss", loss)
        return loss

class Asks(Model):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1 / self.trainer.max_epochs)

class Reads(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() else None

class Manual(Model):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()

class Shifted(BoringDataModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch * 0 + 3

class Two(BoringDataModule):
    def train_dataloader(self):
        return [super(Two, self).train_dataloader()] * 2

class Own(Model):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 32), batch_size=2)
"""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        # Lightning 2.6 calls jsonargparse 4.49+ by deprecated names.
        monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
        yield


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "prog.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("prog", None)


def main(*arguments):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command")
    for command in (precision, estimate):
        command.add_parser(commands)
    args = parser.parse_args(arguments)
    return {"precision": precision, "estimate": estimate}[args.command].run(args)


def report(capsys, *arguments):
    code = main("precision", "--json", *arguments)
    return code, json.loads(capsys.readouterr().out)


def config(model, data="prog.BoringDataModule", **trainer):
    content = {"trainer": {"accelerator": "cpu", **trainer}, "model": {"class_path": model}}
    if data:
        content["data"] = {"class_path": data}
    Path("run.yaml").write_text(yaml.safe_dump(content))
    return "--config", "run.yaml"


@pytest.mark.parametrize(("device", "name"), [("T4", "16-mixed"), ("NVIDIA A100-SXM4-80GB", "bf16-mixed")])
def test_a_named_card_needs_no_model(capsys, device, name):
    code, found = report(capsys, "--device", device)
    assert (code, found["choice"]["precision"]) == (0, name)
    assert (found["memory_bytes"], found["comparison"]) == ({}, None)
    assert main("precision", "--device", device) == 0
    assert f"precision={name!r}" in capsys.readouterr().out


def test_this_machine(capsys):
    from lightning_memprec.scaling.choose import choose_precision

    assert report(capsys)[1]["choice"] == json.loads(json.dumps(choose_precision().to_dict()))


def test_memory_of_each_precision_is_that_of_the_estimate(program, capsys):
    arguments = config("prog.Model")
    code, found = report(capsys, *arguments, "--device", "T4-16GB")
    assert code == 0
    assert list(found["memory_bytes"]) == list(MODES)
    for name in ("32-true", "16-mixed"):
        main("estimate", "--json", *arguments, "--device", "T4-16GB", "--", f"--trainer.precision={name}")
        alone = json.loads(capsys.readouterr().out)["estimate"]["minimum_device_bytes"]
        assert found["memory_bytes"][name] == alone
    assert main("precision", *arguments, "--device", "T4-16GB") == 0
    out = capsys.readouterr().out
    assert "Memory of this run on T4-16GB" in out
    assert "user text" not in out
    assert "optimizer states take" in out  # the answer about memory quotes the figures


@pytest.mark.parametrize("accelerator", ["gpu", "cuda", "tpu"])
def test_a_run_on_an_accelerator_is_not_judged_by_a_machine_without(
    program, capsys, monkeypatch, accelerator
):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: None)
    arguments = config("prog.Model", accelerator=accelerator)
    assert main("precision", *arguments) == 2
    err = capsys.readouterr().err
    assert f"`accelerator: {accelerator}`" in err
    assert "`--device A100-80GB`" in err
    code, found = report(capsys, *arguments, "--device", "A100-80GB")
    assert (code, found["choice"]["precision"]) == (0, "bf16-mixed")


def test_the_device_of_the_runs_preflight_is_taken(program, capsys):
    preflight = {"class_path": "lightning_memprec.MemoryPreflight", "init_args": {"device": "V100-32GB"}}
    arguments = config("prog.Model", accelerator="gpu", callbacks=[preflight])
    assert report(capsys, *arguments)[1]["choice"]["capabilities"]["device"] == "V100-32GB"
    found = report(capsys, *arguments, "--device", "A100-80GB")[1]
    assert found["choice"]["capabilities"]["device"] == "A100-80GB"


def test_comparison_on_the_runs_own_data(program, capsys):
    code, found = report(capsys, *config("prog.Model"), "--compare", "--steps", "3")
    assert code == 0
    assert [r["precision"] for r in found["comparison"]["results"]] == list(MODES)
    assert all(len(r["losses"]) == 3 for r in found["comparison"]["results"])
    assert main("precision", *config("prog.Model"), "--compare", "--steps", "1") == 0
    out = capsys.readouterr().out
    assert "Recommended:" in out
    assert "memory" in out


def test_transfer_hooks_and_clipping_act_in_the_comparison(program, capsys):
    def losses(*arguments):
        found = report(capsys, *arguments, "--compare", "--steps", "2")[1]
        return found["comparison"]["results"][0]["losses"]

    plain = losses(*config("prog.Model", "prog.Shifted"))
    clipped = losses(*config("prog.Model", "prog.Shifted", gradient_clip_val=1e-6))
    assert plain == pytest.approx(losses(*config("prog.Model", "prog.Shifted")))  # the batch is constant
    assert clipped[0] == plain[0]
    assert clipped[1] == pytest.approx(clipped[0], rel=1e-3)  # hardly moved
    assert plain[1] != pytest.approx(plain[0], rel=1e-1)


def test_a_model_that_asks_its_trainer(program, capsys):
    code, found = report(capsys, *config("prog.Asks", max_epochs=7), "--compare", "--steps", "1")
    assert (code, found["faults"]) == (0, [])


def test_a_model_with_its_own_loader(program, capsys):
    code, found = report(capsys, *config("prog.Own", data=None), "--compare", "--steps", "2")
    assert (code, found["faults"]) == (0, [])


@pytest.mark.parametrize(
    ("model", "data", "words", "memory", "compared"),
    [
        ("prog.Reads", "prog.BoringDataModule", "prog.py", False, True),
        ("prog.Manual", "prog.BoringDataModule", "automatic optimization", True, False),
        ("prog.Model", "prog.Two", "several", False, False),
    ],
    ids=["reads-a-value", "manual", "two-loaders"],
)
def test_what_cannot_be_shown_is_named(program, capsys, model, data, words, memory, compared):
    code, found = report(capsys, *config(model, data), "--compare", "--steps", "1", "--device", "A100-80GB")
    assert code == 5
    assert found["choice"]["precision"] == "bf16-mixed"
    assert words in " ".join(found["faults"])
    assert bool(found["memory_bytes"]) == memory
    assert bool(found["comparison"]) == compared
    assert main("precision", *config(model, data), "--compare", "--steps", "1") == 5
    assert "Not shown:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "H900"], "H900"),
        (["--device", "RTX 9999"], "or choose on the machine that has the card."),
        (["--compare"], "--config"),
        (["--config", "absent.yaml"], "absent.yaml"),
        (["--config", "absent.yaml", "--steps", "0"], "--steps"),
    ],
)
def test_bad_usage_exits_with_2_and_says_why(capsys, arguments, words):
    assert main("precision", *arguments) == 2
    assert words in capsys.readouterr().err


def test_help_answers_without_torch():
    code = """
import argparse, sys
from lightning_memprec.cli import precision
parser = argparse.ArgumentParser()
precision.add_parser(parser.add_subparsers())
try:
    parser.parse_args(["precision", "--help"])
except SystemExit:
    pass
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "exit codes" in done.stdout


def test_example(capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    code, found = report(capsys, "--config", "run.yaml", "--cli", "train:main", "--device", "V100-32GB")
    assert (code, found["choice"]["precision"]) == (0, "16-mixed")
    assert set(found["memory_bytes"]) == set(MODES)
