from __future__ import annotations

import json
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from lightning_memprec.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples" / "cli"

PROGRAM = """
from {name}.cli import LightningCLI
from {name}.demos.boring_classes import BoringModel, BoringDataModule
import torch

class Model(BoringModel):
    def __init__(self, width: int = 3):
        super().__init__()
        self.wide = torch.nn.Linear(32, width)

    def training_step(self, batch, batch_idx):
        return self.wide(batch).sum() + self.layer(batch).sum()

class MyCLI(LightningCLI):
    def __init__(self):
        super().__init__(Model, BoringDataModule)

def with_commands():
    LightningCLI(Model, BoringDataModule)

def without_commands():
    LightningCLI(Model, BoringDataModule, run=False, seed_everything_default=1)

def nothing():
    pass

class Reads(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() else None
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
    """A folder with a program for each Lightning namespace."""
    (tmp_path / "prog.py").write_text(PROGRAM.format(name="lightning.pytorch"))
    (tmp_path / "old_prog.py").write_text(PROGRAM.format(name="pytorch_lightning"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("prog", "old_prog"):
        sys.modules.pop(name, None)


def estimate(capsys, config, *arguments):
    """Run the command on a configuration; return its exit code and its report."""
    Path("run.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    code = main(["estimate", "--config", "run.yaml", "--json", *arguments])
    out = capsys.readouterr().out
    return code, json.loads(out) if out.startswith("{") else out


# A Trainer with these arguments cannot be made here.
GPU = {"accelerator": "gpu", "devices": 8}


@pytest.mark.parametrize(
    "target", ["prog:MyCLI", "prog:with_commands", "prog:without_commands", "old_prog:MyCLI"]
)
def test_users_own_cli_is_parsed_and_no_trainer_is_made(program, capsys, target):
    config = {"trainer": {**GPU, "precision": "bf16-true"}, "model": {"width": 70}}
    code, report = estimate(capsys, config, "--cli", target, "--device", "A100-80GB")
    assert code == 0
    assert report["estimate"]["total_parameters"] == 32 * 70 + 70 + 32 * 2 + 2
    assert report["estimate"]["precision"] == "bf16-true"
    assert report["verdict"]["status"] == "fits"


@pytest.mark.parametrize("module", ["prog", "old_prog"])
def test_classes_named_in_the_file_or_on_the_command_line(program, capsys, module):
    named = {
        "model": {"class_path": f"{module}.Model", "init_args": {"width": 7}},
        "data": {"class_path": f"{module}.BoringDataModule"},
    }
    code, report = estimate(capsys, named, "--device-memory", "40GiB")
    assert code == 0
    assert report["estimate"]["total_parameters"] == 33 * 9
    arguments = [
        "--model",
        f"{module}.Model",
        "--data",
        f"{module}.BoringDataModule",
        "--device-memory",
        "40GiB",
    ]
    assert estimate(capsys, {"model": {"width": 7}}, *arguments)[1]["estimate"] == report["estimate"]


def test_file_with_subcommand_and_overrides(program, capsys):
    config = {"fit": {"trainer": GPU, "model": {"width": 5}}}
    arguments = ["--cli", "prog:MyCLI", "--device-memory", "1GiB", "--", "--trainer.precision=64-true"]
    code, report = estimate(capsys, config, *arguments)
    assert code == 0
    assert report["estimate"]["precision"] == "64-true"


@pytest.mark.parametrize(
    ("memory", "margin", "code", "status"),
    [("1GiB", "0.05", 0, "fits"), ("1KiB", "0.05", 3, "overflow"), ("1GiB", "0.999999", 4, "tight")],
)
def test_exit_codes_follow_the_verdict(program, capsys, memory, margin, code, status):
    arguments = ["--cli", "prog:MyCLI", "--device-memory", memory, "--safety-margin", margin, "--no-remedies"]
    found, report = estimate(capsys, {"trainer": {"accelerator": "cpu"}}, *arguments)
    assert (found, report["verdict"]["status"]) == (code, status)


def test_overflow_comes_with_remedies(program, capsys):
    config = {"model": {"width": 300}, "optimizer": {"class_path": "torch.optim.AdamW"}}
    # On CUDA a model this small fits the smallest segments of the allocator, whatever is changed.
    arguments = ["--cli", "prog:MyCLI", "--device", "cpu", "--device-memory", "1KiB"]
    code, report = estimate(capsys, config, *arguments)
    assert code == 3
    assert report["remedies"]
    assert all(r["saving_bytes"] > 0 for r in report["remedies"])


NARROW = {"model": {"width": 300}, "optimizer": {"class_path": "torch.optim.AdamW"}}
ON_1_KIB = ["--cli", "prog:MyCLI", "--device", "cpu", "--device-memory", "1KiB"]


@pytest.mark.extended
@pytest.mark.parametrize("number", [1, 2])
def test_lines_of_the_remedy_asked_for_compile(program, capsys, number):
    Path("run.yaml").write_text(yaml.safe_dump(NARROW))
    assert main(["estimate", "--config", "run.yaml", *ON_1_KIB, "--remedy", str(number)]) == 3
    heading, python = capsys.readouterr().out.split("in Python:\n")
    assert f"\nChange {number}, " in heading
    python = python.split("\nIn a file of its own")[0]
    compile(textwrap.dedent(python), "remedy", "exec")
    assert python.strip()


def test_a_remedy_beyond_the_list_is_bad_usage(program, capsys):
    code, err = main_with(capsys, NARROW, *ON_1_KIB, "--remedy", "99")
    assert code == 2
    assert "`--remedy 99` names no change: there are" in err
    code, err = main_with(capsys, NARROW, *ON_1_KIB, "--remedy", "1", "--no-remedies")
    assert code == 2
    assert "none was looked for or found" in err


def test_optimizer_of_the_configuration_replaces_the_modules(program, capsys):
    def states(config):
        arguments = ["--cli", "prog:MyCLI", "--device-memory", "1GiB"]
        report = estimate(capsys, {"trainer": {"accelerator": "cpu"}, **config}, *arguments)[1]
        return report["estimate"]["breakdown"]["optimizer_states_bytes"]

    assert states({}) == 0
    parameters = 33 * (3 + 2)
    # Two moments a parameter, and a 4-byte step count for each of the four tensors.
    assert states({"optimizer": {"class_path": "torch.optim.AdamW"}}) == 4 * (2 * parameters + 4)


@pytest.mark.parametrize("arguments", [None, {"precision": "16-master"}, {"low_memory": True}])
def test_plugin_with_masters_is_estimated_as_itself(program, capsys, arguments):
    # Wide enough that the step is the peak.
    plugin = {"class_path": "lightning_memprec.MasterWeightPrecision", "init_args": arguments or {}}
    config = {
        "model": {"width": 30000},
        "optimizer": {"class_path": "torch.optim.AdamW"},
        "trainer": {"accelerator": "cpu", "plugins": [plugin]},
    }
    options = ["--cli", "prog:MyCLI", "--device-memory", "1GiB", "--no-remedies"]
    found = estimate(capsys, config, *options)[1]["estimate"]
    assert found["precision"] == (arguments or {}).get("precision", "bf16-master")
    # Half weights, masters and two moments; the gradients of all but the chunk at work are in half.
    parameters, parts = 33 * 30002, found["breakdown"]
    assert parts["parameters_bytes"] == 2 * parameters
    assert parts["optimizer_states_bytes"] == pytest.approx(12 * parameters, rel=0.001)


def test_masters_in_chunks_need_less(program, capsys):
    def need(**arguments):
        plugin = {"class_path": "lightning_memprec.MasterWeightPrecision", "init_args": arguments}
        config = {"trainer": {"accelerator": "cpu", "plugins": plugin}, "model": {"width": 3000}}
        config["optimizer"] = {"class_path": "torch.optim.AdamW"}
        options = ["--cli", "prog:MyCLI", "--device-memory", "1GiB", "--no-remedies"]
        return estimate(capsys, config, *options)[1]["estimate"]["minimum_reserved_bytes"]

    assert need(step_in_backward=True) < need()


def test_undetermined_fails_closed(program, capsys):
    code, report = estimate(capsys, {}, "--cli", "prog:MyCLI")
    assert (code, report["verdict"]["status"]) == (5, "undetermined")
    assert "--device-memory" in report["verdict"]["reason"]
    reads = {"model": {"class_path": "prog.Reads"}, "data": {"class_path": "prog.BoringDataModule"}}
    code, report = estimate(capsys, reads, "--device-memory", "1GiB")
    assert (code, report["estimate"]) == (5, None)
    assert "prog.py" in report["verdict"]["reason"]


@pytest.mark.parametrize(
    ("strategy", "assumption"),
    [
        ("fsdp", ""),
        (
            {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"static_graph": True}},
            "ddp",
        ),
        (
            {
                "class_path": "lightning.pytorch.strategies.DeepSpeedStrategy",
                "init_args": {"stage": 3, "offload_optimizer": True},
            },
            "zero",
        ),
    ],
    ids=["name", "ddp", "deepspeed"],
)
def test_a_run_on_several_devices_is_judged_by_one_devices_share(program, capsys, strategy, assumption):
    settings = {"trainer": {"strategy": strategy, "devices": 2, "accelerator": "gpu"}}
    code, report = estimate(capsys, settings, "--cli", "prog:MyCLI", "--device-memory", "1KiB")
    assert code == 3
    assert any(assumption in note["name"] for note in report["estimate"]["assumptions"])


def test_a_strategy_that_is_not_followed_is_bad_usage(program, capsys):
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": "hpu_parallel"}}))
    assert main(["estimate", "--config", "run.yaml", "--cli", "prog:MyCLI"]) == 2
    assert "`trainer.strategy` 'hpu_parallel' is not followed" in capsys.readouterr().err


def test_settings_of_a_preflight_in_the_configuration_count(program, capsys):
    preflight = {
        "class_path": "lightning_memprec.MemoryPreflight",
        "init_args": {"device": "T4-16GB", "safety_margin": 0.25, "batch_spec": "float32[5, 32]"},
    }
    config = {"trainer": {"callbacks": [preflight]}}
    code, report = estimate(capsys, config, "--cli", "prog:MyCLI")
    assert code == 0
    assert report["estimate"]["device"] == "T4-16GB"
    assert report["verdict"]["safety_margin"] == 0.25


def test_described_batch_needs_no_data(program, capsys):
    config = {"model": {"class_path": "prog.Model"}}
    arguments = ["--device-memory", "1GiB", "--batch-spec", "float32[16, 32]"]
    code, report = estimate(capsys, config, *arguments)
    assert code == 0
    assert report["estimate"]["breakdown"]["inputs_bytes"] == 16 * 32 * 4


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ("- 1", [], "holds no settings"),
        ("a: [", [], "Cannot read the configuration"),
        ({}, ["--cli", "prog:Missing"], "prog.Missing"),
        ({}, ["--cli", "prog:nothing"], "made no LightningCLI"),
        ({"model": {"class_path": "nowhere.Model"}}, [], "nowhere.Model"),
        ({"model": {"height": 3}}, ["--cli", "prog:MyCLI"], "does not fit this LightningCLI"),
        ({}, ["--cli", "prog:MyCLI", "--device", "H900"], "H900"),
        ({}, ["--cli", "prog:MyCLI", "--device-memory", "24 gigs"], "24 gigs"),
        ({}, ["--cli", "prog:MyCLI", "--safety-margin", "2"], "`--safety-margin` must lie"),
        ({}, ["--cli", "prog:MyCLI", "--batch-spec", "floaty[2]"], "in `--batch-spec`"),
        ({}, ["--cli", "prog:MyCLI", "--batch-spec", "floaty[2]"], "floaty"),
    ],
)
def test_bad_usage_exits_with_2_and_says_why(program, capsys, config, arguments, message):
    Path("run.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    assert main(["estimate", "--config", "run.yaml", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "arguments", "section"),
    [
        ({}, [], "model"),
        ({"trainer": GPU, "model": {"width": 3}}, [], "model"),
        ({"fit": {"model": {"width": 3}}}, [], "model"),
        ({"model": {"class_path": "prog.Model"}, "data": {"size": 3}}, [], "data"),
        ({"model": {"width": 3}, "data": {"size": 3}}, ["--model", "prog.Model"], "data"),
    ],
    ids=["empty", "model", "fit", "data", "model-given"],
)
def test_a_configuration_without_classes_asks_for_the_program(program, capsys, config, arguments, section):
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert main(["estimate", "--config", "run.yaml", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert f"does not name the class of `{section}`" in lines[0]
    assert lines[1] == "Add `--cli MODULE:FUNCTION`, or `--model CLASS --data CLASS`."


def test_a_class_among_the_overrides_is_enough(program, capsys):
    arguments = ["--batch-spec", "float32[2, 32]", "--device-memory", "1GiB", "--", "--model=prog.Model"]
    assert estimate(capsys, {"trainer": GPU}, *arguments)[0] == 0


@pytest.mark.parametrize(
    ("config", "overrides", "words"),
    [
        ({"model": {"height": 3}}, [], "model.height"),
        ({"trainer": {"max_epochs": "many"}}, [], "trainer.max_epochs"),
        ({}, ["--", "--trainer.bogus=1"], "--trainer.bogus"),
    ],
    ids=["model", "value", "override"],
)
def test_what_does_not_fit_is_said_without_the_usage(program, capsys, config, overrides, words):
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert main(["estimate", "--config", "run.yaml", "--cli", "prog:MyCLI", *overrides]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "usage:" not in err


def test_missing_file(program, capsys):
    assert main(["estimate", "--config", "absent.yaml"]) == 2
    assert "absent.yaml" in capsys.readouterr().err


def test_missing_jsonargparse_names_the_extra(program, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    Path("run.yaml").write_text("model: {}")
    assert main(["estimate", "--config", "run.yaml"]) == 2
    assert "lightning-memprec[cli]" in capsys.readouterr().err


def test_examples(capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    code = main(["estimate", "--config", "eight_gpus.yaml", "--device", "A100-80GB"])
    out = capsys.readouterr().out
    assert code == 0
    assert "1.61B parameters, bf16-mixed on A100-80GB" in out
    assert "FITS" in out
    code = main(["estimate", "--config", "run.yaml", "--cli", "train:main", "--device-memory", "2MiB"])
    out = capsys.readouterr().out
    assert code == 3
    assert "DOES NOT FIT" in out
    assert "What would help" in out
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    ("trainer", "buckets"),
    [
        ({"devices": 8}, True),  # "auto" is DDP then.
        ({"devices": 8, "strategy": "ddp"}, True),
        ({"devices": "auto", "strategy": "ddp"}, True),
        ({"devices": -1}, True),
        ({"devices": 1}, False),
        ({"devices": "auto"}, False),
    ],
)
def test_ddp_buckets_are_counted_wherever_ddp_would_run(program, capsys, trainer, buckets):
    config = {"trainer": {"accelerator": "gpu", **trainer}}
    _, report = estimate(capsys, config, "--cli", "prog:MyCLI", "--device", "T4")
    assert ("ddp_buckets" in {a["name"] for a in report["estimate"]["assumptions"]}) == buckets


def test_a_batch_spec_needs_no_quotes_inside(program, capsys):
    plain = "[float32[6, 8], int64[6] = 1]"
    config = {"trainer": {"accelerator": "cpu"}}
    reports = [
        estimate(capsys, config, "--cli", "prog:MyCLI", "--batch-spec", spec)[1]
        for spec in (plain, "['float32[6, 8]', 'int64[6] = 1']")
    ]
    assert reports[0]["estimate"] == reports[1]["estimate"]


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"accumulate_grad_batches": 0}, "at least 1"),
        ({"devices": 0}, "devices"),
        ({"devices": -3}, "devices"),
    ],
)
def test_counts_that_no_trainer_takes_are_bad_usage(program, capsys, trainer, words):
    code = main_with(capsys, {"trainer": {"accelerator": "gpu", **trainer}}, "--cli", "prog:MyCLI")
    assert code[0] == 2
    assert words in code[1]


@pytest.mark.parametrize(
    "spec", ["float32[99999999999999999999, 6]", "float32[9999999, 99999] = 1", "uint8[8, 6] = 300"]
)
def test_batches_that_no_machine_holds_are_bad_usage(program, capsys, spec):
    code, err = main_with(
        capsys, {"trainer": {"accelerator": "cpu"}}, "--cli", "prog:MyCLI", "--batch-spec", spec
    )
    assert code == 2
    assert "`--batch-spec`" in err


def test_a_file_without_settings_under_fit_is_bad_usage(program, capsys):
    code, err = main_with(capsys, "fit: 3", "--cli", "prog:MyCLI")
    assert code == 2
    assert "fit" in err


def main_with(capsys, config, *arguments):
    Path("run.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    code = main(["estimate", "--config", "run.yaml", *arguments])
    return code, capsys.readouterr().err


SEQUENCES = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

class Texts(pl.LightningDataModule):
    def __init__(self, validation: bool = True):
        super().__init__()
        self.validation = validation

    def train_dataloader(self):
        return DataLoader([torch.rand(length, 32) for length in (3, 90, 5)], batch_size=None)

    def val_dataloader(self):
        if not self.validation:
            raise OSError("no such disk")
        return DataLoader([torch.rand(5000, 32)] * 4, batch_size=None)

class Plain(pl.LightningDataModule):
    train_dataloader = Texts.train_dataloader

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 64)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""


@pytest.fixture
def sequences(tmp_path, monkeypatch):
    (tmp_path / "sequences.py").write_text(SEQUENCES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda data="Texts", **trainer: {
        "model": {"class_path": "sequences.Model"},
        "data": data if isinstance(data, dict) else {"class_path": f"sequences.{data}"},
        "trainer": {"accelerator": "cpu", **trainer},
    }
    sys.modules.pop("sequences", None)


def phases_of(report):
    return {phase["name"]: phase["peak_allocated_bytes"] for phase in report["estimate"]["phases"]}


def test_validation_loader_is_read_and_judged(sequences, capsys):
    code, report = estimate(capsys, sequences(), "--device-memory", "1MiB", "--no-remedies")
    assert code == 3
    assert report["estimate"]["peak_phase"]["name"] == "validation"
    assert phases_of(report)["validation"] > 5000 * 64 * 4
    assert "sanity_validation" in phases_of(report)
    assert report["estimate"]["host"]["weights_only_bytes"] > 4 * 33 * 64


@pytest.mark.parametrize(
    ("data", "trainer", "phases"),
    [
        ("Texts", {"limit_val_batches": 0}, set()),
        ("Texts", {"num_sanity_val_steps": 0}, {"validation"}),
        ("Plain", {}, set()),
        ({"class_path": "sequences.Texts", "init_args": {"validation": False}}, {}, set()),
    ],
    ids=["no batches", "no sanity check", "no loader", "loader that fails"],
)
def test_validation_follows_the_trainers_settings(sequences, capsys, data, trainer, phases):
    code, report = estimate(capsys, sequences(data, **trainer), "--device-memory", "1GiB")
    assert code == 0
    assert {"validation", "sanity_validation"} & set(phases_of(report)) == phases
    assert any("no such disk" in note for note in report["notes"]) == isinstance(data, dict)


@pytest.mark.parametrize(
    ("arguments", "callback", "words"),
    [
        ((), None, "the largest of the first 3 batches (index 1) of the train loader"),
        (("--sample-batches", "1"), None, "the first batch of the train loader"),
        ((), 1, "the first batch of the train loader"),
        (("--sample-batches", "2"), 1, "the largest of the first 2 batches (index 1) of the train loader"),
    ],
)
def test_largest_of_the_first_batches_is_judged(sequences, capsys, arguments, callback, words):
    preflight = {
        "class_path": "lightning_memprec.MemoryPreflight",
        "init_args": {"sample_batches": callback},
    }
    config = sequences(**({} if callback is None else {"callbacks": [preflight]}))
    _, report = estimate(capsys, config, "--device-memory", "1GiB", *arguments)
    assert f"Judged by {words}." in report["notes"]


def test_bad_number_of_batches_is_bad_usage(sequences, capsys):
    code, _ = estimate(capsys, sequences(), "--device-memory", "1GiB", "--sample-batches", "0")
    assert code == 2
