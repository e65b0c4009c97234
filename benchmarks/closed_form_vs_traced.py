"""Compare the closed form with the traced estimate, on models for which it is right and wrong.

Run ``python benchmarks/closed_form_vs_traced.py`` to print the table, and add ``--write`` to put it into
``docs/closed-form.md``. Needs the extra ``zoo``; no GPU, no weights, a minute or two.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_memprec import estimate_memory
from lightning_memprec._units import GIB
from lightning_memprec.memory.formula import estimate_formula
from lightning_memprec.memory.transformer import TransformerShape

PAGE = Path(__file__).parents[1] / "docs" / "closed-form.md"
MARKED = re.compile(r"(?<=<!-- traced figure -->\n).*(?=<!-- end of traced figure -->)", re.DOTALL)

GPT2 = TransformerShape(layers=12, hidden=768, heads=12, sequence=1024, batch=8, vocabulary=50257)
LLAMA_8B = TransformerShape(layers=32, hidden=4096, heads=32, sequence=2048, batch=1, vocabulary=128256)


@dataclass(frozen=True)
class Case:
    """One model, traced and computed."""

    name: str
    build: Callable[[], nn.Module]
    shape: TransformerShape
    recipe: str
    precision: str
    fused_attention: bool = True
    recompute: bool = False
    count_given: bool = True
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


def gpt2(attention: str = "sdpa") -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(attn_implementation=attention, use_cache=False))


def llama_8b(checkpointing: bool = False) -> nn.Module:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


fused_adamw = partial(torch.optim.AdamW, fused=True)

LLAMA = Case(
    "Llama 3 8B, bf16-true, from its sizes", llama_8b, LLAMA_8B, "half-adam", "bf16-true", count_given=False
)
FUSED = replace(LLAMA, name="and AdamW fused", count_given=True, optimizer=fused_adamw)
CASES = (
    Case("GPT-2, FP32, unfused attention", partial(gpt2, "eager"), GPT2, "fp32-adam", "32-true", False),
    Case("GPT-2, FP32, fused attention", gpt2, GPT2, "fp32-adam", "32-true"),
    Case("GPT-2, bf16-mixed, fused attention", gpt2, GPT2, "amp-adam", "bf16-mixed"),
    LLAMA,
    replace(LLAMA, name="the same, parameter count given", count_given=True),
    FUSED,
    replace(FUSED, name="and recomputed", build=partial(llama_8b, checkpointing=True), recompute=True),
)


def batch_of(shape: TransformerShape) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(shape.batch, shape.sequence, dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
    return module(**batch).loss


def row(case: Case) -> str:
    traced = estimate_memory(
        case.build,
        partial(batch_of, case.shape),
        optimizer=case.optimizer,
        loss=loss_of,
        precision=case.precision,
        device="cuda",
    )
    closed = estimate_formula(
        parameters=traced.total_parameters if case.count_given else None,
        shape=case.shape,
        recipe=case.recipe,
        recompute=case.recompute,
        fused_attention=case.fused_attention,
    )
    peak, fixed = traced.peak_allocated_bytes, traced.breakdown.fixed_bytes
    cells = (
        case.name,
        f"{closed.total_bytes / GIB:.2f}",
        f"{peak / GIB:.2f}",
        f"{closed.total_bytes / peak - 1:+.0%}",
        f"{(closed.total_bytes - closed.fixed_bytes) / GIB:.2f} / {(peak - fixed) / GIB:.2f}",
        f"{traced.peak_phase.name.replace('_', ' ')}",
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    head = (
        "| run | closed form, GiB | traced peak, GiB | difference "
        "| beyond the fixed part, closed / traced, GiB | traced peak falls in |"
    )
    return "\n".join([head, "|---|---|---|---|---|---|", *map(row, CASES), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/closed-form.md")
    args = parser.parse_args()
    text = table()
    print(text)
    if args.write:
        page, found = MARKED.subn(lambda _: text, PAGE.read_text(encoding="utf-8"))
        if found != 1:
            raise SystemExit(f"Expected one marked table in {PAGE}, found {found}.")
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
