"""Transformers of timm, transformers, peft and torch itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.memory.zoo.case import Case, adamw, model_loss
from tests.memory.zoo.lightning_modules import encoder_module, vit_module

__all__ = ["CASES"]

_VOCABULARY = 4000


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, _VOCABULARY, (batch, length))


def _causal_batch(batch: int, length: int) -> dict[str, Tensor]:
    tokens = _tokens(batch, length)
    return {"input_ids": tokens, "labels": tokens}


def _images(batch: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(10, (batch,))


def _timm(name: str, *, batch: int, size: int, **kwargs: Any) -> tuple[nn.Module, Any]:
    import timm

    return timm.create_model(name, num_classes=10, **kwargs), _images(batch, size)


def _gpt2(
    *, checkpointing: str | None = None, dropout: float = 0.1, lora: bool = False
) -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_VOCABULARY, n_positions=256, n_embd=256, n_layer=4, n_head=8,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    if checkpointing:
        # Newer versions rename the method.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": checkpointing == "reentrant"})
    if lora:
        from peft import LoraConfig, get_peft_model

        targets = LoraConfig(r=8, lora_dropout=0.05, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
        model = get_peft_model(model, targets)
    return model, _causal_batch(4, 256)


def _llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config), _causal_batch(4, 256)


def _bert(*, dropout: float = 0.1) -> tuple[nn.Module, Any]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=_VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    tokens = _tokens(8, 128)
    mask = torch.ones_like(tokens)
    mask[::2, 100:] = 0
    return BertForMaskedLM(config), {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def _t5() -> tuple[nn.Module, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_VOCABULARY,
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=3,
        num_heads=8,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), {"input_ids": _tokens(4, 128), "labels": _tokens(4, 96)}


def _whisper() -> tuple[nn.Module, Any]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=_VOCABULARY, d_model=192, encoder_layers=3, decoder_layers=3, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=768, decoder_ffn_dim=768, max_source_positions=400,
        max_target_positions=64, decoder_start_token_id=0, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    batch = {"input_features": torch.randn(2, 80, 800), "labels": _tokens(2, 48)}
    return WhisperForConditionalGeneration(config), batch


def _encoder(*, dropout: float = 0.1) -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=dropout, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Linear(256, 20)), (torch.randn(8, 128, 256), torch.randint(20, (8, 128)))


_gpt2_checkpointed = partial(_gpt2, checkpointing="plain", dropout=0.0)
_vit_tiny = partial(_timm, "vit_tiny_patch16_224", batch=8, size=224)
_sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def _case(name: str, build: Callable[[], tuple[nn.Module, Any]], **kwargs: Any) -> Case:
    return Case(name=name, family="transformer", build=build, **kwargs)


CASES = [
    _case("gpt2_clip_norm", _gpt2, loss=model_loss, clip=1.0),
    _case("gpt2_bf16_mixed_accumulate", _gpt2, loss=model_loss, precision="bf16-mixed", accumulate=2),
    _case("gpt2_checkpoint_reentrant", partial(_gpt2, checkpointing="reentrant"), loss=model_loss),
    _case("gpt2_checkpoint_not_reentrant", _gpt2_checkpointed, loss=model_loss),
    _case("gpt2_lora", partial(_gpt2, lora=True), loss=model_loss),
    _case("llama_gqa_bf16_true", _llama, loss=model_loss, precision="bf16-true"),
    _case("llama_gqa_sgd", _llama, loss=model_loss, optimizer=_sgd),
    _case("llama_gqa_bf16_mixed", _llama, loss=model_loss, precision="bf16-mixed"),
    _case("bert_adafactor", _bert, loss=model_loss, optimizer=torch.optim.Adafactor),
    _case("bert_no_dropout", partial(_bert, dropout=0.0), loss=model_loss),
    _case("t5", _t5, loss=model_loss),
    _case("whisper", _whisper, loss=model_loss),
    _case("vit_tiny", _vit_tiny),
    _case("vit_tiny_bf16_mixed", _vit_tiny, precision="bf16-mixed"),
    _case(
        "swin",
        partial(
            _timm, "swin_tiny_patch4_window7_224", batch=2, size=224, embed_dim=48, depths=(2, 2, 2, 2),
            num_heads=(2, 4, 8, 16),
        ),
        optimizer=adamw,
    ),
    _case("encoder", _encoder),
    _case(
        "encoder_bf16_true_adagrad_clip_value",
        partial(_encoder, dropout=0.0),
        precision="bf16-true",
        optimizer=partial(torch.optim.Adagrad, lr=0.01),
        clip=0.5,
        clip_algorithm="value",
    ),
    _case("lightning_encoder_accumulate", encoder_module, loss=None, optimizer=None, accumulate=2, clip=1.0),
    _case("lightning_vit_bf16_mixed", vit_module, loss=None, optimizer=None, precision="bf16-mixed"),
]  # fmt: skip
