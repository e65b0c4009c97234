"""Will GPT-2 medium train on a 12 GB card? Asked on a machine without one; some seconds on a CPU."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_memprec import MemoryOverflowError, MemoryPreflight


class LanguageModel(pl.LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=layers, n_head=16))

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def main(layers: int = 24) -> None:
    tokens = torch.randint(0, 50257, (64, 1024))
    trainer = pl.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[MemoryPreflight(device="RTX 3060 12GB", stop_after=True)],
    )
    try:
        trainer.fit(LanguageModel(layers), DataLoader(tokens, batch_size=8))
    except MemoryOverflowError as error:
        print(f"MemoryOverflowError: {error}")


if __name__ == "__main__":
    main()
