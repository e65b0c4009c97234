"""A run that cannot fit is refused, mended with the remedy it was offered, trained, and exported in int8.

CPU, about a minute.

The data are the 1,797 handwritten digits that ship with scikit-learn. The memory budget is made up, so that an
ordinary machine plays the part of a small card.
"""

from __future__ import annotations

import logging
import re
import tempfile
import warnings

import lightning.pytorch as pl
import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec import MemoryOverflowError, MemoryPreflight, PostTrainingQuantization, load_quantized

BUDGET = "32MiB"
BATCH_SIZE = 240


class DigitTransformer(pl.LightningModule):
    """Reads an 8x8 image as 16 patches of 2x2."""

    def __init__(self, width: int = 64, depth: int = 3, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(10, average="micro")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.encoder(patches).mean(1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy.update(self(images), labels)
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).div(16).reshape(-1, 1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    return TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440:], y[1440:])


def make_trainer(*callbacks: pl.Callback, **options: object) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    return pl.Trainer(accelerator="cpu", callbacks=list(callbacks), **quiet, **options)


def measured_peak_bytes(train: TensorDataset, batch_size: int, accumulate: int) -> int:
    """Peak of live tensor bytes over two optimizer steps: the sum of the CPU allocator's own events."""
    torch.manual_seed(0)
    model = DigitTransformer()
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    trainer = make_trainer(max_steps=2, accumulate_grad_batches=accumulate)
    loader = DataLoader(train, batch_size=batch_size, drop_last=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        trainer.fit(model, loader)
    events = profiler.profiler.kineto_results.events()
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == "[memory]"]
    total = peak = before
    for size in sizes:
        total += size
        peak = max(peak, total)
    return peak


def main(epochs: int = 40) -> None:
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*have no `val_dataloader`.*")  # The measured steps need none.
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning 2.6 uses a name that torch 2.14 deprecates.
    chatter = ("GPU available", "TPU available", "💡 Tip", "`Trainer.fit` stopped")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: not record.getMessage().startswith(chatter)
    )
    pl.seed_everything(0, verbose=False)
    train, test = load_data()

    print(f"1. A batch of {BATCH_SIZE} on a device with {BUDGET}:\n")
    preflight = MemoryPreflight(device_memory=BUDGET)
    try:
        make_trainer(preflight, max_epochs=1).fit(
            DigitTransformer(), DataLoader(train, BATCH_SIZE, shuffle=True)
        )
    except MemoryOverflowError as error:
        print(f"\nMemoryOverflowError: {error}\n")
        remedy = next(r for r in error.remedies if r.name == "micro_batch" and r.fits)
    print(f"2. Apply the first remedy: {remedy.how}\n")
    batch_size, accumulate = (int(number) for number in re.findall(r"=(\d+)", remedy.how))

    with tempfile.TemporaryDirectory() as folder:
        preflight = MemoryPreflight(device_memory=BUDGET)
        quantization = PostTrainingQuantization(
            dirpath=folder, monitor="val_acc", mode="max", max_degradation=0.01
        )
        trainer = make_trainer(
            preflight,
            quantization,
            max_epochs=epochs,
            accumulate_grad_batches=accumulate,
            num_sanity_val_steps=0,
        )
        trainer.fit(
            DigitTransformer(), DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)
        )
        print(f"\n3. Trained: test accuracy {quantization.metrics_before['val_acc']:.1%}\n")

        report = quantization.report
        exported = load_quantized(quantization.path, DigitTransformer).eval()
    images, labels = test[:]
    with torch.no_grad():
        accuracy = (exported(images).argmax(-1) == labels).float().mean().item()
    print(
        f"4. Exported in int8: {report.bytes_before / 1024:.0f} KiB -> {report.bytes_after / 1024:.0f} KiB, ",
        end="",
    )
    print(f"and the file, loaded again, has a test accuracy of {accuracy:.1%}\n")

    measured = measured_peak_bytes(train, batch_size, accumulate)
    estimated = preflight.estimate.peak_allocated_bytes
    print("5. Estimate beside reality (sum of the allocator's events, two steps):")
    print(f"   estimated {estimated / 2**20:.2f} MiB, measured {measured / 2**20:.2f} MiB, ", end="")
    print(f"difference {(estimated - measured) / measured:+.2%}")


if __name__ == "__main__":
    main()
