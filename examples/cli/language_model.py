"""A Llama-like language model of any size, for planning; it is never built with real weights here."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


class LanguageModel(pl.LightningModule):
    """Llama 2 by its sizes (arXiv 2307.09288); the defaults are those of 7B.

    Args:
        hidden: Width.
        layers: Layers.
        heads: Attention heads.
        key_value_heads: Heads of keys and values.
        intermediate: Width inside of the feed-forward layers.
        vocabulary: Size of the vocabulary.
    """

    def __init__(
        self,
        hidden: int = 4096,
        layers: int = 32,
        heads: int = 32,
        key_value_heads: int = 32,
        intermediate: int = 11008,
        vocabulary: int = 32000,
    ) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            intermediate_size=intermediate,
            vocab_size=vocabulary,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config).train()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Tokens(pl.LightningDataModule):
    """Token ids of one length.

    Args:
        batch_size: Sequences in a batch.
        length: Tokens of a sequence.
    """

    def __init__(self, batch_size: int = 1, length: int = 2048) -> None:
        super().__init__()
        self.batch_size, self.length = batch_size, length

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(64, self.length, dtype=torch.int64), batch_size=self.batch_size)
