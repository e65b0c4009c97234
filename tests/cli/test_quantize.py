from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from lightning_memprec.cli import quantize
from lightning_memprec.quantization.checkpoint import load_quantized, save_quantized
from lightning_memprec.quantization.convert import quantize_

from .quantize_models import NotOnMeta, Small

MODELS = f"{__package__}.quantize_models" if __package__ else "quantize_models"
TOKENS = torch.arange(12)


@pytest.fixture(autouse=True)
def _models_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def command(capsys, *arguments):
    parser = argparse.ArgumentParser()
    quantize.add_parser(parser.add_subparsers())
    code = quantize.run(parser.parse_args(["quantize", *map(str, arguments)]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def small(width=8, kind=Small, **options):
    torch.manual_seed(0)
    return kind(width=width, **options) if kind is Small else kind()


def write(kind, folder, module):
    """Write the weights as one kind of checkpoint; return its path."""
    state = module.state_dict()
    path = folder / "source"
    if kind == "ckpt":
        path = folder / "last.ckpt"
        torch.save({"state_dict": state, "hyper_parameters": {"width": 8}, "optimizer_states": []}, path)
    elif kind == "file":
        path = folder / "source.safetensors"
        save_model(module, str(path))
    elif kind == "shards":
        path.mkdir()
        names = [name for name in state if name != "head.weight"]
        index = {}
        for number, part in enumerate((names[:2], names[2:])):
            save_file({name: state[name] for name in part}, path / f"model-{number}.safetensors")
            index |= dict.fromkeys(part, f"model-{number}.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        from torch.distributed.checkpoint import save

        save({"state_dict": state}, checkpoint_id=str(path), no_dist=True)
    return path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:.*_get_pg_default_device.*")
@pytest.mark.parametrize("kind", ["ckpt", "file", "shards", "distributed"])
@pytest.mark.parametrize("bits", [8, 4], ids=lambda bits: f"{bits} bits")
@pytest.mark.parametrize("out", ["int8", "int8.safetensors"])
def test_files_are_those_of_the_model_quantized_in_memory(capsys, tmp_path, kind, out, bits):
    module = small()
    source = write(kind, tmp_path, module)
    width = [] if bits == 8 else ["--bits", bits]
    code, text, _ = command(capsys, source, "--model", "quantize_models:Small", "-o", tmp_path / out, *width)
    assert code == 0
    quantize_(module, bits=bits)
    save_quantized(module, tmp_path / f"expected_{out}")
    for path in ("model.safetensors", "config.json") if out == "int8" else ("",):
        ours, expected = tmp_path / out / path, tmp_path / f"expected_{out}" / path
        if path == "config.json":
            assert json.loads(ours.read_text()) == json.loads(expected.read_text())
            continue
        a, b = load_file(ours), load_file(expected)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    again = load_quantized(tmp_path / out, Small)
    assert torch.equal(again(TOKENS), module(TOKENS))
    assert text.splitlines()[1].startswith(f"3 layers in {'int8' if bits == 8 else '4 bits'}, ")
    packed = "" if bits == 8 else "_packed"
    assert text.splitlines()[2].startswith(
        f"tied, written once: head.weight{packed} = embedding.weight{packed}"
    )


def test_options(capsys, tmp_path):
    module = nn.Module()
    module.net = small(width=6)
    torch.save({"state_dict": module.state_dict()}, tmp_path / "last.ckpt")
    arguments = [
        tmp_path / "last.ckpt",
        "--model",
        "quantize_models:Small",
        "-o",
        tmp_path / "out.safetensors",
    ]
    arguments += ["--model-args", '{"width": 6}', "--strip-prefix", "net.", "--method", "vectorwise"]
    arguments += ["--group-size", 3, "--exclude", "head"]
    code, text, _ = command(capsys, *arguments)
    assert code == 0
    assert "left in floating point: embedding (tied to `head.weight`" in text
    again = load_quantized(tmp_path / "out.safetensors", lambda: Small(width=6))
    quantize_(module.net, "vectorwise", group_size=3, exclude=["head"])
    assert torch.equal(again(TOKENS), module.net(TOKENS))
    code, _, err = command(capsys, *arguments)
    assert code == 2
    assert "exists. Pass --overwrite" in err
    assert command(capsys, *arguments, "--overwrite")[0] == 0


def test_a_model_that_cannot_be_built_on_meta_takes_memory(capsys, tmp_path):
    module = small(kind=NotOnMeta)
    source = write("ckpt", tmp_path, module)
    code, _, err = command(capsys, source, "--model", "quantize_models:NotOnMeta", "-o", tmp_path / "out")
    assert code == 0
    assert "cannot be built on the meta device" in err
    quantize_(module)
    assert torch.equal(load_quantized(tmp_path / "out", NotOnMeta)(TOKENS), module(TOKENS))


def test_bitsandbytes_keys(capsys, tmp_path):
    module = small()
    source = write("ckpt", tmp_path, module)
    out = tmp_path / "out"
    code, _, _ = command(
        capsys, source, "--model", "quantize_models:Small", "-o", out, "--format", "bitsandbytes"
    )
    assert code == 0
    quantize_(module, include=["Linear"])
    save_quantized(module, tmp_path / "expected", format="bitsandbytes")
    a, b = load_file(out / "model.safetensors"), load_file(tmp_path / "expected" / "model.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert (out / "config.json").read_text() == (tmp_path / "expected" / "config.json").read_text()
    assert load_quantized(out, Small)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "quantize_models:Nothing"], "Write it as package.module:Class"),
        (["--model", "quantize_models:TOKENS_"], "Cannot import"),
        (["--model", "quantize_models:torch"], "is no class and no function"),
        (["--model-args", "[1]"], "must be a JSON object"),
        (["--model-args", "{"], "Expecting property name"),
        (["--model-args", '{"widht": 4}'], "unexpected keyword argument 'widht'"),
        (["--model-args", '{"width": 4}'], "in the shape"),
        (["-o", "x.ckpt"], "Give a folder"),
        (["--strip-prefix", "net."], "tensors are missing"),
        (["--include", "nothing"], "'nothing' matches no module"),
        (["--exclude", "*"], "has no int8 layers"),
        (["--format", "bitsandbytes", "--include", "*"], "bitsandbytes cannot hold"),
        (["--format", "bitsandbytes", "--bits", "4"], "it knows linear layers of 8 bits"),
        (["--bits", "9"], "`--bits` must be an integer from 2 to 8, got 9"),
        (["--source", "averaged"], "holds no averaged weights"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_refusal_exits_with_2_and_writes_nothing(capsys, tmp_path, change, message):
    source = write("ckpt", tmp_path, small())
    out = tmp_path / "out"
    code, text, err = command(capsys, source, "--model", "quantize_models:Small", "-o", out, *change)
    assert (code, text) == (2, "")
    assert message in err
    assert not out.exists()


def test_a_weight_that_cannot_be_quantized_leaves_the_old_file(capsys, tmp_path):
    module = small()
    arguments = [write("ckpt", tmp_path, module), "--model", "quantize_models:Small", "-o", tmp_path / "out"]
    assert command(capsys, *arguments)[0] == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    module.body[0].weight.data[0, 0] = float("nan")
    write("ckpt", tmp_path, module)
    code, _, err = command(capsys, *arguments, "--overwrite")
    assert code == 2
    assert "`body.0.weight` cannot be quantized" in err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_help_imports_no_torch():
    code = "import sys; from lightning_memprec.cli import quantize; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_choices_are_those_of_the_library():
    from typing import get_args

    from lightning_memprec._files.checkpoint_files import Source
    from lightning_memprec.quantization.checkpoint import Format
    from lightning_memprec.quantization.methods import method_names, resolve

    assert get_args(Format) == quantize.FORMATS
    assert get_args(Source) == quantize.SOURCES
    without_data = [n for n in method_names() if resolve(n, {}).solver is None]
    assert set(quantize.METHODS) == set(without_data)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(("kind", "method"), [("ckpt", "weight_only"), ("safetensors", "absmax")])
def test_memory_stays_near_the_largest_tensor(tmp_path, kind, method):
    source = tmp_path / f"wide.{kind}"
    # 6 layers of 36 MiB: 216 MiB.
    state = {}
    for index in range(6):
        state[f"layers.{index}.weight"] = torch.full((3072, 3072), 0.01 * (index + 1))
        state[f"layers.{index}.bias"] = torch.zeros(3072)
    if kind == "ckpt":
        torch.save({"state_dict": state}, source)
    else:
        save_file(state, source)
    del state
    code = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import argparse, quantize_models
    import lightning_memprec.cli.quantize as command
    import lightning_memprec._files.checkpoint_files, lightning_memprec.quantization.checkpoint
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["quantize", {str(source)!r}, "--model", "quantize_models:Wide",
                              "-o", {str(tmp_path / "out")!r}, "--method", {method!r}])

    def peak():
        # Not `ru_maxrss`, which a child inherits from its parent.
        lines = open("/proc/self/status").read().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

    before = peak()
    code = command.run(args)
    print(code, peak() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    code, growth = map(int, done.stdout.splitlines()[-1].split())
    assert code == 0
    largest = 3072 * 3072 * 4
    # The weight, its integers, a block's temporaries; 16 MiB for what the libraries load on first use.
    assert largest < growth < 3 * largest + 2**24
