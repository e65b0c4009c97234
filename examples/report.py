"""Write the report of a run as a page, as JSON and as a memory snapshot; some seconds on a CPU."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from lightning_memprec import estimate_memory
from lightning_memprec.report import judge, save_report


class Language(nn.Module):
    def __init__(self, layers: int, width: int = 1024, vocabulary: int = 32_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def main(layers: int = 24, folder: str = "reports") -> None:
    start = time.perf_counter()
    estimate = estimate_memory(
        lambda: Language(layers),
        torch.zeros(8, 1024, dtype=torch.long),
        optimizer=torch.optim.AdamW,
        precision="bf16-mixed",
        device="A100-40GB",
    )
    print(f"traced {len(estimate.events.order):,} events in {time.perf_counter() - start:.1f} s")
    print(estimate)
    verdict = judge(estimate.minimum_device_bytes, 40 * 1024**3, safety_margin=0.05)
    for name in ("run.html", "run.json", "run.pickle"):
        start, path = time.perf_counter(), Path(folder, name)
        save_report(path, estimate, verdict)
        print(f"{path}: {path.stat().st_size / 1024:,.0f} KiB in {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
