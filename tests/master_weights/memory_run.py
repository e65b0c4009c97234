"""Bytes per parameter in the phases of a real training run, from the profiler's record of the allocator."""

from __future__ import annotations

import gc
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from lightning_memprec.plugins import MasterWeightPrecision

PHASES = ("forward", "backward", "step")
_STEPS = 3  # The first makes the optimizer's states, and is left out.


def enter(phase):
    """Leave a mark in the profiler's record."""
    with record_function(f"phase:{phase}"):
        pass


class Perceptron(pl.LightningModule):
    """Equal layers and one row of data, so that parameters dominate."""

    def __init__(self, layers, width, options):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
        self.options = options

    def training_step(self, batch, batch_idx):
        """Run the forward pass."""
        enter("forward")
        return self.net(batch).pow(2).mean()

    def backward(self, loss):
        """Run what autograd does, and nothing of the plugin's."""
        enter("backward")
        loss.backward()
        enter("step")

    def configure_optimizers(self):
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), **self.options)


def train(layers, width, options, plugin, trainer_options):
    """Train for a few steps, from building the module on."""
    trainer_options = {"max_steps": _STEPS, **trainer_options}
    batches = _STEPS * trainer_options.get("accumulate_grad_batches", 1)
    for message in (
        ".*LeafSpec.*",
        ".*many workers.*",
        ".*logging interval.*",
    ):  # Lightning's, about other things.
        warnings.filterwarnings("ignore", message=message)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[] if plugin is None else [MasterWeightPrecision(**plugin)],
        **trainer_options,
    )  # fmt: skip
    trainer.fit(Perceptron(layers, width, options), DataLoader(torch.randn(batches, width), batch_size=1))


def bytes_per_parameter(layers, width, options, plugin=None, **trainer_options):
    """Return the largest number of live bytes in each phase, per parameter, after the first step.

    Args:
        layers: Number of layers.
        width: Their width.
        options: Of AdamW.
        plugin: Arguments of the plugin; without them the run is one in FP32.
        trainer_options: Of the Trainer.
    """
    gc.collect()
    gc.disable()  # A collection in the middle would free cycles at an instant that depends on earlier runs.
    try:
        activities = [ProfilerActivity.CPU]
        with (
            warnings.catch_warnings(),
            profile(activities=activities, profile_memory=True, acc_events=True) as profiler,
        ):
            train(layers, width, options, plugin, trainer_options)
    finally:
        gc.enable()
    live, phase, steps, peaks = 0, "", 0, dict.fromkeys(PHASES, 0)
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
        elif event.name().startswith("phase:"):
            phase = event.name().removeprefix("phase:")
            steps += phase == "forward"
        if steps > trainer_options.get("accumulate_grad_batches", 1):
            peaks[phase] = max(peaks[phase], live)
    return {phase: peak / (layers * width * width) for phase, peak in peaks.items()}
