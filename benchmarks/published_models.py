"""Models, batches and losses of the published runs, rebuilt without storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "XMEM_CNNS",
    "XMEM_TRANSFORMERS",
    "Logits",
    "adamw_8bit",
    "chunked_language_model",
    "classification",
    "criterion",
    "language_model",
    "litgpt_lora",
    "llama_3b",
    "llama_3b_ia3",
    "llama_3b_lora",
    "llama_rms_norm",
    "pictures",
    "repeated_norm",
    "timm_model",
    "tokens",
    "torchvision_cnn",
]

Loss = Callable[[nn.Module, Any], Tensor]
Build = Callable[[], nn.Module]

# -- models --------------------------------------------------------------------------------------------

XMEM_CNNS = {
    "ConvNeXtTiny": "convnext_tiny",
    "MnasNet": "mnasnet1_0",
    "MobileNetV2": "mobilenet_v2",
    "ResNet101": "resnet101",
    "VGG16": "vgg16",
}


def torchvision_cnn(name: str, classes: int = 1000) -> Build:
    def build() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(num_classes=classes)

    return build


def timm_model(name: str, classes: int = 1000) -> Build:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=classes)

    return build


def _transformer(kind: str, **config: Any) -> Build:
    def build() -> nn.Module:
        import transformers

        transformers.AttentionInterface.register("sdpa_with_copies", _sdpa_with_copies)
        transformers.AttentionMaskInterface.register("sdpa_with_copies", transformers.masking_utils.sdpa_mask)
        config_type = getattr(transformers, f"{kind.split('For')[0].removesuffix('LMHeadModel')}Config")
        model: nn.Module = getattr(transformers, kind)(config_type(**config))
        return model.train()

    return build


def _sdpa_with_copies(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers 4.51 called it: dense query, keys and values, one for every head."""
    groups = query.size(1) // key.size(1)
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    query, key, value = (t.contiguous() for t in (query, key, value))
    output = F.scaled_dot_product_attention(
        query, key, value, attention_mask, options.get("dropout", 0.0), is_causal=attention_mask is None
    )
    return output.transpose(1, 2).contiguous(), None


def _kept_keys(encoder_decoder: bool) -> Any:
    """A cache that keeps the first keys and values as they come, as transformers 4.51 did; newer ones copy them.

    With labels and ``use_cache``, the default, a model's output holds it until the next output replaces it.
    """
    from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

    class KeptLayer(DynamicLayer):
        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.keys, self.values, self.is_initialized = keys, values, True
            return keys, values

    caches = [Cache(layer_class_to_replicate=KeptLayer) for _ in range(1 + encoder_decoder)]
    return EncoderDecoderCache(*caches) if encoder_decoder else caches[0]


# The runs had transformers 4.51.3, as their repository's container says.
XMEM_TRANSFORMERS = {
    "gpt-neo-125M": _transformer(
        "GPTNeoForCausalLM",
        hidden_size=768, num_layers=12, num_heads=12, attention_types=[[["global", "local"], 6]],
        max_position_embeddings=2048, vocab_size=50257,
    ),
    "Cerebras-GPT-111M": _transformer(
        "GPT2LMHeadModel",
        n_embd=768, n_layer=10, n_head=12, n_inner=3072, n_positions=2048, activation_function="gelu",
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation="sdpa_with_copies",
    ),
    "T5-small": _transformer(
        "T5ForConditionalGeneration",
        d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, vocab_size=32128, decoder_start_token_id=0,
        attn_implementation="eager",  # The only one that T5 had in 2025.
    ),
    "Qwen3-4B": _transformer(
        "Qwen3ForCausalLM",
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, attn_implementation="sdpa_with_copies",
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": _transformer(
        "Qwen2ForCausalLM",
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, tie_word_embeddings=False, attn_implementation="sdpa_with_copies",
    ),
}  # fmt: skip

llama_3b = _transformer(
    "LlamaForCausalLM",
    vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
    num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=True,
)  # fmt: skip


def _adapted(base: Build, kind: str, **config: Any) -> Build:
    """A frozen bfloat16 base with float32 adapters."""

    def build() -> nn.Module:
        import peft

        model = base().to(torch.bfloat16)
        adapter = getattr(peft, kind)(task_type="CAUSAL_LM", **config)
        return peft.get_peft_model(model, adapter)

    return build


llama_3b_lora = _adapted(
    llama_3b, "LoraConfig", r=32, lora_alpha=64, lora_dropout=0.0, target_modules=["v_proj", "q_proj"]
)
llama_3b_ia3 = _adapted(
    llama_3b,
    "IA3Config",
    target_modules=["down_proj", "v_proj", "k_proj"],
    feedforward_modules=["down_proj"],
)


def litgpt_lora(name: str) -> Build:
    """LitGPT's own model with its own adapters, in bfloat16 throughout."""

    def build() -> nn.Module:
        from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

        adapters = {
            "lora_r": 8,
            "lora_alpha": 16,
            "lora_dropout": 0.05,
            "lora_query": True,
            "lora_value": True,
        }
        model: nn.Module = GPT(Config.from_name(name, **adapters))
        mark_only_lora_as_trainable(model)
        return model.to(torch.bfloat16)

    return build


class Logits(nn.Module):
    """Logits that are a leaf, so that their gradient adds up from step to step."""

    def __init__(self, rows: int, classes: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.empty(rows, classes))

    def forward(self) -> Tensor:
        return self.logits


def llama_rms_norm() -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(8192)


def adamw_8bit(parameters: Any) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, weight_decay=0)  # type: ignore[no-any-return]


# -- batches -------------------------------------------------------------------------------------------


def pictures(batch: int, side: int, classes: int) -> Callable[[], Any]:
    """Pictures of three channels with labels."""
    return lambda: (
        torch.empty(batch, 3, side, side, device="meta"),
        torch.zeros(batch, dtype=torch.int64).remainder(classes),
    )


def tokens(batch: int, length: int, *, masked: bool = False) -> Callable[[], dict[str, Tensor]]:
    def build() -> dict[str, Tensor]:
        ids = torch.zeros(batch, length, dtype=torch.int64)
        mask = {"attention_mask": torch.ones_like(ids)} if masked else {}
        return {"input_ids": ids, **mask, "labels": ids.clone()}

    return build


# -- losses, with what a plain loop keeps --------------------------------------------------------------


class _EarlyZeroGrad:
    """Clears gradients before the forward pass of a step's first micro-batch, where Lightning does it after."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._calls = 0

    def __call__(self, module: nn.Module) -> None:
        if self._calls % self._micro_batches == 0:
            module.zero_grad()
        self._calls += 1


def classification(
    *, late_zero_grad: bool = False, micro_batches: int = 1, label_smoothing: float = 0.0
) -> Loss:
    """Cross-entropy in a loop whose variable still holds the outputs of the step before.

    Args:
        late_zero_grad: Whether gradients are cleared after the forward pass, as Lightning does; otherwise
            before it.
        micro_batches: Micro-batches a step.
        label_smoothing: Of the cross-entropy.
    """
    kept: dict[str, Tensor] = {}
    zero_grad = _EarlyZeroGrad(micro_batches)

    def loss(module: nn.Module, batch: Any) -> Tensor:
        if not late_zero_grad:
            zero_grad(module)
        images, labels = batch
        kept["outputs"] = module(images)
        return F.cross_entropy(kept["outputs"], labels, label_smoothing=label_smoothing)

    return loss


def language_model(*, late_zero_grad: bool = False, keep_keys: bool = False) -> Loss:
    """The model's own loss, in a loop whose variable still holds the outputs of the step before.

    Args:
        late_zero_grad: Whether gradients are cleared after the forward pass; otherwise before it.
        keep_keys: Whether the outputs hold keys and values as the transformers of 2025 kept them.
    """
    kept: dict[str, Any] = {}

    def loss(module: nn.Module, batch: Any) -> Tensor:
        if not late_zero_grad:
            module.zero_grad()
        cache = {"cache": _kept_keys(module.config.is_encoder_decoder)} if keep_keys else {}  # type: ignore[union-attr]
        kept["outputs"] = module(**batch, **cache)
        result: Tensor = kept["outputs"].loss
        return result

    return loss


def chunked_language_model(chunk: int = 128) -> Loss:
    """LitGPT's loss: head and cross-entropy on pieces of the sequence."""

    def loss(module: nn.Module, batch: Any) -> Tensor:
        from litgpt.utils import chunked_cross_entropy

        logits = module(batch["input_ids"], lm_head_chunk_size=chunk)
        logits[-1] = logits[-1][..., :-1, :]
        result: Tensor = chunked_cross_entropy(logits, batch["labels"][..., 1:], chunk_size=chunk)
        return result

    return loss


def criterion(module: nn.Module, labels: Tensor) -> Tensor:
    return F.cross_entropy(module(), labels)


def repeated_norm() -> Loss:
    """Forward and backward on one leaf whose gradient and whose last graph are kept."""
    kept: dict[str, Any] = {}

    def loss(module: nn.Module, data: Tensor) -> Tensor:
        if "leaf" not in kept:
            kept["leaf"], kept["gradient"] = data.clone().requires_grad_(), torch.empty_like(data)
        kept["output"] = module(kept["leaf"])
        kept["output"].backward(kept["gradient"], retain_graph=True)
        return torch.zeros((), device=data.device, requires_grad=True)

    return loss
