from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lightning_memprec._devices import find_device
from lightning_memprec.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples" / "cli"
SPEC = ["--batch-spec", "[float32[64, 64], int64[64]]"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return shutil.copy(EXAMPLES / "eight_gpus.yaml", tmp_path / "run.yaml")


def plan(capsys, *arguments):
    code = main(["plan", *map(str, arguments)])
    return code, capsys.readouterr()


def small(*more):
    return [
        "--",
        "--model.init_args.width=512",
        "--model.init_args.layers=2",
        "--trainer.strategy=auto",
        *more,
    ]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
class TestTable:
    def test_cells_agree_with_the_estimate(self, config, capsys):
        arguments = ["--config", config, "--devices", "80GiB,A100-40GB", "--batch", "64,128", "--json", *SPEC]
        code, streams = plan(capsys, *arguments, "--recipes", "as-is,32-true", *small())
        report = json.loads(streams.out)
        assert code == 0
        sizes = [device["capacity_bytes"] for device in report["devices"]]
        assert sizes == [80 * 2**30, find_device("A100-40GB").memory_bytes]
        cells = report["devices"][1]["cells"]
        assert [(cell["recipe"], cell["batch"]) for cell in cells] == [
            ("as-is", 64), ("as-is", 128), ("32-true", 64), ("32-true", 128)
        ]  # fmt: skip
        estimate = ["estimate", "--config", str(config), "--device", "A100-40GB", "--json", *SPEC]
        assert main([*estimate, *small("--trainer.devices=1", "--trainer.precision=32-true")]) == 0
        need = json.loads(capsys.readouterr().out)["estimate"]["minimum_device_bytes"]
        assert cells[2]["need_bytes"] == need

    def test_table_says_what_fits_and_how_few_devices_are_enough(self, config, capsys):
        arguments = [
            "--config",
            config,
            "--devices",
            "20MiB,80GiB",
            "--num-devices",
            "1,2",
            "--strategy",
            "ddp",
            *SPEC,
        ]
        code, streams = plan(capsys, *arguments, *small())
        assert code == 0
        lines = [line.split() for line in streams.out.splitlines()]
        assert lines[1][:3] == ["as-is", "1", "64"]
        assert lines[1][-2:] == ["no", "fits"]
        fewest = next(line for line in streams.out.splitlines()[4:] if line.startswith("as-is"))
        assert fewest.split() == ["as-is", "64", "none", "tried", "1"]
        assert "share the run by `ddp`" in streams.out

    def test_nothing_fits(self, config, capsys):
        code, streams = plan(capsys, "--config", config, "--devices", "1MiB", *SPEC, *small())
        assert code == 3
        assert " no" in streams.out

    def test_a_recipe_that_does_not_apply_is_named(self, config, capsys):
        arguments = ["--config", config, "--devices", "80GiB", "--recipes", "as-is+checkpointing", *SPEC]
        code, streams = plan(capsys, *arguments, *small())
        assert code == 5
        assert "as-is+checkpointing: `checkpointing` does not apply to this run." in streams.out

    def test_picture_is_drawn(self, config, capsys, tmp_path):
        pytest.importorskip("matplotlib")
        picture = tmp_path / "new" / "plan.png"
        arguments = ["--config", config, "--devices", "80GiB", "--batch", "8,8", "--plot", picture, *SPEC]
        code, streams = plan(capsys, *arguments, *small())
        assert code == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert list(picture.parent.iterdir()) == [picture]
        assert streams.out.count("as-is") == 1  # What is named twice is traced once.

    def test_a_batch_beyond_any_tensor_is_refused_and_the_rest_planned(self, config, capsys):
        arguments = ["--config", config, "--devices", "80GiB", "--batch", f"8,{2**62}", *SPEC]
        code, streams = plan(capsys, *arguments, *small())
        assert code == 0
        assert "? as-is: Storage size calculation overflowed" in streams.out


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "H1000"], "H1000"),
        (["--devices", "80GiB", "--recipes", "as-is+magic"], "Unknown option 'magic'"),
        (["--devices", "80GiB", "--strategy", "fdsp"], "Unknown strategy 'fdsp'"),
        (["--devices", "80GiB", "--batch", "0"], "`--batch` must be at least 1 and below 2^63, got 0"),
        (["--devices", "80GiB", "--sequence", "128", *SPEC], "to vary. Leave `--sequence` out"),
        (["--devices", "80GiB", "--batch", str(2**63)], "`--batch` must be at least 1 and below 2^63"),
        (["--devices", "80GiB", "--num-devices", "0"], "`--num-devices` must be at least 1"),
        (
            ["--devices", "80GiB", "--plot", "plan.foo"],
            "'plan.foo' names no format of pictures. End it in one of: ",
        ),
        (["--devices", "80GiB", "--plot", "plan"], "'plan' names no format of pictures"),
        (["--devices", "80GiB", "--plot", "eight_gpus.yaml/plan.png"], "eight_gpus.yaml"),
        (["--devices", "80GiB", "--safety-margin", "1.5"], "`--safety-margin` must lie in [0, 1), got 1.5"),
    ],
)
def test_bad_usage(config, capsys, arguments, message):
    code, streams = plan(capsys, "--config", config, *arguments, *small())
    assert code == 2
    assert streams.err.startswith("lightning-memprec plan: error: ")
    assert message in streams.err


@pytest.mark.parametrize("arguments", [["--batch", "a"], ["--devices", ","]])
def test_lists_that_cannot_be_read_are_refused_by_the_parser(config, capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        plan(capsys, "--config", config, "--devices", "80GiB", *arguments)
    assert caught.value.code == 2
    assert "argument --" in capsys.readouterr().err
