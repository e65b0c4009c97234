from __future__ import annotations

import copy
import json
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_memprec.quantization.checkpoint import load_quantized, restore_int8_layers, save_quantized
from lightning_memprec.quantization.checkpoint_io import CHECKPOINT_KEY, METADATA_KEY
from lightning_memprec.quantization.checkpoint_layout import QuantizedFileError
from lightning_memprec.quantization.convert import quantize_

PATHS = {"file": "net.safetensors", "folder": "net", "checkpoint": "net.ckpt"}


class Net(nn.Module):
    """Every kind of layer, an embedding tied to the head, a shared layer, buffers and float parameters."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(12, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(width, width, 1)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.BatchNorm1d(width)
        self.shared = nn.Linear(width, width)
        self.again = self.shared
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens).transpose(1, 2)
        x = self.norm(self.up(self.conv(x))).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.again(self.shared(self.rnn(x)[0]).relu()))


def make(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options).eval()


TOKENS = torch.arange(12).reshape(2, 6)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "zeropoint"},
        {"method": "llm_int8"},
        {"mapping": "affine_textbook"},
        {"group_size": 3, "bits": 4},
        {"exclude": ["attention", "conv"]},
    ],
    ids=["weight_only", "zeropoint", "llm_int8", "textbook", "groups", "exclude"],
)
def test_outputs_come_back_bit_for_bit(tmp_path, path, options):
    net = make()
    quantize_(net, **options)
    save_quantized(net, tmp_path / path)
    again = load_quantized(tmp_path / path, make(seed=1))
    assert torch.equal(again(TOKENS), net(TOKENS))
    assert again.state_dict().keys() == net.state_dict().keys()
    assert again.head.stored().data_ptr() == again.embedding.stored().data_ptr()
    assert again.shared is again.again
    assert [f.name for f in tmp_path.rglob(".*")] == []


@pytest.mark.slow
def test_a_fresh_process_has_the_same_outputs(tmp_path):
    net = make()
    quantize_(net, "vectorwise")
    for path in PATHS.values():
        save_quantized(net, tmp_path / path)
    torch.save(net(TOKENS), tmp_path / "expected.pt")
    code = f"""
    import sys, torch
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from test_checkpoint import TOKENS, Net
    from lightning_memprec.quantization.checkpoint import load_quantized
    for path in {list(PATHS.values())!r}:
        net = load_quantized({str(tmp_path)!r} + "/" + path, Net).eval()
        assert torch.equal(net(TOKENS), torch.load({str(tmp_path / "expected.pt")!r})), path
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_the_file_is_smaller_and_holds_plain_tensors(tmp_path):
    net = nn.Sequential(nn.Linear(256, 256))
    quantize_(net)
    save_quantized(net, tmp_path / "net.safetensors")
    tensors = load_file(tmp_path / "net.safetensors")
    assert {name: value.dtype for name, value in tensors.items()} == {
        "0.weight": torch.int8,
        "0.weight_scale": torch.float32,
        "0.bias": torch.float32,
    }
    assert (tmp_path / "net.safetensors").stat().st_size < 256 * 256 + 2 * 4 * 256 + 2000


def test_tied_tensors_are_written_once(tmp_path):
    net = make()
    quantize_(net)
    save_quantized(net, tmp_path / "net.safetensors")
    tensors = load_file(tmp_path / "net.safetensors")
    assert "embedding.weight" in tensors
    assert "head.weight" not in tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_what_stays_in_floating_point_keeps_its_dtype(tmp_path, dtype):
    net = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)).to(dtype)
    quantize_(net)
    save_quantized(net, tmp_path / "net")
    again = load_quantized(tmp_path / "net", lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)))
    x = torch.randn(3, 6, dtype=dtype)
    assert again(x).dtype == dtype
    assert torch.equal(again(x), net(x))
    assert again[0].weight_scale.dtype == torch.float32


def test_loading_into_a_quantized_model_fills_it_again(tmp_path):
    net = make()
    quantize_(net)
    save_quantized(net, tmp_path / "net")
    again = make(seed=3)
    quantize_(again)
    assert torch.equal(load_quantized(tmp_path / "net", again)(TOKENS), net(TOKENS))


def with_exact_columns():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    batch = torch.randn(5, 6)
    batch[:, 2] = 9.0
    batch[:, 4] = -7.0
    quantize_(net, "llm_int8", calibration=[batch], exact_outliers=True)
    return net, batch


def test_columns_kept_in_floating_point_come_back(tmp_path):
    net, batch = with_exact_columns()
    assert net[0].outlier_indices.tolist() == [2, 4]
    save_quantized(net, tmp_path / "net")
    again = load_quantized(tmp_path / "net", lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)))
    assert torch.equal(again(batch), net(batch))
    assert torch.equal(again[0].outlier_weight, net[0].outlier_weight)


@pytest.mark.parametrize("columns", [[2, 6], [-1, 2], [4, 2], [2], [2.0, 4.0]], ids=str)
def test_columns_that_do_not_exist_are_refused(tmp_path, columns):
    net, _ = with_exact_columns()
    net[0].outlier_indices = torch.tensor(columns)
    save_quantized(net, tmp_path / "net")
    with pytest.raises(QuantizedFileError, match="keeps columns of '0'"):
        load_quantized(tmp_path / "net", lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)))


def test_a_float_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no int8 layers\. Call `quantize_`"):
        save_quantized(make(), tmp_path / "net")
    with pytest.raises(ValueError, match="`format` must be"):
        save_quantized(make(), tmp_path / "net", format="gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8)), "has no layers"),
        (lambda: make(width=4), r"holds '.*' as torch.int8 .*, but this `Net` has"),
        (lambda: _changed(head=nn.Embedding(12, 8)), "'head', which is a `Embedding` here"),
        (lambda: _changed(norm=nn.Identity()), "5 are not of this model"),
        (lambda: _changed(extra=nn.LayerNorm(3)), r"2 tensors are missing \['extra.bias'"),
    ],
    ids=["other", "width", "kind", "surplus", "missing"],
)
def test_the_wrong_model_is_refused(tmp_path, model, message):
    net = make()
    quantize_(net, "vectorwise")
    save_quantized(net, tmp_path / "net")
    with pytest.raises(QuantizedFileError, match=message):
        load_quantized(tmp_path / "net", model)


def _changed(**parts):
    net = make()
    for name, part in parts.items():
        setattr(net, name, part)
    return net


def header(path, change):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    config = json.loads(metadata[METADATA_KEY])
    change(config)
    save_file(load_file(path), path, metadata | {METADATA_KEY: json.dumps(config)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=99), "layout of version 99"),
        (lambda c: c.pop("version"), "damaged description"),
        (lambda c: c.update(groups=3), "damaged description"),
        (lambda c: c["groups"][0]["scheme"].update(bits=77), "`bits` must be"),
        (lambda c: c["groups"][0]["scheme"].update(os="rm"), "damaged description"),
        (lambda c: c["groups"][0].update(float_dtype="int8"), "damaged description"),
        (lambda c: c["groups"][0].update(layers=[["0"]]), "is no name of a layer"),
        (lambda c: c["groups"][0].update(layers=["7"]), "has no layers"),
        (lambda c: c["groups"][0]["scheme"].update(mapping="affine"), "1 tensors are missing"),
        (lambda c: c["groups"][0]["scheme"].update(weight_granularity="tensor"), "weight_scale"),
        (lambda c: c.update(tied={"a": "b"}), "ties names to tensors that it lacks"),
    ],
    ids=[
        "version",
        "no-version",
        "groups",
        "bits",
        "surplus",
        "dtype",
        "names",
        "layer",
        "mapping",
        "shape",
        "tied",
    ],
)
def test_a_hostile_header_is_refused(tmp_path, change, message):
    path = tmp_path / "net.safetensors"
    net = nn.Sequential(nn.Linear(4, 3))
    quantize_(net)
    save_quantized(net, path)
    header(path, change)
    with pytest.raises(QuantizedFileError, match=message):
        load_quantized(path, lambda: nn.Sequential(nn.Linear(4, 3)))


@pytest.mark.parametrize("suffix", ["safetensors", "ckpt"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_cut_file_is_refused(tmp_path, suffix, share):
    path = tmp_path / f"net.{suffix}"
    net = make()
    quantize_(net)
    save_quantized(net, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(QuantizedFileError, match="net"):
        load_quantized(path, Net)


@pytest.mark.parametrize("suffix", ["safetensors", "ckpt"])
def test_damaged_bits_are_refused_or_harmless(tmp_path, suffix):
    path = tmp_path / f"net.{suffix}"
    save_quantized(with_exact_columns()[0], path)
    good = path.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(200):
        content = bytearray(good)
        for _ in range(rng.choice([1, 2, 5])):
            content[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            load_quantized(path, nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)))
        except QuantizedFileError:
            refused += 1
    assert refused > 50  # The rest changed a value, or padding.


@pytest.mark.parametrize("length", [0, 2**40, 2**63])
def test_a_header_of_a_wrong_length_is_refused(tmp_path, length):
    path = tmp_path / "net.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" * 20)
    with pytest.raises(QuantizedFileError, match="no sound safetensors file"):
        load_quantized(path, Net)


@pytest.mark.parametrize("name", ["net.safetensors", "net.ckpt"])
def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(QuantizedFileError, match=name):
        load_quantized(tmp_path / name, Net)


def test_a_file_of_another_tool_is_refused(tmp_path):
    save_file({"weight": torch.ones(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(QuantizedFileError, match="does not say which layers are int8"):
        load_quantized(tmp_path / "plain.safetensors", Net)
    torch.save({"state_dict": make().state_dict()}, tmp_path / "float.ckpt")
    with pytest.raises(QuantizedFileError, match="holds no int8 model"):
        load_quantized(tmp_path / "float.ckpt", Net)
    with pytest.raises(FileNotFoundError, match="no quantized model"):
        load_quantized(tmp_path / "none", Net)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch hacked",))


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, CHECKPOINT_KEY: Evil()}, "evil.ckpt")
    with pytest.raises(QuantizedFileError, match="more than tensors and plain values"):
        load_quantized("evil.ckpt", Net)
    assert not Path("hacked").exists()


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_failing_write_leaves_the_old_file(tmp_path, path, monkeypatch):
    net = make()
    quantize_(net)
    save_quantized(net, tmp_path / path)
    expected = net(TOKENS)
    other = make(seed=5)
    quantize_(other)

    def fail(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        save_quantized(other, tmp_path / path)
    assert torch.equal(load_quantized(tmp_path / path, make(seed=1))(TOKENS), expected)
    assert [f.name for f in tmp_path.rglob(".*")] == []


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="limits on files are of POSIX")
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path, path):
    import resource

    net, other = make(), make(seed=5)
    quantize_(net)
    quantize_(other)
    save_quantized(net, tmp_path / path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_quantized(other, tmp_path / path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert torch.equal(load_quantized(tmp_path / path, make(seed=1))(TOKENS), net(TOKENS))
    assert [f.name for f in tmp_path.rglob(".*")] == []


def test_a_link_is_replaced_and_not_what_it_points_to(tmp_path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "net.safetensors").symlink_to(tmp_path / "precious")
    net = make()
    quantize_(net)
    save_quantized(net, tmp_path / "net.safetensors")
    assert (tmp_path / "precious").read_text() == "kept"
    assert torch.equal(load_quantized(tmp_path / "net.safetensors", make(seed=1))(TOKENS), net(TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["net"])
def test_a_killed_writer_leaves_the_old_or_the_new_file(tmp_path, path):
    code = f"""
    import sys, torch
    from torch import nn
    from lightning_memprec.quantization.checkpoint import save_quantized
    from lightning_memprec.quantization.convert import quantize_
    nets = []
    for value in (1.0, 2.0):
        net = nn.Sequential(nn.Linear(1500, 1500))
        nn.init.constant_(net[0].weight, value)
        quantize_(net)
        nets.append(net)
    save_quantized(nets[0], {str(tmp_path / path)!r})
    print("ready", flush=True)
    while True:
        for net in nets:
            save_quantized(net, {str(tmp_path / path)!r})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    try:
        process.wait(0.05)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    net = load_quantized(tmp_path / path, lambda: nn.Sequential(nn.Linear(1500, 1500)))
    weight = net[0].dequantize()
    assert torch.equal(weight, torch.full_like(weight, 1.0)) or torch.equal(
        weight, torch.full_like(weight, 2.0)
    )


def test_a_class_gets_the_hyperparameters_of_a_checkpoint(tmp_path):
    net = make(width=4)
    quantize_(net)
    entries = {"hyper_parameters": {"width": 4, "lr": 0.1}}
    save_quantized(net, tmp_path / "net.ckpt", checkpoint_entries=entries)
    assert torch.equal(load_quantized(tmp_path / "net.ckpt", Net).eval()(TOKENS), net(TOKENS))


def test_lightning_restores_the_checkpoint(tmp_path):
    from lightning.pytorch import LightningModule
    from lightning.pytorch import __version__ as version

    class Module(LightningModule):
        def __init__(self, width):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

        def on_load_checkpoint(self, checkpoint):
            restore_int8_layers(self, checkpoint)

    module = Module(5)
    plain = copy.deepcopy(module)
    quantize_(module)
    entries = {"hyper_parameters": {"width": 5}, "pytorch-lightning_version": version}
    save_quantized(module, tmp_path / "int8.ckpt", checkpoint_entries=entries)
    again = Module.load_from_checkpoint(tmp_path / "int8.ckpt", weights_only=True)
    x = torch.randn(3, 4)
    assert torch.equal(again.net(x), module.net(x))
    restore_int8_layers(plain, {"state_dict": {}})
    assert type(plain.net[0]) is nn.Linear
