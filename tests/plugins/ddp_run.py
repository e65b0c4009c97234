"""One rank of two-process runs; writes what each ended with to a file. Started by ``test_ddp.py``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from plugins.runs import data, fit, make_module, net

CASES = ("accumulate", "unused", "bucket_view", "static_graph", "manual", "overflow", "average")


def loss_of(module, batch, case, batch_idx):
    output = module.net[2](module.net[1](module.net[0](batch[0])))
    # Only rank 1 uses the extra layer, and only in the first of each two micro-batches.
    if case == "unused" and module.global_rank == 1 and batch_idx % 2 == 0:
        output = output + module.net.extra(batch[0])
    loss = nn.functional.mse_loss(output, batch[1])
    return loss * 1e6 if case == "overflow" and module.global_rank == 1 and batch_idx == 1 else loss


def run(case, rank):
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from lightning.pytorch.strategies import DDPStrategy

    def training_step(self, batch, batch_idx):
        if case != "manual":
            return loss_of(self, batch, case, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for rows in (slice(0, 2), slice(2, 4)):
            self.manual_backward(loss_of(self, [tensor[rows] for tensor in batch], case, batch_idx) / 2)
        optimizer.step()
        return None

    network = net(seed=rank + 1)  # Ranks start from different weights; rank zero's count.
    if case == "unused":
        network.extra = nn.Linear(6, 2)
    module = make_module(network, training_step=training_step, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    module.automatic_optimization = case != "manual"
    trainer = fit(
        module,
        "16-master" if case == "overflow" else "bf16-master",
        train=DataLoader(TensorDataset(*(t[rank::2] for t in data(8))), batch_size=4),
        strategy=DDPStrategy(
            find_unused_parameters=case == "unused",
            gradient_as_bucket_view=case == "bucket_view",
            static_graph=case == "static_graph",
        ),
        devices=2,
        use_distributed_sampler=False,
        accumulate_grad_batches=2 if case in ("accumulate", "unused", "bucket_view") else 1,
        callbacks=[EMAWeightAveraging(decay=0.5)] if case == "average" else [],
    )
    scale = trainer.scaler.get_scale() if trainer.scaler else None
    return {
        "state": dict(module.net.state_dict()),
        "halves": [p.detach() for p in module.parameters()],
        "scale": scale,
    }


def main(folder, rank):
    warnings.simplefilter("ignore")
    torch.save({case: run(case, int(rank)) for case in CASES}, Path(folder, f"rank{rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
