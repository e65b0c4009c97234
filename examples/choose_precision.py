"""Which precision for which card, and whether it trains as well as FP32: a small network on a CPU."""

from __future__ import annotations

import torch
from torch import nn

from lightning_memprec import choose_precision, compare_precisions


def main(steps: int = 10) -> None:
    for card in ("GTX1080Ti", "T4", "V100-32GB", "A100-80GB", "RTX 4090"):
        print(f"{card:<12}{choose_precision(card).precision}")
    print(f"\n{choose_precision()}\n")

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 10))
    teacher = nn.Linear(64, 10)
    batches = []
    for _ in range(steps):
        x = torch.randn(128, 64)
        batches.append((x, teacher(x).argmax(dim=1)))
    comparison = compare_precisions(
        network,
        batches,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        loss=lambda module, batch: nn.functional.cross_entropy(module(batch[0]), batch[1]),
        steps=steps,
        capabilities=choose_precision("T4").capabilities,
    )
    print(comparison)


if __name__ == "__main__":
    main()
