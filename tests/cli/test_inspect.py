import argparse
import json
import subprocess
import sys

import torch

from lightning_memprec import quantize_
from lightning_memprec.cli import inspect


def run_inspect(capsys, *arguments):
    parser = argparse.ArgumentParser()
    inspect.add_parser(parser.add_subparsers())
    code = inspect.run(parser.parse_args(["inspect", *map(str, arguments)]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def save(path):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(300))
    contents = {
        "state_dict": {"w": torch.zeros(300).bfloat16().float() + 1},
        "current_model_state": {"w": parameter.detach()},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(300)}}}],
        "Plugin": {"scale": 2048.0, "_growth_tracker": 7},
        "epoch": 1,
        "global_step": 20,
        "pytorch-lightning_version": "2.6.6",
    }
    torch.save(contents, path)


def test_text(capsys, tmp_path):
    path = tmp_path / "last.ckpt"
    save(path)
    code, out, err = run_inspect(capsys, path)
    assert (code, err) == (0, "")
    assert out == (
        f"{path}: lightning, Lightning 2.6.6, epoch 1, step 20\n"
        "\n"
        "                        tensors        elements          size\n"
        "weights   float32             1             300      1.17 KiB\n"
        "optimizer float32             1             300      1.17 KiB\n"
        "FP32 weights that are bfloat16 values: 100.00%\n"
        "scaler Plugin: scale 2048, growth tracker 7\n"
        "averaged weights: present, shown here\n"
        "\n"
        "FP32 in name only: every weight is a bfloat16 value.\n"
    )
    out = run_inspect(capsys, path, "--source", "current")[1]
    assert out.endswith("averaged weights: present, not shown here\n\nHolds FP32 master weights.\n")


def test_a_quantized_model_is_not_said_to_hold_masters(capsys, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 300))
    quantize_(model)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    out = run_inspect(capsys, tmp_path / "x.pt")[1]
    assert out.endswith(
        "Quantized: 1 weight is stored as integers with scales, not as FP32 master weights.\n"
    )
    assert "FP32 weights that are" not in out


def test_the_dtype_that_decides_is_shown(capsys, tmp_path):
    torch.manual_seed(0)
    torch.save({"w": torch.randn(300).half().float()}, tmp_path / "x.pt")
    out = run_inspect(capsys, tmp_path / "x.pt")[1]
    assert "FP32 weights that are float16 values: 100.00%\n" in out
    assert "every weight is a float16 value." in out
    assert "bfloat16" not in out


def test_json(capsys, tmp_path):
    save(tmp_path / "last.ckpt")
    code, out, _ = run_inspect(capsys, tmp_path / "last.ckpt", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["weights"]["float32"]["size_bytes"] == 1200
    assert found["scalers"]["Plugin"]["scale"] == 2048


def test_an_unreadable_file_exits_with_2(capsys, tmp_path):
    (tmp_path / "x.ckpt").write_text("print('no checkpoint')")
    code, out, err = run_inspect(capsys, tmp_path / "x.ckpt")
    assert (code, out) == (2, "")
    assert err.startswith("lightning-memprec inspect: error: ")
    assert "x.ckpt' is not a checkpoint" in err
    assert run_inspect(capsys, tmp_path / "none.ckpt")[0] == 2


def test_parsers_come_without_torch():
    code = (
        "import argparse, sys; from lightning_memprec.cli import export, inspect\n"
        "s = argparse.ArgumentParser().add_subparsers(); export.add_parser(s); inspect.add_parser(s)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
