"""Exported files against the state dict they came from, read back by safetensors and by Transformers."""

from __future__ import annotations

import inspect
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import nn

from lightning_memprec._files.checkpoint_files import Source
from lightning_memprec.master_weights.export import ExportDtype, export_weights

DTYPES = [name for name in get_args(ExportDtype) if name != "keep"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def checkpoint(model, tmp_path):
    torch.save({"state_dict": model.state_dict(), "epoch": 1}, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_are_cast_as_torch_casts_them_and_integers_left(model, checkpoint, tmp_path, dtype):
    result = export_weights(checkpoint, tmp_path / "out", dtype)
    found = load_file(result.files[0])
    expected = {n: t for n, t in model.state_dict().items() if n != "head.weight"}
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        cast = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        assert found[name].dtype == cast.dtype
        assert torch.equal(found[name], cast)
    assert result.total_bytes == sum(t.nbytes for t in found.values())
    assert (result.tensors, result.averaged, result.left_out) == (len(found), False, ())


def test_keep_leaves_every_dtype_that_the_format_has(tmp_path):
    wide = torch.randn(33)
    dtypes = [
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
    ]  # fmt: skip
    state = {str(dtype): wide.to(dtype) for dtype in dtypes} | {
        "scalar": torch.tensor(2.0),
        "empty": torch.zeros(0),
    }
    torch.save(state, tmp_path / "x.pt")
    found = load_file(export_weights(tmp_path / "x.pt", tmp_path / "out", "keep").files[0])
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_tied_weights_stand_once_and_load_into_the_model(model, checkpoint, tmp_path):
    result = export_weights(checkpoint, tmp_path / "x.safetensors")
    assert result.files == (tmp_path / "x.safetensors",)
    assert result.tied == {"head.weight": "embedding.weight"}
    with safe_open(result.files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    fresh = Tied()
    load_model(fresh, result.files[0])  # strict
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)


def test_a_large_model_goes_to_shards_with_an_index(model, checkpoint, tmp_path):
    result = export_weights(checkpoint, tmp_path / "out", max_shard_size=40)
    index = json.loads(result.files[-1].read_text())
    assert result.files[-1].name == "model.safetensors.index.json"
    assert {
        f"model-{i:05d}-of-{len(result.files) - 1:05d}.safetensors" for i in range(1, len(result.files))
    } == {f.name for f in result.files[:-1]}
    assert index["metadata"]["total_size"] == result.total_bytes
    found = {}
    for name, file in index["weight_map"].items():
        found[name] = load_file(tmp_path / "out" / file)[name]
    for name, tensor in model.state_dict().items():
        if name not in result.tied:
            assert torch.equal(found[name], tensor)
    for file in result.files[:-1]:
        shard = load_file(file)
        assert len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= 40
    # Our own reader reads what our writer wrote.
    again = export_weights(tmp_path / "out", tmp_path / "one.safetensors")
    assert set(load_file(again.files[0])) == set(found)


@pytest.mark.parametrize(("dtype", "value"), [("float16", 7e4), ("bfloat16", 3.4e38), ("float32", 1e39)])
def test_a_value_beyond_the_dtype_is_refused_by_name_and_nothing_is_left(tmp_path, dtype, value):
    torch.save({"big": torch.tensor([1.0, -value], dtype=torch.float64)}, tmp_path / "x.pt")
    with pytest.raises(OverflowError, match=r"'big' holds .* beyond the .* that " + dtype):
        export_weights(tmp_path / "x.pt", tmp_path / "out", dtype)
    assert list((tmp_path / "out").iterdir()) == []


def test_infinities_and_nan_of_the_checkpoint_pass(tmp_path):
    torch.save({"w": torch.tensor([float("inf"), float("nan"), 1.0])}, tmp_path / "x.pt")
    found = load_file(export_weights(tmp_path / "x.pt", tmp_path / "out", "float16").files[0])["w"]
    assert found.isinf().tolist() == [True, False, False]
    assert found.isnan().tolist() == [False, True, False]


def test_an_earlier_export_is_kept_unless_told_otherwise_and_replaced_whole(checkpoint, tmp_path):
    out = tmp_path / "out"
    export_weights(checkpoint, out, max_shard_size=40)
    (out / "config.json").touch()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        export_weights(checkpoint, out)
    export_weights(checkpoint, out, overwrite=True)
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    export_weights(out, out, "bfloat16", overwrite=True)  # onto its own source
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16, torch.int64}


def test_a_failed_export_leaves_the_earlier_one(checkpoint, tmp_path):
    out = tmp_path / "out"
    before = export_weights(checkpoint, out).files[0].read_bytes()
    torch.save({"w": torch.tensor([1e30])}, tmp_path / "big.pt")
    with pytest.raises(OverflowError):
        export_weights(tmp_path / "big.pt", out, "float16", overwrite=True)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == before


def test_prefix(checkpoint, tmp_path):
    torch.save(
        {"model.a": torch.ones(1), "model.b": torch.ones(1), "loss.c": torch.ones(1)}, tmp_path / "x.pt"
    )
    result = export_weights(tmp_path / "x.pt", tmp_path / "out", strip_prefix="model.")
    assert set(load_file(result.files[0])) == {"a", "b"}
    assert result.left_out == ("loss.c",)
    with pytest.raises(ValueError, match=r"No weight's name starts with 'net\.'; the first is 'model\.a'"):
        export_weights(tmp_path / "x.pt", tmp_path / "other", strip_prefix="net.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "half"}, "`dtype` must be one of"),
        ({"source": "ema"}, "`source` must be"),
        ({"max_shard_size": "5 giga"}, "Cannot read '5 giga' as a size"),
    ],
    ids=["dtype", "source", "size"],
)
def test_bad_arguments(checkpoint, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        export_weights(checkpoint, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="Lightning has it since 2.6")
def test_a_run_with_weight_averaging_exports_the_average(tmp_path):
    class Save(callbacks.EMAWeightAveraging):
        def on_train_batch_end(self, trainer, *args):
            super().on_train_batch_end(trainer, *args)
            self.average = {n: t.clone() for n, t in self._average_model.module.state_dict().items()}
            self.current = {n: t.clone() for n, t in trainer.model.state_dict().items()}
            trainer.save_checkpoint(tmp_path / "x.ckpt")

    callback = Save(decay=0.5)
    Trainer(
        accelerator="cpu", max_steps=3, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Small(), torch.utils.data.DataLoader(torch.ones(6, 3), batch_size=2))  # fmt: skip
    for source, expected in [
        ("auto", callback.average),
        ("averaged", callback.average),
        ("current", callback.current),
    ]:
        result = export_weights(tmp_path / "x.ckpt", tmp_path / source, source=source)
        assert result.averaged is (source != "current")
        found = load_file(result.files[0])
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(callback.average["layer.weight"], callback.current["layer.weight"])


def test_transformers_reads_single_and_sharded_exports(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    wrapped = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": wrapped}, tmp_path / "x.ckpt")
    for size in ("5GiB", 500):
        out = tmp_path / str(size)
        result = export_weights(tmp_path / "x.ckpt", out, strip_prefix="model.", max_shard_size=size)
        assert result.tied == {"lm_head.weight": "transformer.wte.weight"}
        assert (len(result.files) > 1) is (size == 500)
        config.save_pretrained(out)
        loaded, info = transformers.GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval")
def test_the_example_trains_inspects_and_exports(tmp_path, capsys):
    path = Path(__file__).parents[2] / "examples" / "export_weights.py"
    runpy.run_path(str(path))["main"](tmp_path)
    out = capsys.readouterr().out
    assert "plain.ckpt: Half-precision weights (bfloat16): mantissas were rounded." in out
    assert "masters.ckpt: Holds FP32 master weights." in out
    assert load_file(tmp_path / "release" / "model.safetensors")["0.weight"].dtype == torch.bfloat16


STREAM = """
import re, sys
from pathlib import Path
from lightning_memprec.master_weights.export import export_weights
from lightning_memprec.master_weights.inspect import inspect_checkpoint
small, large, out = sys.argv[1:]
# Not `ru_maxrss`: a child starts with its parent's.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
export_weights(small, out + "/small", "bfloat16")
inspect_checkpoint(small)
before = peak()
export_weights(large, out + "/large", "bfloat16", max_shard_size="100MB")
inspect_checkpoint(large)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_memory_stays_near_the_largest_tensor(tmp_path, kind):
    tensor_bytes, count = 20_000_000, 20
    shared = torch.randn(tensor_bytes // 4)
    for name, elements, number in (("small", 10, 1), ("large", None, count)):
        state = {f"w{i}": shared[:elements].clone() for i in range(number)}
        if kind == "ckpt":
            torch.save({"state_dict": state}, tmp_path / f"{name}.ckpt")
        else:
            save_file(state, tmp_path / f"{name}.safetensors")
        del state
    arguments = [str(tmp_path / f"small.{kind}"), str(tmp_path / f"large.{kind}"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", STREAM, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    # One tensor and the temporaries of a chunk: far from the 400 MB of all.
    assert int(done.stdout) * 1024 < 4 * tensor_bytes


def test_the_command_offers_the_choices_of_the_function():
    from lightning_memprec.cli.export import DTYPES, SOURCES

    assert get_args(ExportDtype) == DTYPES
    assert get_args(Source) == SOURCES
    assert inspect.signature(export_weights).parameters["max_shard_size"].default == "5GiB"
