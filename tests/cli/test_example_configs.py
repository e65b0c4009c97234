"""The configurations in ``examples/cli`` do what their comments say."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_memprec import load_quantized
from lightning_memprec.cli._examples import EXAMPLES as EXAMPLES_OF
from lightning_memprec.cli.main import build_parser, main

EXAMPLES = Path(__file__).parents[2] / "examples" / "cli"
CONFIGS = sorted(EXAMPLES.glob("*.yaml"))
# Small, so that a trace takes a moment; the sizes are not what is tested.
SMALL = [
    "--model.init_args.hidden=64",
    "--model.init_args.heads=4",
    "--model.init_args.key_value_heads=4",
    "--model.init_args.intermediate=128",
    "--model.init_args.layers=2",
    "--data.init_args.length=32",
]
DEVICES = {"one_24gb_card": "RTX 4090", "fsdp_8x80gb": "H100-80GB", "half_with_masters": "V100-32GB"}


@pytest.fixture(autouse=True)
def _in_the_folder(monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))


def classes_of(config):
    return () if config["model"].get("class_path") else ("tiny.TinyClassifier", "tiny.TinyData")


def printed(monkeypatch, path, *arguments):
    """What a plain LightningCLI prints for a configuration."""
    from lightning.pytorch.cli import LightningCLI

    given = []
    if classes_of(yaml.safe_load(path.read_text())):
        from tiny import TinyClassifier, TinyData

        given = [TinyClassifier, TinyData]
    out = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
        monkeypatch.setattr(sys, "argv", ["train.py", "fit", "--config", str(path), *arguments])
        LightningCLI(*given)
    return out.getvalue()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:jsonargparse")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_plain_lightning_cli_reads_it_and_its_own_print(path, tmp_path, monkeypatch):
    dump = printed(monkeypatch, path, "--print_config")
    ours = [each.strip() for each in path.read_text().splitlines() if "class_path: lightning_memprec" in each]
    assert all(line.removeprefix("- ") in dump for line in ours)
    again = tmp_path / "again.yaml"
    again.write_text(dump)
    assert printed(monkeypatch, again, "--print_config") == dump


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_estimate_gives_a_verdict(path, capsys):
    config = yaml.safe_load(path.read_text())
    arguments = ["--device", DEVICES[path.stem]] if path.stem in DEVICES else ["--device-memory", "40GiB"]
    # Comments of files for `train.py` name its function.
    cli = ["--cli", "train:main"] if classes_of(config) else []
    overrides = SMALL if "language_model.LanguageModel" in path.read_text() else []
    code = main(
        ["estimate", "--config", path.name, *cli, *arguments, "--json", "--no-remedies", "--", *overrides]
    )
    report = json.loads(capsys.readouterr().out)
    assert (code, report["verdict"]["status"]) == (0, "fits")
    if "MasterWeightPrecision" in path.read_text():
        assert report["estimate"]["precision"] == "16-master"


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_blocks_that_fsdp_checkpoints_count_as_such(tmp_path, capsys):
    config = yaml.safe_load(Path("fsdp_8x80gb.yaml").read_text())
    options = config["trainer"]["strategy"]["init_args"]
    policy = options["activation_checkpointing_policy"]
    path, activations = tmp_path / "run.yaml", []
    for options["activation_checkpointing_policy"] in (policy, None):
        path.write_text(yaml.safe_dump(config))
        arguments = [
            "--device",
            "H100-80GB",
            "--json",
            "--no-remedies",
            "--",
            *SMALL,
            "--data.init_args.length=256",
        ]
        assert main(["estimate", "--config", str(path), *arguments]) == 0
        report = json.loads(capsys.readouterr().out)
        activations.append(report["estimate"]["breakdown"]["activations_bytes"])
    assert activations[0] < activations[1]


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("name", sorted(DEVICES))
def test_it_fits_the_cards_it_is_named_for(name, capsys):
    assert main(["estimate", "--config", f"{name}.yaml", "--device", DEVICES[name], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["status"] == "fits"


@pytest.mark.slow
def test_what_runs_on_any_machine_is_trained(tmp_path):
    """One process trains both, since a start of torch and Lightning costs more than the runs."""
    code = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train
for name in ("cpu", "int8_after_fit"):
    sys.argv = ["train.py", "fit", "--config", f"{EXAMPLES}/{{name}}.yaml", "--trainer.accelerator=cpu"]
    train.main()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "FITS" in done.stdout
    with next(tmp_path.glob("runs/cpu/*/metrics.csv")).open() as file:
        logged = set(next(csv.reader(file)))
    assert {key.split("/")[1] for key in logged if key.startswith("memprec/")} == {
        "preflight", "memory", "stagnation"
    }  # fmt: skip
    from tiny import TinyClassifier

    assert load_quantized(tmp_path / "runs" / "int8", TinyClassifier)


def test_the_command_runs_as_a_module():
    shown = subprocess.run(
        [sys.executable, "-m", "lightning_memprec", "--help"], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in EXAMPLES_OF)


@pytest.mark.parametrize("name", EXAMPLES_OF)
def test_every_subcommand_shows_examples_that_it_accepts(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for line in EXAMPLES_OF[name]:
        assert line in shown
        program, *arguments = shlex.split(line)
        assert program == "lightning-memprec"
        assert build_parser().parse_args(arguments).command == name
