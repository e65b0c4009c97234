"""Opening checkpoints of every kind, sound and hostile, against plain `torch.load`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import struct
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from lightning_memprec._errors import MemPrecError
from lightning_memprec._files.checkpoint_files import open_checkpoint
from lightning_memprec._files.stored_tensor import CheckpointError, untie


def tensors():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 7, generator=generator)
    return {
        "a.weight": wide,
        "a.tied": wide,
        "a.transposed": torch.randn(3, 4, generator=generator).t(),
        "a.part": torch.randn(10, generator=generator)[3:7],
        "a.expanded": torch.randn(1, generator=generator).expand(6),
        "half": torch.randn(8, generator=generator).bfloat16(),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 2),
        "complex": torch.randn(2, dtype=torch.complex64, generator=generator),
    }


def read_all(checkpoint):
    return {name: stored.read() for name, stored in checkpoint.weights.items()}


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("nested", [True, False], ids=["lightning", "state dict"])
def test_files_of_torch_save_read_as_torch_reads_them(tmp_path, zipped, nested):
    expected = tensors()
    contents = {"epoch": 2, "state_dict": expected} if nested else expected
    torch.save(contents, tmp_path / "x.ckpt", _use_new_zipfile_serialization=zipped)
    checkpoint = open_checkpoint(tmp_path / "x.ckpt")
    assert checkpoint.kind == ("lightning" if nested else "state_dict")
    assert_same(read_all(checkpoint), expected)
    assert untie(checkpoint.weights)[1] == {"a.tied": "a.weight"}
    for stored, tensor in zip(checkpoint.weights.values(), expected.values(), strict=True):
        assert (stored.shape, stored.elements, stored.size_bytes) == (
            tensor.shape,
            tensor.numel(),
            tensor.nbytes,
        )


def test_a_parameter_is_read_like_a_tensor(tmp_path):
    torch.save(nn.ParameterDict({"w": nn.Parameter(torch.ones(2))}).state_dict(), tmp_path / "x.pt")
    torch.save({"w": nn.Parameter(torch.ones(2))}, tmp_path / "y.pt")
    for name in ("x.pt", "y.pt"):
        assert open_checkpoint(tmp_path / name).weights["w"].read().tolist() == [1, 1]


class Items(list):
    pass


def test_unknown_classes_in_hyperparameters_are_neither_imported_nor_an_obstacle(tmp_path):
    contents = {
        "state_dict": {"w": torch.ones(2)},
        "hyper_parameters": {
            "optimizer": functools.partial(torch.optim.Adam, lr=1.0),
            "path": Path("x"),
            "network": nn.Linear(2, 2),
            "enum": warnings.WarningMessage("text", UserWarning, "f", 1),
        },
    }
    torch.save(contents, tmp_path / "x.ckpt")
    checkpoint = open_checkpoint(tmp_path / "x.ckpt")
    assert read_all(checkpoint)["w"].tolist() == [1, 1]
    assert not isinstance(checkpoint.contents["hyper_parameters"]["optimizer"], functools.partial)


@pytest.mark.skipif(
    not hasattr(torch._weights_only_unpickler.Unpickler, "_check_append_target"),
    reason="this torch appends to plain lists only when it reads without running code",
)
def test_an_unknown_list_in_hyperparameters_is_no_obstacle(tmp_path):
    contents = {"state_dict": {"w": torch.ones(2)}, "hyper_parameters": {"list": Items([1])}}
    torch.save(contents, tmp_path / "x.ckpt")
    assert read_all(open_checkpoint(tmp_path / "x.ckpt"))["w"].tolist() == [1, 1]


class Settings(dict):
    pass


def test_an_object_that_no_stand_in_can_replace_is_refused_with_the_reason(tmp_path):
    torch.save({"state_dict": {"w": torch.ones(2)}, "x": Settings(a=1)}, tmp_path / "x.ckpt")
    with pytest.raises(
        CheckpointError, match=r"without running code from it: .*dict.*Save the weights alone"
    ):
        open_checkpoint(tmp_path / "x.ckpt")


class Attack:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, exec, getattr], ids=["os", "builtins", "getattr"])
def test_code_in_a_checkpoint_is_never_run(tmp_path, function):
    target = tmp_path / "made"
    arguments = {
        os.mkdir: (str(target),),
        exec: (f"import os; os.mkdir({str(target)!r})",),
        getattr: ("x", "upper"),
    }
    attack = Attack(function, *arguments[function])
    torch.save({"state_dict": {"w": torch.ones(2)}, "x": attack}, tmp_path / "x.ckpt")
    with contextlib.suppress(CheckpointError):  # Refused, or read with a stand-in for the function.
        open_checkpoint(tmp_path / "x.ckpt")
    assert not target.exists()


@pytest.mark.parametrize(
    "contents",
    [b"import torch\n", b"", b'{"a": 1}', b"Python", b"\x89HDF\r\n"],
    ids=["program", "empty", "json", "p", "hdf5"],
)
@pytest.mark.parametrize("name", ["train.py", "last.ckpt"])
def test_another_kind_of_file_is_called_no_checkpoint(tmp_path, contents, name):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(CheckpointError, match=rf"{name}' is not a checkpoint"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("mode", "kept"),
    [(mode, kept) for mode in ("zip", "legacy", "safetensors") for kept in (0, 1, 9, 200, 0.5, 0.9)],
)
def test_cut_files_are_refused_by_name(tmp_path, mode, kept):
    path = tmp_path / ("x.safetensors" if mode == "safetensors" else "x.ckpt")
    state = {"w": torch.ones(1000), "v": torch.ones(30)}
    if mode == "safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state}, path, _use_new_zipfile_serialization=mode == "zip")
    data = path.read_bytes()
    path.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    with pytest.raises(CheckpointError, match=path.name):
        read_all(open_checkpoint(path))


def test_a_tensor_that_claims_more_than_the_file_holds_is_refused_before_memory_is_taken(tmp_path):
    torch.save({"w": torch.ones(1).expand(2**40)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="larger than what the file holds"):
        open_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("contents", "held"),
    [([1, 2], "a list"), ({"loss": 1.0}, r"keys \['loss'\]"), ({}, r"keys \[\]")],
    ids=["list", "numbers", "nothing"],
)
def test_a_file_without_weights_says_what_it_holds(tmp_path, contents, held):
    torch.save(contents, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=f"holds {held}"):
        open_checkpoint(tmp_path / "x.pt")


def test_errors_are_of_the_family(tmp_path):
    assert issubclass(CheckpointError, MemPrecError)
    assert issubclass(CheckpointError, ValueError)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        open_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(ValueError, match="`source` must be"):
        open_checkpoint(tmp_path, "ema")


def test_averages_are_chosen_unless_told_otherwise(tmp_path):
    average, current = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    torch.save({"state_dict": average, "current_model_state": current}, tmp_path / "ema.ckpt")
    torch.save({"state_dict": current}, tmp_path / "plain.ckpt")
    for source, value, averaged in [("auto", 0, True), ("averaged", 0, True), ("current", 1, False)]:
        checkpoint = open_checkpoint(tmp_path / "ema.ckpt", source)
        assert read_all(checkpoint)["w"].tolist() == [value] * 2
        assert checkpoint.averaged is averaged
        assert checkpoint.has_average
    assert read_all(open_checkpoint(tmp_path / "plain.ckpt", "current"))["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="holds no averaged weights"):
        open_checkpoint(tmp_path / "plain.ckpt", "averaged")


def test_safetensors_file_and_folder(tmp_path):
    expected = {name: tensor.contiguous() for name, tensor in tensors().items() if name != "a.tied"}
    save_file(expected, tmp_path / "one.safetensors")
    found = read_all(open_checkpoint(tmp_path / "one.safetensors"))
    assert_same({name: found[name] for name in expected}, expected)
    folder = tmp_path / "shards"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(1)}, folder / "model-2.safetensors")
    save_file({"c": torch.zeros(1)}, folder / "stale.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert set(open_checkpoint(folder).weights) == {"a", "b"}
    index.unlink()
    assert set(open_checkpoint(folder).weights) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is no index"),
        ("[]", "is no index"),
        ('{"weight_map": {"a": 1}}', "is no index"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "outside its folder"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "missing"),
    ],
    ids=["cut", "list", "number", "outside", "missing"],
)
def test_a_bad_index_is_refused(tmp_path, index, message):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_hostile_safetensors_header_is_refused(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0000")
    with pytest.raises(CheckpointError, match="no sound safetensors"):
        open_checkpoint(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 2**62) + header)
    with pytest.raises(CheckpointError, match="no sound safetensors"):
        open_checkpoint(tmp_path / "x.safetensors")


def test_folders_that_hold_nothing_readable(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither `\.safetensors` files nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "latest").touch()
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(CheckpointError, match="DeepSpeed"):
        open_checkpoint(tmp_path)


def save_distributed(folder, key, **meta):
    weights = {"layer.weight": torch.arange(6.0).view(2, 3), "layer.half": torch.ones(4).bfloat16()}
    state = {key: weights, "optimizer_0": {"state": {"layer.weight": {"exp_avg": torch.zeros(2, 3)}}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    if meta:
        torch.save(meta, folder / "meta.pt")
    return weights


@pytest.mark.parametrize("key", ["model", "state_dict"], ids=["FSDPStrategy", "ModelParallelStrategy"])
def test_distributed_folder(tmp_path, key):
    expected = save_distributed(tmp_path / "x", key, epoch=3, global_step=7)
    checkpoint = open_checkpoint(tmp_path / "x")
    found = read_all(checkpoint)
    assert_same({name: found[name] for name in expected}, expected)
    assert set(found) == set(expected)
    assert list(checkpoint.optimizer) == ["optimizer_0.state.layer.weight.exp_avg"]
    assert checkpoint.contents == {"epoch": 3, "global_step": 7}


def test_current_weights_beside_a_distributed_average(tmp_path):
    current = {"layer.weight": torch.full((2, 3), 9.0)}
    save_distributed(tmp_path / "x", "model", current_model_state=current)
    assert open_checkpoint(tmp_path / "x").averaged
    assert read_all(open_checkpoint(tmp_path / "x", "current"))["layer.weight"].unique().tolist() == [9]


def test_a_hostile_distributed_folder_runs_nothing_and_stays_inside(tmp_path):
    folder, target = tmp_path / "x", tmp_path / "made"
    save_distributed(folder, "model")
    sound = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(os.mkdir, str(target))))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir|names nt\.mkdir"):
        open_checkpoint(folder)
    assert not target.exists()
    (folder / ".metadata").write_bytes(sound[:100])
    with pytest.raises(CheckpointError, match="no sound metadata"):
        open_checkpoint(folder)
    metadata = pickle.loads(sound)
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="points outside"):
        open_checkpoint(folder)
    metadata = pickle.loads(sound)
    metadata.state_dict_metadata["model.layer.weight"].size = torch.Size([2**20, 2**20])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="claims 4398046511104 bytes"):
        open_checkpoint(folder)
    (folder / ".metadata").write_bytes(sound)
    part = folder / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:300])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_all(open_checkpoint(folder))
    part.unlink()
    with pytest.raises(CheckpointError, match="lacks the files"):
        open_checkpoint(folder)
