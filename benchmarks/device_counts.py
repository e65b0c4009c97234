"""How many cards a GPT-like model needs under FSDP, traced: the table of ``docs/sharding.md``.

Run: ``python -m benchmarks.device_counts``, some minutes.

The counts it stands beside are folk figures for 80 GB cards: two for 7B, "four to start, five safer" for 13B.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks._machine import describe_machine
from lightning_memprec import estimate_memory

_VOCABULARY, _TOKENS = 32_000, 2_048
_DEVICE = "A100-80GB"
# Layers, width, heads; whether activations are recomputed; numbers of cards.
_MODELS = {"7B": ((32, 4096, 32), False, (2, 3, 4)), "13B, recomputed": ((40, 5120, 40), True, (3, 4, 5))}


class GPT(nn.Module):
    """A stack of pre-norm transformer layers between embedding and head."""

    def __init__(self, layers: int, width: int, heads: int, *, recompute: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


def _loss(module: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(tokens).float().flatten(0, 1), tokens.flatten())


def main() -> None:
    print(describe_machine())
    print(f"\nFSDP on {_DEVICE}, bf16-mixed, AdamW, one sequence of {_TOKENS} tokens a card\n")
    print(
        "| model | cards | needed on each, GB | in | fits | fits with 5 % free |\n|---|---|---|---|---|---|"
    )
    for name, (sizes, recompute, counts) in _MODELS.items():
        for count in counts:
            estimate = estimate_memory(
                lambda sizes=sizes, recompute=recompute: GPT(*sizes, recompute=recompute),
                torch.zeros(1, _TOKENS, dtype=torch.int64),
                loss=_loss,
                optimizer=torch.optim.AdamW,
                precision="bf16-mixed",
                device=_DEVICE,
                strategy="fsdp",
                num_devices=count,
            )
            fits = [estimate.fits(_DEVICE, safety_margin=margin) for margin in (0.0, 0.05)]
            row = [name, count, f"{estimate.minimum_device_bytes / 1e9:.1f}", estimate.peak_phase.name, *fits]
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
