"""Integers of up to 4 bits: packed as compressed-tensors packs them, in memory and in files."""

from __future__ import annotations

import copy
import io
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_memprec.quantization.affine import dequantize, spread
from lightning_memprec.quantization.checkpoint import load_quantized, restore_int8_layers, save_quantized
from lightning_memprec.quantization.checkpoint_io import CHECKPOINT_KEY, METADATA_KEY
from lightning_memprec.quantization.checkpoint_layout import QuantizedFileError
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.kernels import explain
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.modules.linear import Int8Linear
from lightning_memprec.quantization.packing import pack, unpack, words

from .test_checkpoint import PATHS, TOKENS, make

BITS = pytest.mark.parametrize("bits", [2, 3, 4], ids=lambda bits: f"{bits} bits")
SHAPES = [(1, 1), (3, 7), (5, 8), (2, 31), (4, 32), (3, 33), (2, 100), (0, 5), (3, 0)]


def integers(rows, columns, bits):
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(
        -(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns), dtype=torch.int8, generator=generator
    )


def by_the_book(row, bits):
    """One integer of arbitrary precision, cut into words of 32 bits."""
    stream = sum((value + 2 ** (bits - 1)) << (bits * place) for place, value in enumerate(row.tolist()))
    count = words(len(row), bits)
    unsigned = [(stream >> (32 * place)) & 0xFFFFFFFF for place in range(count)]
    return [word - 2**32 if word >= 2**31 else word for word in unsigned]


@BITS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_hold_a_stream_of_bits(shape, bits):
    matrix = integers(*shape, bits)
    packed = pack(matrix, bits)
    assert packed.dtype == torch.int32
    assert packed.tolist() == [by_the_book(row, bits) for row in matrix]
    assert torch.equal(unpack(packed, bits, shape[1]), matrix)
    assert pack(matrix.to("meta"), bits).shape == packed.shape


@BITS
def test_words_are_those_of_compressed_tensors(bits):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    matrix = integers(6, 77, bits)
    packed = pack(matrix, bits)
    assert torch.equal(packed, helpers.pack_to_int32(matrix, bits))
    assert torch.equal(helpers.unpack_from_int32(packed, bits, matrix.shape), matrix)


def test_rows_of_several_dimensions_are_unpacked():
    matrix = integers(6, 10, 3)
    assert torch.equal(unpack(pack(matrix, 3).reshape(2, 3, 1), 3, 10), matrix.reshape(2, 3, 10))


SCHEMES = {
    "channel": {},
    "tensor": {"weight_granularity": "tensor"},
    "group with tail": {"group_size": 5},
    "affine": {"mapping": "affine"},
    "affine group": {"mapping": "affine", "group_size": 4},
    "textbook": {"mapping": "affine_textbook"},
}


def quantized(bits, scheme):
    scheme = dict(scheme)
    if "group_size" in scheme:
        scheme["weight_granularity"] = "group"
    scheme = Scheme(bits=bits, **scheme)
    torch.manual_seed(0)
    weight = scheme.quantize(torch.randn(9, 22))
    return weight, Int8Linear(weight, None, scheme, torch.float32)


@BITS
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_layer_computes_with_what_was_packed(scheme, bits):
    weight, layer = quantized(bits, scheme)
    size = layer.scheme.group_size
    parts = [None if part is None else spread(part, 22, size) for part in (weight.scale, weight.zero_point)]
    exact = dequantize(weight.values, *parts)
    assert torch.equal(layer.weight, weight.values)
    assert torch.equal(layer.dequantize(), exact)
    assert torch.equal(layer.dequantize_rows(3, 7), exact[3:7])
    values = torch.randn(4, 22, requires_grad=True)
    output = layer(values)
    torch.testing.assert_close(output, values @ exact.t())  # FP32 sums in another order.
    output.sum().backward()
    torch.testing.assert_close(values.grad, exact.sum(0).expand(4, 22))


@pytest.mark.parametrize("method", ["absmax", "zeropoint", "vectorwise", "llm_int8"])
def test_quantized_activations_meet_the_same_integers(method):
    torch.manual_seed(0)
    net, values = nn.Sequential(nn.Linear(64, 16)), torch.randn(5, 64)
    values[:, 3] = 9.0
    quantize_(net, method, bits=4)
    with torch.no_grad():
        expected = nn.functional.linear(values, net[0].dequantize(), net[0].bias)
        # Activations of 8 bits, one scale for the tensor at worst: half a step of 9/127 on each of 64 features.
        assert (net(values) - expected).norm() < 0.05 * expected.norm()
    assert explain(net[0])


@pytest.mark.parametrize(("bits", "share"), [(8, 1.0), (4, 0.5), (3, 0.375), (2, 0.25)], ids=str)
def test_memory_and_the_report_count_what_is_really_held(bits, share):
    net = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Conv1d(512, 64, 1, bias=False))
    report = quantize_(net, bits=bits)
    integers = sum(b.numel() * b.element_size() for n, b in net.named_buffers() if "scale" not in n)
    assert integers == share * (256 * 512 + 512 * 64)
    assert report.bytes_after == integers + 4 * (512 + 64)
    assert [row.bytes_after for row in report.layers] == [
        share * 256 * 512 + 4 * 512,
        share * 512 * 64 + 4 * 64,
    ]


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_the_file_is_half_of_int8(tmp_path, path):
    sizes = {}
    for bits in (8, 4):
        net = nn.Sequential(nn.Linear(512, 512, bias=False))
        quantize_(net, bits=bits)
        save_quantized(net, tmp_path / f"{bits}" / path)
        sizes[bits] = sum(file.stat().st_size for file in (tmp_path / f"{bits}").rglob("*") if file.is_file())
    # Beside the integers: 2 KiB of scales, and headers.
    assert 512 * 256 <= sizes[4] <= 512 * 256 + 8000
    assert sizes[4] < 0.52 * sizes[8]


OPTIONS = {
    "channel": {},
    "3 bits": {"bits": 3},
    "2 bits, affine groups": {"bits": 2, "mapping": "affine", "group_size": 3},
    "affine": {"mapping": "affine"},
    "affine tensor": {"mapping": "affine", "weight_granularity": "tensor"},
    "textbook": {"mapping": "affine_textbook"},
    "vectorwise": {"method": "vectorwise"},
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_files_come_back_bit_for_bit(tmp_path, options, path):
    net = make()
    quantize_(net, **{"bits": 4, **options})
    save_quantized(net, tmp_path / path)
    again = load_quantized(tmp_path / path, make(seed=1))
    assert torch.equal(again(TOKENS), net(TOKENS))
    for name, value in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert again.head.stored() is again.embedding.stored()


def test_tied_weights_stay_one_tensor_and_are_written_once(tmp_path):
    net = make()
    report = quantize_(net, bits=4)
    assert net.head.stored() is net.embedding.stored()
    assert {row.name: row.bytes_after for row in report.layers}["head"] == 0
    net.to(torch.bfloat16).to("cpu")
    assert net.head.stored() is net.embedding.stored()
    copied = copy.deepcopy(net)
    assert copied.head.stored() is copied.embedding.stored()
    save_quantized(net, tmp_path / "net.safetensors")
    tensors = load_file(tmp_path / "net.safetensors")
    assert ("embedding.weight_packed" in tensors, "head.weight_packed" in tensors) == (True, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_casts_and_copies_leave_packed_integers_alone(dtype):
    net = make()
    quantize_(net, bits=4)
    packed = {n: b.clone() for n, b in net.named_buffers() if n.endswith("_packed")}
    expected = net(TOKENS)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(TOKENS), expected)
    net.to(dtype).to(torch.float32)
    for name, value in packed.items():
        assert torch.equal(net.get_buffer(name), value)
    assert net.attention.out_proj.weight.dtype == torch.int8
    assert net.conv.weight.shape == (8, 4, 3)


def test_a_state_loads_safely_and_a_float_one_is_refused():
    net, twin, plain = make(), make(seed=1), make(seed=2)
    quantize_(net, bits=4)
    quantize_(twin, bits=4)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(twin(TOKENS), net(TOKENS))
    with pytest.raises(RuntimeError, match=r"`conv\.weight` is in floating point in the state"):
        twin.load_state_dict(plain.state_dict(), strict=False)


def unpacked(net):
    """The state in which integers of any width were int8, as earlier releases wrote it."""
    state = {}
    for name, value in net.state_dict().items():
        if not name.endswith("_packed"):
            state[name] = value
            continue
        owner, _, key = name.removesuffix("_packed").rpartition(".")
        part = net.get_submodule(owner)
        integers = part.weight if key == "weight" else part._integers(key)
        state[f"{owner}.{key}"] = integers.clone()
    return state


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_files_with_unpacked_integers_still_load(tmp_path, path, monkeypatch):
    net = make()
    quantize_(net, bits=4, mapping="affine")
    save_quantized(net, tmp_path / path)
    state = unpacked(net)
    assert not [name for name in state if name.endswith("_packed")]
    target = tmp_path / path
    if target.suffix == ".ckpt":
        contents = torch.load(target, weights_only=True)
        config = {**contents[CHECKPOINT_KEY], "version": 1}
        torch.save({**contents, "state_dict": state, CHECKPOINT_KEY: config}, target)
    else:
        target = target if target.suffix else target / "model.safetensors"
        config = json.loads(metadata_of(target)) | {"version": 1, "tied": {}}
        state = {name: value.clone() for name, value in state.items()}
        save_file(state, target, {METADATA_KEY: json.dumps(config)})
    again = load_quantized(tmp_path / path, make(seed=1))
    assert torch.equal(again(TOKENS), net(TOKENS))
    if target.suffix == ".ckpt":
        checkpoint = torch.load(target, weights_only=True)
        restored = make(seed=2)
        restore_int8_layers(restored, checkpoint)
        restored.load_state_dict(checkpoint["state_dict"])  # As Lightning does.
        assert torch.equal(restored(TOKENS), net(TOKENS))


def metadata_of(path):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata()[METADATA_KEY]


@pytest.mark.parametrize(("bits", "version"), [(8, 1), (5, 1), (4, 2)], ids=["8 bits", "5 bits", "4 bits"])
def test_only_packed_files_have_the_new_version(tmp_path, bits, version):
    net = nn.Sequential(nn.Linear(4, 3))
    quantize_(net, bits=bits)
    save_quantized(net, tmp_path / "net.safetensors")
    assert json.loads(metadata_of(tmp_path / "net.safetensors"))["version"] == version


def spoil(path, **changes):
    tensors = load_file(path)
    for name, value in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if value is not None:
            tensors[key] = value
    save_file(tensors, path, {METADATA_KEY: metadata_of(path)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0__weight_shape": torch.tensor([3, 9])}, r"as a matrix of \[3, 9\], but this model has \[3, 10\]"),
        ({"0__weight_shape": torch.tensor(7.0)}, "as a matrix of 7.0"),
        ({"0__weight_shape": torch.zeros(2, 2)}, "as a matrix of"),
        ({"0__weight_packed": torch.zeros(3, 1, dtype=torch.int32)}, "holds '0.weight_packed' as torch.int32"),
        ({"0__weight_packed": torch.zeros(3, 2)}, "holds '0.weight_packed' as torch.float32"),
        ({"0__weight_packed": torch.zeros(3, 2, dtype=torch.int64)}, "as torch.int64"),
        ({"0__weight_packed": None}, "1 tensors are missing"),
        ({"0__weight_zero_point": torch.zeros(3, 3, dtype=torch.int32)}, "holds '0.weight_zero_point'"),
        ({"0__weight_zero_point": torch.zeros(1, dtype=torch.int32)}, "holds '0.weight_zero_point'"),
        ({"0__weight_scale": torch.zeros(3, 3, dtype=torch.float16)}, "holds '0.weight_scale' as torch.float16"),
        ({"0__weight_packed": None, "0__weight": torch.full((3, 10), 99, dtype=torch.int8)}, "are missing"),
        ({"0__weight_packed": None, "0__weight": torch.zeros(2, 3, dtype=torch.int8)}, "are missing"),
        ({"0__weight_packed": None, "0__weight": torch.zeros((), dtype=torch.int8)}, "are missing"),
    ],
    ids=["shape", "scalar shape", "matrix shape", "words", "float", "int64", "missing", "zero points", "zero point",
         "scale", "too wide", "old shape", "old scalar"],
)  # fmt: skip
def test_hostile_tensors_are_refused(tmp_path, changes, message):
    net = nn.Sequential(nn.Linear(10, 3))
    quantize_(net, bits=4, mapping="affine", group_size=4)
    save_quantized(net, tmp_path / "net.safetensors")
    spoil(tmp_path / "net.safetensors", **changes)
    with pytest.raises(QuantizedFileError, match=message):
        load_quantized(tmp_path / "net.safetensors", lambda: nn.Sequential(nn.Linear(10, 3)))


def test_any_words_are_integers_of_the_width(tmp_path):
    net = nn.Sequential(nn.Linear(10, 3))
    quantize_(net, bits=3)
    save_quantized(net, tmp_path / "net.safetensors")
    spoil(tmp_path / "net.safetensors", **{"0__weight_packed": torch.full((3, 1), -1, dtype=torch.int32)})
    again = load_quantized(tmp_path / "net.safetensors", lambda: nn.Sequential(nn.Linear(10, 3)))
    assert torch.equal(again[0].weight, torch.full((3, 10), 3, dtype=torch.int8))


def test_the_shape_is_in_the_file_for_other_readers(tmp_path):
    net = nn.Sequential(nn.Linear(10, 3), nn.Conv1d(3, 4, 1))
    quantize_(net, bits=4, mapping="affine")
    save_quantized(net, tmp_path / "net")
    tensors = load_file(tmp_path / "net" / "model.safetensors")
    assert tensors["0.weight_shape"].tolist() == [3, 10]
    assert tensors["0.weight_shape"].dtype == torch.int64
    assert tensors["0.weight_zero_point"].dtype == torch.int32  # Packed along the channels.
    assert "1.weight_shape" not in tensors  # Only this package reads convolutions.
    config = json.loads((tmp_path / "net" / "config.json").read_text())["quantization_config"]
    assert (config["format"], config["config_groups"]["group_0"]["format"]) == ("pack-quantized",) * 2


@BITS
@pytest.mark.parametrize("scheme", ["channel", "tensor", "affine", "affine group"])
def test_compressed_tensors_unpacks_a_layer_of_the_file(tmp_path, scheme, bits):
    """The library's own code, which also covers what Transformers cannot open yet: packed zero points."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 10, bias=False))
    quantize_(net, bits=bits, **SCHEMES[scheme])
    save_quantized(net, tmp_path / "net")
    config = json.loads((tmp_path / "net" / "config.json").read_text())["quantization_config"]
    group = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    tensors = load_file(tmp_path / "net" / "model.safetensors")
    local = {name.removeprefix("0."): value for name, value in tensors.items()}
    assert set(local) == set(compressors.PackedQuantizationCompressor.compression_param_names(group))
    weight = compressors.PackedQuantizationCompressor.decompress(local, group)["weight"]
    assert torch.equal(weight, net[0].dequantize())


def test_layers_of_several_widths_are_mixed_precision(tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    quantize_(net, bits=4, include=["0"])
    quantize_(net, include=["1"])
    save_quantized(net, tmp_path / "net")
    config = json.loads((tmp_path / "net" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    formats = [group["format"] for group in config["config_groups"].values()]
    assert formats == ["pack-quantized", "int-quantized"]
    again = load_quantized(tmp_path / "net", lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    values = torch.randn(2, 8)
    assert torch.equal(again(values), net(values))


def test_bitsandbytes_gets_packed_layers_in_floating_point(tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    quantize_(net, bits=4, include=["0"])
    quantize_(net, include=["1"])
    save_quantized(net, tmp_path / "net", format="bitsandbytes")
    tensors = load_file(tmp_path / "net" / "model.safetensors")
    assert torch.equal(tensors["0.weight"], net[0].dequantize())
    assert not [name for name in tensors if name.endswith(("_packed", "_shape"))]
    again = load_quantized(tmp_path / "net", lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert type(again[0]) is nn.Linear


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # The compiler's own.
@pytest.mark.parametrize("method", ["weight_only", "vectorwise"])
def test_packed_layers_compile_in_one_graph(method):
    torch.manual_seed(0)
    torch.compiler.reset()
    net = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4))
    quantize_(net, method, bits=4)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    values = torch.randn(6, 12)
    with torch.no_grad():
        torch.testing.assert_close(compiled(values), net(values), rtol=1e-3, atol=1e-4)


def test_an_embedding_looks_packed_rows_up():
    net = nn.Sequential(nn.Embedding(11, 13))
    quantize_(net, bits=3, group_size=4, mapping="affine")
    table = net[0].dequantize()
    for indices in (torch.tensor(3), torch.tensor([[1, 2], [3, 10]]), torch.empty(2, 0, dtype=torch.long)):
        assert torch.equal(net(indices), table[indices])
