# %% [markdown]
# # From an FP16 run to an int8 file
#
# A small network is trained with half-precision weights and FP32 masters. The checkpoint is looked into, the best
# weights become an int8 file, and quality is measured at each station. CPU, some seconds. The data are the 1,797
# handwritten digits that ship with scikit-learn.

# %%
"""From a run with FP16 weights and FP32 masters to an int8 file."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec import (
    GradScalerMonitor,
    MasterWeightPrecision,
    PostTrainingQuantization,
    inspect_checkpoint,
    load_quantized,
    quantize_,
)

warnings.filterwarnings("ignore", ".*does not have many workers.*")
warnings.filterwarnings("ignore", ".*smaller than the logging interval.*")
warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning 2.6 uses a name that torch 2.14 deprecates.
folder = Path(tempfile.mkdtemp())


# %%
class Digits(pl.LightningModule):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(10, average="micro")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images).float(), labels)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy.update(self(images).float(), labels)
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
x, y = torch.tensor(images, dtype=torch.float32).div(16)[order], torch.tensor(labels)[order]
train = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=100, shuffle=True)
val = DataLoader(TensorDataset(x[1200:], y[1200:]), batch_size=597)

# %% [markdown]
# ## Train in FP16
#
# `MasterWeightPrecision("16-master")` takes the place of `precision=`: weights, activations and gradients are float16,
# the optimizer steps FP32 masters, and the loss is scaled. `PostTrainingQuantization` waits for the end of the run. It
# may lose one point of accuracy; if it lost more, it would keep layers in floating point, or export nothing.

# %%
pl.seed_everything(0, verbose=False)
quantization = PostTrainingQuantization(
    monitor="val_acc", mode="max", max_degradation=0.01, degradation="absolute"
)
trainer = pl.Trainer(
    accelerator="cpu",
    max_epochs=5,
    plugins=[MasterWeightPrecision("16-master")],
    callbacks=[
        ModelCheckpoint(folder, filename="best", monitor="val_acc", mode="max"),
        GradScalerMonitor(),
        quantization,
    ],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Digits()
trainer.fit(module, train, val)
print(f"the module computes in {module.net[0].weight.dtype}")

# %% [markdown]
# ## What the checkpoint holds
#
# The weights in the file are the masters, not the rounded copies that the module computed with.

# %%
checkpoint = inspect_checkpoint(folder / "best.ckpt")
print(checkpoint.verdict, f"Scaler: {checkpoint.scalers}")

# %% [markdown]
# ## The int8 file

# %%
print(quantization.report)
before, after = quantization.metrics_before["val_acc"], quantization.metrics_after["val_acc"]
print(f"\naccuracy {before:.2%} in FP32, {after:.2%} in int8: {quantization.path}")

# %% [markdown]
# Loaded again it computes what was measured. One scale for each output channel rounds weights to 127 steps of their
# largest; the outputs move by less than a hundredth.

# %%
int8 = load_quantized(quantization.path, Digits).eval()
state = torch.load(folder / "best.ckpt", weights_only=True)["state_dict"]
fp32 = Digits().eval()
fp32.load_state_dict(state)


def compare(name: str, net: nn.Module) -> float:
    with torch.no_grad():
        expected, got = fp32(x[1200:]), net(x[1200:])
    distance = ((got - expected).norm() / expected.norm()).item()
    accuracy = (got.argmax(1) == y[1200:]).float().mean().item()
    print(f"{name:24} outputs off by {distance:7.2%}, accuracy {accuracy:.2%}")
    return distance


compare("FP32 masters", fp32)
off_int8 = compare("int8", int8)

# %% [markdown]
# ## Four bits
#
# At 4 bits there are 15 steps instead of 255, and rounding each weight to the nearest one costs more. GPTQ lets the
# weights that are still free make up for each error, on training batches.

# %%
batches = [images for images, _ in train]


def four_bits(method: str, **options: object) -> nn.Module:
    net = Digits().eval()
    net.load_state_dict(state)
    quantize_(net, method, bits=4, **options)
    return net


off_nearest = compare("int4, to the nearest", four_bits("weight_only"))
off_gptq = compare("int4, GPTQ", four_bits("gptq", calibration=batches, method_options={"act_order": True}))

# %%
assert before - after <= 0.01
assert off_int8 < 0.01 < off_nearest
assert off_gptq < off_nearest

# %% [markdown]
# Which bits and which method depend on the model and on what you measure. `PostTrainingQuantization(method="gptq",
# scheme={"bits": 4})` does the last step after `fit`, with your own validation as the judge.
