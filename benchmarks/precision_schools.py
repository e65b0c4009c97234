"""Compare the schools of half-precision training: what each loses against FP32, on this machine.

Run: ``python -m benchmarks.precision_schools [--figure docs/assets/precision_schools.svg]``. Three measurements:

1. One weight at 1.0 under Adam: does it move at all?
2. Many weights under AdamW with the same gradients: which share moves, and how far is it from FP32?
3. A small network trained by Lightning: does the loss fall as in FP32?
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from optimi import AdamW as KahanAdamW
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.optim import _AdamW as StochasticAdamW

from benchmarks._machine import describe_machine
from lightning_memprec import MasterWeightPrecision, StagnationMonitor

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LEARNING_RATES = (1e-5, 1e-4, 1e-3)
STEPS = 1000
NETWORK_STEPS = 300
LAST = 20  # Losses that are averaged: single batches are noisy.


def adamw(parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr)


def kahan_adamw(parameters, lr):
    # Torch's defaults in place of optimi's own.
    return KahanAdamW(parameters, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, foreach=False)


def stochastic_adamw(parameters, lr):
    return StochasticAdamW(parameters, lr=lr, weight_decay=0.01, bf16_stochastic_round=True)


def one_weight() -> None:
    """Adam at w = 1, lr 1e-5, 1000 steps."""
    print(f"\n1. One weight at 1.0, Adam, lr 1e-5, {STEPS} steps, two constant gradients")
    print(f"{'':<8}{'gradient':>9}{'pure half':>14}{'FP32 master':>14}{'its half copy':>15}")
    for name, dtype in HALVES.items():
        for gradient in (1.0, -1.0):
            half, master = (nn.Parameter(torch.ones(1, dtype=d)) for d in (dtype, torch.float32))
            optimizers = [torch.optim.Adam([p], lr=1e-5) for p in (half, master)]
            for _ in range(STEPS):
                for parameter, optimizer in zip((half, master), optimizers, strict=True):
                    parameter.grad = torch.full_like(parameter, gradient)
                    optimizer.step()
            copy = master.detach().to(dtype)
            print(f"{name:<8}{gradient:>9}{half.item():>14.8f}{master.item():>14.8f}{copy.item():>15.8f}")


def walk(make: Callable, start: Tensor, lr: float, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Return the weights after 1000 steps, and the bytes of the optimizer's states.

    Each weight has a lasting gradient and noise as strong as that.
    """
    generator = torch.Generator().manual_seed(1)
    drift = torch.randn(start.shape, generator=generator)
    parameter = nn.Parameter(start.clone().to(dtype))
    torch.manual_seed(0)  # Stochastic rounding draws from the global generator.
    optimizer = make([parameter], lr)
    for _ in range(STEPS):
        gradient = drift + torch.randn(start.shape, generator=generator)
        parameter.grad = gradient.bfloat16().to(dtype)
        optimizer.step()
    states = (s for s in optimizer.state[parameter].values() if isinstance(s, Tensor) and s.numel() > 1)
    return parameter.detach(), sum(s.nbytes for s in states)


def many_weights(count: int = 10_000) -> None:
    """AdamW on normal weights, by school."""
    print(f"\n2. {count:,} weights from N(0, 1), AdamW, {STEPS} steps with the same bfloat16 gradients")
    print(f"{'school':<28}{'bytes':>8}" + "".join(f"{'lr ' + format(lr, 'g'):>22}" for lr in LEARNING_RATES))
    start = torch.randn(count, generator=torch.Generator().manual_seed(0)).bfloat16()
    schools = {
        "pure bf16": (adamw, torch.bfloat16),
        "bf16, stochastic rounding": (stochastic_adamw, torch.bfloat16),
        "bf16, Kahan summation": (kahan_adamw, torch.bfloat16),
        "half copy of FP32 masters": (adamw, torch.float32),
    }
    exact = {lr: walk(adamw, start, lr, torch.float32)[0] for lr in LEARNING_RATES}
    for name, (make, dtype) in schools.items():
        cells = []
        for lr in LEARNING_RATES:
            weights, state_bytes = walk(make, start, lr, dtype)
            found = weights.bfloat16()
            moved = (found != start).float().mean().item()
            error = (found.float() - exact[lr]).abs().mean().item()
            cells.append(f"{moved:>9.1%} {error:>12.2e}")
        # The half weight itself, its master if there is one, and the states.
        size_bytes = 2 + (weights.element_size() if dtype == torch.float32 else 0) + state_bytes // count
        print(f"{name:<28}{size_bytes:>8}" + "".join(cells))
    print("bytes: weights, masters and optimizer states of one parameter; gradients come on top")
    print("each cell: share of weights that moved; mean distance of the half weights from the FP32 run")


class Regression(LightningModule):
    """A small network on a task that a random network of the same shape poses."""

    def __init__(self, make: Callable, lr: float):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1)
        )
        self.make, self.lr, self.losses = make, lr, []

    def training_step(self, batch, batch_idx):
        """Return the squared error, computed in FP32 in every precision."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs).float(), targets.float())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        """Return the school's optimizer."""
        return self.make(self.parameters(), self.lr)


def data() -> DataLoader:
    """Return 64 samples a batch; targets have mean 0 and variance 1."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 1))
    inputs = torch.randn(64 * NETWORK_STEPS, 32)
    with torch.no_grad():
        targets = teacher(inputs)
    return DataLoader(TensorDataset(inputs, (targets - targets.mean()) / targets.std()), batch_size=64)


def train(options: dict, make: Callable, lr: float) -> tuple[list[float], str]:
    """Return the losses of all steps and what the monitor says."""
    model, monitor = Regression(make, lr), StagnationMonitor(every_n_steps=10)
    Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[monitor], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    ).fit(model, data())  # fmt: skip
    return model.losses, monitor.in_words()


def network(figure: Path | None) -> None:
    """Losses of a network by Lightning precision."""
    schools = {
        "32-true": ({"precision": "32-true"}, adamw),
        "bf16-mixed": ({"precision": "bf16-mixed"}, adamw),
        "bf16-master": ({"plugins": lambda: MasterWeightPrecision("bf16-master")}, adamw),
        "16-master": ({"plugins": lambda: MasterWeightPrecision("16-master")}, adamw),
        "bf16-true": ({"precision": "bf16-true"}, adamw),
        "bf16-true, stochastic": ({"precision": "bf16-true"}, stochastic_adamw),
        "bf16-true, Kahan": ({"precision": "bf16-true"}, kahan_adamw),
        "16-true": ({"precision": "16-true"}, adamw),
    }
    print(f"\n3. Regression, {NETWORK_STEPS} AdamW steps: mean of the last {LAST} losses")
    print(f"{'precision':<28}" + "".join(f"{'lr ' + format(lr, 'g'):>12}" for lr in LEARNING_RATES))
    curves, said = {}, {}
    for name, (options, make) in schools.items():
        means = []
        for lr in LEARNING_RATES:
            built = {key: value() if callable(value) else value for key, value in options.items()}
            losses, words = train(built, make, lr)
            means.append(statistics.fmean(losses[-LAST:]))
            if lr == LEARNING_RATES[1]:
                curves[name], said[name] = losses, words
        print(f"{name:<28}" + "".join(f"{mean:>12.5f}" for mean in means))
    print(f"\nStagnationMonitor at lr {LEARNING_RATES[1]:g}:")
    for name in ("32-true", "bf16-master", "bf16-true"):
        print(f"{name:<13} {said[name]}")
    if figure is not None:
        draw(curves, figure)
        print(f"\nfigure: {figure}")


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draw running means of the losses."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "precision_schools"  # The same file from the same losses.
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for drawn, (name, losses) in enumerate(curves.items()):
        means = torch.tensor(losses).unfold(0, LAST, 1).mean(1)
        if means.isfinite().all():
            # Most curves lie on each other: each is narrower than the one below it.
            axes.plot(range(LAST, len(losses) + 1), means, label=name, linewidth=1.5 * (len(curves) - drawn))
    axes.set(xlabel="step", ylabel=f"loss, mean of {LAST} steps", title=f"AdamW, lr {LEARNING_RATES[1]:g}")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", type=Path, help="write the loss curves of part 3 here (SVG)")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    print(f"{describe_machine()}, torch-optimi {version('torch-optimi')}, torchao {version('torchao')}")
    # Torchao compiles its step, which takes longer than this whole script; the arithmetic is the same.
    torch.compiler.set_stance("force_eager")
    one_weight()
    many_weights()
    network(options.figure)


if __name__ == "__main__":
    main()
