"""An FP16 run that goes wrong three times, and what `GradScalerMonitor` says about it. CPU, a few seconds.

The scaler calibrates, one batch holds an outlier, and then the learning rate is too high: gradients explode until
the loss scale falls under the threshold, and the run is stopped. With ``--figure PATH`` the figure of the docs is
drawn.
"""

from __future__ import annotations

import argparse
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec import GradScalerMonitor

STEPS, OUTLIER, EXPLODES = 400, 180, 330


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).float(), y)
        # Stands for a learning rate that is too high: the loss grows by half with every step.
        return loss * 1.5 ** max(0, batch_idx - EXPLODES)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def load_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * 4, 8, generator=generator)
    y = x.sum(1, keepdim=True)
    y[OUTLIER * 4] = 1e4
    return TensorDataset(x, y)


def main(figure: str | None = None) -> GradScalerMonitor:
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning 2.6 uses a name that torch 2.14 deprecates.
    pl.seed_everything(0, verbose=False)
    monitor = GradScalerMonitor(every_n_steps=5, window=50, on_collapse="stop")
    # `precision="16-mixed"` does the same on a GPU; on a CPU Lightning would take bf16 instead.
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=60))
    trainer = pl.Trainer(
        accelerator="cpu", plugins=[plugin], callbacks=[monitor], max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regression(), DataLoader(load_data(), batch_size=4))
    print(f"\n{monitor.summary()}")
    if figure is not None:
        monitor.plot()[0].savefig(figure)
        print(f"Drawn: {figure}")
    return monitor


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--figure", help="file for the figure, such as run.svg")
    main(parser.parse_args().figure)
