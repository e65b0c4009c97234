# %% [markdown]
# # A loss scale that collapses
#
# FP16 holds nothing above 65,504. `GradScaler` multiplies the loss so that small gradients survive, and when one
# overflows it skips the step and halves the scale. That heals a scale that was too large. It cannot heal a network
# that overflows at *any* scale: then every step is skipped, the scale falls and falls, and the loss still looks fine.
#
# Here is such a run, what `GradScalerMonitor` says about it, and the run mended. CPU, some seconds.

# %%
"""A loss scale that collapses, what GradScalerMonitor says, and the run mended."""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec import GradScalerMonitor

warnings.filterwarnings("ignore", ".*does not have many workers.*")
warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning 2.6 uses a name that torch 2.14 deprecates.

# %% [markdown]
# ## The run
#
# The network has a GELU written by hand, as many codes do. That goes well up to 256, whose square is 65,536. From batch
# 40 on a sensor sends millimeters instead of meters, and activations are some thousands.


# %%
class HandmadeGELU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * (x * x * x))))


class Regression(pl.LightningModule):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), activation, nn.LayerNorm(32), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).float(), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def make_data(batches: int = 120, size: int = 16) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batches * size, 8, generator=generator)
    y = x.sum(1, keepdim=True).sign()
    x[40 * size :] *= 1000
    return DataLoader(TensorDataset(x, y), batch_size=size)


def train(activation: nn.Module, **settings: object) -> GradScalerMonitor:
    pl.seed_everything(0, verbose=False)
    monitor = GradScalerMonitor(every_n_steps=10, **settings)
    trainer = pl.Trainer(
        accelerator="cpu",
        # On a GPU `precision="16-mixed"` is enough. On a CPU Lightning would take bf16, which needs no scaler.
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))],
        callbacks=[monitor],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression(activation)
    trainer.fit(module, make_data())
    print(f"\n{trainer.global_step} steps, last loss {trainer.callback_metrics['loss']:.3f}")
    print(f"loss scale {trainer.precision_plugin.scaler.get_scale():g}")
    return monitor


# %%
broken = train(HandmadeGELU())

# %% [markdown]
# The loss is an ordinary number. Why? Forward, the cube is infinite, its tanh is 1, and the output is right. Backward,
# the slope of tanh is 0 there, and 0 times an infinite square is NaN. So each step is skipped from batch 40 on, nothing
# is learned any more, and no smaller scale can help.
#
# ## What the monitor says

# %%
for event in broken.events:
    print(f"step {event.step}, {event.kind} ({event.severity})\n  {event.message}\n")

# %% [markdown]
# It names the batch where it began and the first parameter without a finite gradient: the linear layer *before* the
# GELU. `GradScalerMonitor(on_collapse="stop")` ends such a run instead of wasting the night.
#
# ## The run mended
#
# The built-in GELU computes in FP32 inside. One line:

# %%
mended = train(nn.GELU(approximate="tanh"))
for event in mended.events:
    print(f"step {event.step}, {event.kind} ({event.severity})")

# %%
assert any(event.kind == "collapse" for event in broken.events)
assert not any(event.severity == "warning" for event in mended.events)

# %% [markdown]
# Where the hardware has bfloat16, `precision="bf16-mixed"` is another way out: its range is that of FP32, and it needs
# no scaler. `lightning-memprec precision` tells.
