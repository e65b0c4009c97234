from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_memprec.quantization import streaming
from lightning_memprec.quantization.checkpoint_layout import QuantizedFileError, layout_of
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.streaming import stream_quantized

from .test_checkpoint import make


@dataclass
class Held:
    """A stored tensor that counts how often it is read."""

    value: torch.Tensor
    reads: int = 0

    @property
    def dtype(self):
        return self.value.dtype

    @property
    def shape(self):
        return self.value.shape

    def read(self):
        self.reads += 1
        return self.value


def held(module):
    return {name: Held(value.detach().clone()) for name, value in module.state_dict().items()}


def streamed(module, weights, *args, **options):
    with torch.device("meta"):
        copy = module()
    return stream_quantized(copy, weights, *args, **options)


def net():
    class Parametrized(type(make())):
        def __init__(self):
            super().__init__()
            self.shared = weight_norm(nn.Linear(8, 8))
            self.again = self.shared

    return Parametrized()


@pytest.mark.parametrize("blocks", [2**22, 5], ids=["whole", "blocks"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "absmax"},
        {"method": "zeropoint"},
        {"method": "llm_int8"},
        {"mapping": "affine_textbook"},
        {"group_size": 3, "bits": 4},
        {"exclude": ["attention", "embedding"]},
    ],
    ids=["weight_only", "absmax", "zeropoint", "llm_int8", "textbook", "groups", "exclude"],
)
@pytest.mark.parametrize("build", [make, net], ids=["plain", "weight_norm"])
def test_tensors_are_those_of_the_model_quantized_in_memory(build, options, blocks, monkeypatch):
    monkeypatch.setattr(streaming, "_BLOCK_ELEMENTS", blocks)
    torch.manual_seed(0)
    module = build()
    plan = streamed(build, held(module), **options)
    quantize_(module, **options)
    expected = module.state_dict()
    assert plan.tensors.keys() | plan.tied.keys() == expected.keys()
    for name, tensor in plan.tensors.items():
        value = tensor.read()
        assert (value.dtype, value.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(value, expected[name]), name
    for alias, name in plan.tied.items():
        assert expected[alias].data_ptr() == expected[name].data_ptr()
    assert plan.layers == layout_of(module)


def test_half_weights_give_layers_in_half():
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
    plan = streamed(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), held(module))
    quantize_(module)
    assert plan.layers == layout_of(module)
    assert plan.tensors["1.weight"].dtype == torch.bfloat16
    assert torch.equal(plan.tensors["0.weight"].read(), module[0].weight)


def test_a_tied_tensor_may_be_in_the_file_once():
    module = make()
    weights = held(module)
    del weights["head.weight"], weights["again.weight"], weights["again.bias"]
    plan = streamed(make, weights)
    quantize_(module)
    assert plan.tied["head.weight"] == "embedding.weight"
    assert torch.equal(plan.tensors["embedding.weight"].read(), module.head.weight)


def test_nothing_is_read_before_it_is_needed():
    weights = held(make())
    plan = streamed(make, weights)
    assert sum(held.reads for held in weights.values()) == 0
    plan.tensors["conv.weight_scale"].read()
    assert {name for name, held in weights.items() if held.reads} == {"conv.weight"}


def test_a_diverged_weight_is_named():
    weights = held(make())
    weights["conv.weight"].value[0, 0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"`conv\.weight` cannot be quantized: 1 of"):
        streamed(make, weights).tensors["conv.weight"].read()


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_a_diverged_weight_is_named_in_blocks(granularity, monkeypatch):
    monkeypatch.setattr(streaming, "_BLOCK_ELEMENTS", 5)
    weights = held(make())
    weights["conv.weight"].value[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"`conv\.weight` cannot be quantized: "):
        streamed(make, weights, weight_granularity=granularity).tensors["conv.weight"].read()


def test_other_weights_are_refused():
    weights = held(make())
    weights["conv.weight"] = Held(torch.ones(3))
    with pytest.raises(
        QuantizedFileError, match=r"'conv.weight' in the shape \[3\], but a `Net` has \[8, 4, 3\]"
    ):
        streamed(make, weights)
    del weights["conv.weight"]
    weights["surplus"] = Held(torch.ones(1))
    with pytest.raises(
        QuantizedFileError, match=r"1 tensors are missing \['conv.weight'\], 1 are not .*'surplus'"
    ):
        streamed(make, weights)
