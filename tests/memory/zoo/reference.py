"""Reality: the bytes that live tensors take while a real training step runs on the CPU.

The CPU allocator reports every allocation and release to the profiler. Their running sum, on top of what
lived before the profiler started, is the memory of live tensors at every instant. Unseen are the buffers that
oneDNN, MKL and other libraries take from the system's own allocator.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from tests.memory.peaks import peak_of
from tests.memory.zoo.case import Case

__all__ = ["Reality", "measure", "peak_of", "prepare", "storage_bytes", "train_by_hand", "train_with_trainer"]

_STEPS = 2


@dataclass(frozen=True)
class Reality:
    """What a run took.

    Args:
        peak_bytes: Largest sum of live tensors over the run.
        fixed_bytes: Parameters, buffers, gradients and optimizer states after its last step.
    """

    peak_bytes: int
    fixed_bytes: int


def storage_bytes(tree: Any) -> int:
    """Return the bytes of the storages behind the tensors of a tree, each counted once."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(case: Case, *, steps: int = _STEPS, trainer: bool | None = None) -> Reality:
    """Run a case for real.

    Args:
        case: What to run.
        steps: Optimizer steps.
        trainer: Whether a Lightning Trainer runs it; by default where the module is a LightningModule.
    """
    module, batch, optimizer = prepare(case)
    use_trainer = case.loss is None if trainer is None else trainer
    run = train_with_trainer if use_trainer else train_by_hand
    start = storage_bytes([_fixed(module, optimizer), batch])
    peak = start + peak_of(lambda: run(case, module, batch, optimizer, steps))
    return Reality(peak, storage_bytes(_fixed(module, optimizer)))


def prepare(case: Case) -> tuple[nn.Module, Any, Optimizer]:
    """Build module, batch and optimizer of a case as a precision plugin leaves them before the first step."""
    module, batch = case.make()
    if case.precision == "bf16-true":
        module.to(torch.bfloat16)
        batch = tree_map(lambda t: t.bfloat16() if t.is_floating_point() else t, batch)
    optimizer = case.optimizer(module.parameters()) if case.optimizer else module.configure_optimizers()
    return module, batch, optimizer


def _fixed(module: nn.Module, optimizer: Optimizer) -> list[Any]:
    gradients = [p.grad for p in module.parameters()]
    # Adagrad has its state before the first step; that of LBFGS holds lists of tensors.
    states = [dict(state) for state in optimizer.state.values()]
    return [*module.parameters(), *module.buffers(), gradients, states]


def train_by_hand(case: Case, module: nn.Module, batch: Any, optimizer: Optimizer, steps: int) -> None:
    """Train in the order of Lightning's loop (``lightning/pytorch/loops/optimization/automatic.py``).

    The gradients of a step live through the forward pass of the next: they are set to ``None`` just before
    its backward pass. Clipping belongs to the closure that the optimizer calls.
    """

    def micro_step(index: int) -> Tensor:
        with _forward_context(case.precision):
            loss = case.loss(module, batch) / case.accumulate  # type: ignore[misc]
        if index == 0:
            optimizer.zero_grad()
        loss.backward()
        return loss.detach()

    @torch.enable_grad()
    def last_step() -> Tensor:
        loss = micro_step(case.accumulate - 1)
        if case.clip is not None and case.clip_algorithm == "norm":
            nn.utils.clip_grad_norm_(module.parameters(), case.clip)
        elif case.clip is not None:
            nn.utils.clip_grad_value_(module.parameters(), case.clip)
        return loss

    for _ in range(steps):
        for index in range(case.accumulate - 1):
            micro_step(index)
        optimizer.step(last_step)


@contextmanager
def _forward_context(precision: str) -> Iterator[None]:
    # As in Lightning's precision plugins: no weight cache under autocast; a default dtype under true half.
    default = torch.get_default_dtype()
    autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    try:
        if precision == "bf16-true":
            torch.set_default_dtype(torch.bfloat16)
        with autocast if precision == "bf16-mixed" else nullcontext():
            yield
    finally:
        torch.set_default_dtype(default)


def train_with_trainer(case: Case, module: nn.Module, batch: Any, optimizer: Optimizer, steps: int) -> None:
    """Train with a real Trainer on the CPU."""
    import lightning.pytorch as pl

    class Wrapper(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return case.loss(self.inner, batch)  # type: ignore[misc]

    lightning_module = module if isinstance(module, pl.LightningModule) else Wrapper()
    lightning_module.configure_optimizers = lambda: optimizer
    loader = DataLoader(_Repeat(batch, steps * case.accumulate), batch_size=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Few workers, short log interval: nothing about memory.
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_steps=steps, precision=case.precision,
            accumulate_grad_batches=case.accumulate, gradient_clip_val=case.clip,
            gradient_clip_algorithm=case.clip_algorithm, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(lightning_module, loader)


class _Repeat(torch.utils.data.Dataset[Any]):
    """The same batch again and again, never copied."""

    def __init__(self, batch: Any, length: int) -> None:
        self.batch, self.length = batch, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.batch
