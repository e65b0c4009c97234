"""Models of sequences that ``benchmarks/soak.py`` draws at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._soak_draw import CHECKPOINTING, DROPOUTS, Draw, Drawn, Stack

__all__ = ["FAMILIES"]

_VOCABULARY = 600


class _Masked(nn.Module):
    """An encoder with a mask of its own."""

    def __init__(self, encoder: nn.Module, mask: str, batch_first: bool) -> None:
        super().__init__()
        self.encoder, self.mask, self.batch_first = encoder, mask, batch_first

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1) if self.batch_first else x.size(0)
        options: dict[str, Any] = {}
        if self.mask == "causal":
            mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=x.dtype)
            options = {"mask": mask, "is_causal": True}
        if self.mask == "padding":
            samples = x.size(0) if self.batch_first else x.size(1)
            options = {
                "src_key_padding_mask": torch.arange(length, device=x.device).repeat(samples, 1) > length - 8
            }
        return self.encoder(x, **options)


def _encoder(draw: Draw) -> Drawn:
    width, heads = draw.pick("width", [64, 128, 192]), draw.pick("heads", [1, 4, 8])
    length, batch = draw.pick("length", [50, 128, 300]), draw.pick("batch", [4, 8, 16])
    inner, layers = draw.pick("inner", [128, 512]), draw.pick("layers", [1, 2, 3])
    options: dict[str, Any] = {
        "dropout": draw.pick("dropout", DROPOUTS), "norm_first": draw.pick("norm_first", [False, True]),
        "batch_first": draw.pick("batch_first", [False, True]), "activation": draw.pick("activation", ["relu", "gelu"]),
    }  # fmt: skip
    mask = draw.pick("mask", ["none", "causal", "padding"])

    def build() -> tuple[nn.Module, Any]:
        layer = nn.TransformerEncoderLayer(width, heads, inner, **options)
        encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        shape = (batch, length) if options["batch_first"] else (length, batch)
        return nn.Sequential(
            _Masked(encoder, mask, options["batch_first"]), nn.Linear(width, 20)
        ), torch.randn(*shape, width)

    return Drawn(build)


class _Attention(nn.Module):
    """Causal attention with rotated positions, fewer heads of keys, fused or written out."""

    def __init__(self, width: int, heads: int, shared: int, how: str, dropout: float) -> None:
        super().__init__()
        self.heads, self.shared, self.how, self.dropout = heads, shared, how, dropout
        self.size = width // heads
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * shared) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.outer(
            torch.arange(x.size(2), device=x.device),
            1e4 ** -(torch.arange(0, self.size, 2, device=x.device) / self.size),
        )
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.shared, self.shared], 1)
        q, k = self._rotated(q), self._rotated(k)
        k, v = (t.repeat_interleave(self.heads // self.shared, 1) for t in (k, v))
        if self.how == "fused":
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        else:
            scores = q @ k.transpose(-1, -2) / self.size**0.5
            hidden = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
            y = nn.functional.dropout(scores.masked_fill(hidden, float("-inf")).softmax(-1), self.dropout) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class _Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * value)


class _Language(nn.Module):
    """A language model; its head may be the embedding's weight."""

    def __init__(self, width: int, body: nn.Module, tied: bool) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(_VOCABULARY, width), body
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


def _decoder(draw: Draw) -> Drawn:
    width, layers = draw.pick("width", [64, 128]), draw.pick("layers", [1, 2])
    heads, how = draw.pick("heads", [2, 4]), draw.pick("attention", ["fused", "written out"])
    shared, dropout, tied = (
        draw.pick("shared", [1, 2]),
        draw.pick("dropout", DROPOUTS),
        draw.pick("tied", [False, True]),
    )
    length, batch = draw.pick("length", [64, 200]), draw.pick("batch", [4, 8])
    checkpointing = draw.pick("checkpointing", CHECKPOINTING)

    def build() -> tuple[nn.Module, Any]:
        blocks: list[nn.Module] = []
        for _ in range(layers):
            blocks += [_Attention(width, heads, shared, how, dropout), _Gated(width)]
        body = Stack(blocks, residual=True, checkpointing=checkpointing)
        return _Language(width, body, tied), torch.randint(_VOCABULARY, (batch, length))

    return Drawn(build)


class _First(nn.Module):
    """The output of a recurrent layer, without its states."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def _recurrent(draw: Draw) -> Drawn:
    kind = draw.pick("kind", [nn.LSTM, nn.GRU, nn.RNN])
    width, hidden = draw.pick("width", [64, 128]), draw.pick("hidden", [100, 256])
    both, layers = draw.pick("bidirectional", [False, True]), draw.pick("layers", [1, 2])
    options: dict[str, Any] = {
        "num_layers": layers, "bidirectional": both, "batch_first": draw.pick("batch_first", [False, True]),
        "dropout": draw.pick("dropout", DROPOUTS) if layers > 1 else 0.0,
        "bias": draw.pick("bias", [True, True, False]),
    }  # fmt: skip
    projected = draw.pick("proj_size", [0, 0, 0, 40]) if kind is nn.LSTM else 0
    length, batch = draw.pick("length", [20, 60]), draw.pick("batch", [16, 64])

    def build() -> tuple[nn.Module, Any]:
        layer = kind(width, hidden, **options, **({"proj_size": projected} if projected else {}))
        out = (projected or hidden) * (2 if both else 1)
        shape = (batch, length) if options["batch_first"] else (length, batch)
        model = nn.Sequential(nn.Embedding(_VOCABULARY, width), _First(layer), nn.Linear(out, 30))
        return model, torch.randint(_VOCABULARY, shape)

    return Drawn(build)


_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128}
_LLAMA = {**_SIZES, "intermediate_size": 352, "num_key_value_heads": 2}
_TRANSFORMERS: dict[str, tuple[str, str, dict[str, int]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 128, "n_layer": 2, "n_head": 4}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_LLAMA, "head_dim": 32}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_LLAMA, "head_dim": 32}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**_SIZES, "intermediate_size": 512}),
    "bert": ("BertConfig", "BertForMaskedLM", {**_SIZES, "intermediate_size": 512}),
    "distilbert": (
        "DistilBertConfig", "DistilBertForMaskedLM", {"dim": 128, "hidden_dim": 512, "n_layers": 2, "n_heads": 4},
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", {**_SIZES, "ffn_dim": 512}),
    "t5": (
        "T5Config", "T5ForConditionalGeneration",
        {"d_model": 128, "d_kv": 32, "d_ff": 352, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
}  # fmt: skip


def _transformers(draw: Draw) -> Drawn:
    name = draw.pick("model", list(_TRANSFORMERS))
    length, batch = draw.pick("length", [64, 150]), draw.pick("batch", [2, 6])
    checkpointing = draw.pick("checkpointing", [False, False, True])

    def build() -> tuple[nn.Module, Any]:
        import transformers

        config, model, sizes = _TRANSFORMERS[name]
        built = getattr(transformers, model)(getattr(transformers, config)(vocab_size=_VOCABULARY, **sizes))
        if checkpointing:
            built.gradient_checkpointing_enable()
        tokens = torch.randint(3, _VOCABULARY, (batch, length))
        return built, {"input_ids": tokens, "labels": tokens}

    return Drawn(build, own_loss=True)


FAMILIES: dict[str, Callable[[Draw], Drawn]] = {
    "encoder": _encoder,
    "decoder": _decoder,
    "recurrent": _recurrent,
    "transformers": _transformers,
}
