"""The estimate of a run with FP32 masters beside real CPU runs of ``MasterWeightPrecision``."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memprec import MasterWeightPrecision, MemoryPreflight
from tests.memory.zoo.reference import peak_of, storage_bytes


class Module(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return self.net(batch).float().pow(2).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def perceptron():
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(256, 256), nn.ReLU())])


def convolution():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 64)
    )


def trainer_with(plugin, callbacks=(), accumulate=1, clip=None):
    return pl.Trainer(
        accelerator="cpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[plugin], callbacks=list(callbacks),
        accumulate_grad_batches=accumulate, gradient_clip_val=clip,
    )  # fmt: skip


MLP = (perceptron, (4, 256))
WIDE = (perceptron, (512, 256))
CONVOLUTION = (convolution, (8, 3, 16, 16))
CASES = {
    "default": (MLP, {}, {}),
    "activations at the peak": (WIDE, {}, {}),
    "accumulating": (WIDE, {}, {"accumulate": 3}),
    "clipping": (MLP, {}, {"clip": 1.0}),
    "low memory": (MLP, {"low_memory": True}, {}),
    "low memory, clipping": (MLP, {"low_memory": True}, {"clip": 1.0}),
    "step in backward": (MLP, {"step_in_backward": True}, {}),
    "float16": (MLP, {"precision": "16-master"}, {}),
    "float16, low memory": (MLP, {"precision": "16-master", "low_memory": True}, {}),
    "batch norm": (CONVOLUTION, {}, {}),
    "a layer kept in FP32": (MLP, {"keep_fp32": ["net.0"]}, {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_peak_is_that_of_a_real_run(name):
    (build, shape), options, run = CASES[name]
    torch.manual_seed(0)
    module, batch = Module(build()), torch.randn(shape)
    preflight = MemoryPreflight(stop_after=True, remedies=False)
    data = DataLoader([batch] * 6, batch_size=None)
    trainer_with(MasterWeightPrecision(**options), [preflight], **run).fit(module, data)
    start = storage_bytes([*module.parameters(), *module.buffers()])
    trainer = trainer_with(MasterWeightPrecision(**options), **run)
    real = start + peak_of(lambda: trainer.fit(module, data))
    assert preflight.estimate.precision == options.get("precision", "bf16-master")
    assert preflight.estimate.peak_allocated_bytes == pytest.approx(real, rel=0.01)


@pytest.mark.filterwarnings("ignore")
def test_the_later_hooks_see_the_same_run():
    """There the module is in half already, and its optimizers hold masters."""
    found = {}
    for hook in ("setup", "on_fit_start"):
        preflight = MemoryPreflight(stop_after=True, remedies=False)
        if hook == "on_fit_start":
            preflight.setup = lambda trainer, module, stage, p=preflight: setattr(
                p, "_next_hook", "on_fit_start"
            )
        data = DataLoader([torch.randn(4, 256)] * 2, batch_size=None)
        trainer_with(MasterWeightPrecision(), [preflight]).fit(Module(perceptron()), data)
        assert preflight.verdict.when == hook
        found[hook] = preflight.estimate.peak_allocated_bytes
    assert found["setup"] == found["on_fit_start"]
