import argparse

import pytest
import torch
from safetensors.torch import load_file

from lightning_memprec.cli import export


def run_export(capsys, *arguments):
    parser = argparse.ArgumentParser()
    export.add_parser(parser.add_subparsers())
    code = export.run(parser.parse_args(["export", *map(str, arguments)]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def checkpoint(tmp_path):
    tied = torch.ones(2, 2)
    state = {"model.a": tied, "model.b": tied, "loss.c": torch.zeros(1)}
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def test_weights_are_written_and_what_was_done_is_said(capsys, checkpoint, tmp_path):
    arguments = (checkpoint, tmp_path / "out", "--dtype", "bfloat16", "--strip-prefix", "model.")
    code, out, err = run_export(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        str(tmp_path / "out" / "model.safetensors"),
        "1 tensors, 8 B, weights",
        "tied, written once: b = a",
        "left out, without the prefix: loss.c",
    ]
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].dtype == torch.bfloat16
    code, _, err = run_export(capsys, *arguments)
    assert code == 2
    assert "exists. Pass `--overwrite`" in err
    assert run_export(capsys, *arguments, "--overwrite", "--max-shard-size", "1GiB")[0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--source", "averaged"], "take `--source current`"),
        (["--max-shard-size", "0"], "larger than 0 bytes"),
        (["--strip-prefix", "net."], "Correct `--strip-prefix`"),
    ],
)
def test_a_refusal_exits_with_2_and_writes_nothing(capsys, checkpoint, tmp_path, change, message):
    code, out, err = run_export(capsys, checkpoint, tmp_path / "out", *change)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("lightning-memprec export: error: ")
    assert not (tmp_path / "out").exists()


def test_a_missing_checkpoint_exits_with_2(capsys, tmp_path):
    assert run_export(capsys, tmp_path / "none.ckpt", tmp_path / "out")[0] == 2
