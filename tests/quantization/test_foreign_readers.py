"""What other tools make of our files."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_memprec.quantization.checkpoint import load_quantized, save_quantized
from lightning_memprec.quantization.convert import quantize_

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # Of the other tools, on import and use.

TOKENS = torch.arange(10).reshape(1, 10)


def llama(tied=False, seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied, dtype="float32",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def difference(model, reference):
    with torch.no_grad():
        exact, other = reference(TOKENS).logits, model(TOKENS).logits.float()
    return ((other - exact).norm() / exact.norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"exclude": ["lm_head", "Embedding"]},
        {},
        {"method": "vectorwise", "exclude": ["lm_head", "Embedding"]},
        {"mapping": "affine", "exclude": ["lm_head"]},
        {"weight_granularity": "tensor", "exclude": ["lm_head", "Embedding"]},
        {"group_size": 16, "exclude": ["lm_head", "Embedding"]},
        {"bits": 4, "exclude": ["lm_head", "Embedding"]},
        {"bits": 4, "group_size": 16, "exclude": ["lm_head", "Embedding"]},
        {"bits": 4, "method": "vectorwise", "exclude": ["lm_head", "Embedding"]},
        {"bits": 3, "weight_granularity": "tensor", "mapping": "affine", "exclude": ["lm_head", "Embedding"]},
    ],
    ids=["channel", "all", "vectorwise", "affine", "tensor", "group", "4 bits", "4 bits group", "4 bits vectorwise",
         "3 bits affine tensor"],
)  # fmt: skip
def test_transformers_opens_the_folder(tmp_path, options):
    pytest.importorskip("compressed_tensors")
    model = llama()
    reference = copy.deepcopy(model)
    quantize_(model, **options)
    save_quantized(model, tmp_path / "int8")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8", dtype=torch.float32).eval()
    # Half a step is 1/254 of a row's largest weight at 8 bits, 1/14 at 4 and 1/7 at 3 bits with zero points.
    assert 0 < difference(opened, reference) < {8: 0.05, 4: 0.2, 3: 0.4}[options.get("bits", 8)]
    if "method" not in options:  # Kernels may round activations and pack weights in other ways.
        assert difference(opened, model) < 1e-5
    assert torch.equal(load_quantized(tmp_path / "int8", llama(seed=1))(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"exclude": ["lm_head"]}, {"bits": 4, "exclude": ["lm_head"]}],
    ids=["quantized", "left", "left, 4 bits"],
)
def test_transformers_opens_a_model_with_a_tied_head(tmp_path, options):
    pytest.importorskip("compressed_tensors")
    model = llama(tied=True)
    quantize_(model, **options)
    save_quantized(model, tmp_path / "int8")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8", dtype=torch.float32).eval()
    assert difference(opened, model) < 1e-5


@pytest.mark.slow
def test_transformers_opens_a_folder_in_the_bitsandbytes_format(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = llama()
    reference = copy.deepcopy(model)
    quantize_(model, exclude=["lm_head"])
    save_quantized(model, tmp_path / "int8", format="bitsandbytes")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8", device_map="cpu").eval()
    assert type(opened.model.layers[0].mlp.up_proj).__name__ == "Linear8bitLt"
    assert type(opened.lm_head) is nn.Linear
    assert difference(opened, reference) < 0.05
    again = load_quantized(tmp_path / "int8", llama(seed=1))
    # A scale may be one unit in the last place off; the embedding came back in floating point.
    assert difference(again, model) < 1e-5


def test_bitsandbytes_keys(tmp_path):
    net = nn.Sequential(nn.Linear(6, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 3))
    quantize_(net)
    save_quantized(net, tmp_path / "net", format="bitsandbytes")
    tensors = load_file(tmp_path / "net" / "model.safetensors")
    assert tensors["0.weight"].dtype == torch.int8
    assert torch.equal(tensors["0.SCB"], net[0].weight_scale.flatten() * 127)
    assert tensors["0.weight_format"].shape == ()
    assert torch.equal(tensors["1.weight"], net[1].dequantize())
    assert not [key for key in tensors if key.endswith("_scale")]
    config = json.loads((tmp_path / "net" / "config.json").read_text())["quantization_config"]
    assert config["load_in_8bit"]
    again = load_quantized(tmp_path / "net", _sequential)
    assert type(again[1]) is nn.Conv1d
    assert torch.allclose(again[0].weight_scale, net[0].weight_scale, rtol=1.2e-7, atol=0)


def _sequential():
    return nn.Sequential(nn.Linear(6, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 3))


def test_a_head_tied_to_an_embedding_stays_with_it_in_the_bitsandbytes_format(tmp_path):
    model = llama(tied=True)
    quantize_(model)
    save_quantized(model, tmp_path / "int8", format="bitsandbytes")
    again = load_quantized(tmp_path / "int8", llama(tied=True, seed=1))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert difference(again, model) < 1e-5


@pytest.mark.parametrize("options", [{"mapping": "affine"}, {"bits": 4}, {"group_size": 2}], ids=str)
def test_what_bitsandbytes_cannot_hold_is_refused(tmp_path, options):
    net = _sequential()
    quantize_(net, **options)
    with pytest.raises(ValueError, match="No layer fits the bitsandbytes format"):
        save_quantized(net, tmp_path / "net", format="bitsandbytes")
    assert list(tmp_path.iterdir()) == []
