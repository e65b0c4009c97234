"""LightningModules: their reality is a real Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

__all__ = ["Classifier", "encoder_module", "vit_module"]


class Classifier(pl.LightningModule):
    """Cross-entropy over the last dimension of the model's output, AdamW, a logged loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        logits = self.model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        self.log("loss", loss, batch_size=len(inputs))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def encoder_module() -> tuple[pl.LightningModule, Any]:
    """Return a small pre-norm encoder and its batch."""
    layer = nn.TransformerEncoderLayer(192, 6, 768, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(192, 20))
    return Classifier(model), (torch.randn(8, 128, 192), torch.randint(20, (8, 128)))


def vit_module() -> tuple[pl.LightningModule, Any]:
    """Return a small vision transformer with stochastic depth, and its batch."""
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=112, num_classes=10, drop_path_rate=0.1)
    return Classifier(model), (torch.randn(16, 3, 112, 112), torch.randint(10, (16,)))
