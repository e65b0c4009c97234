"""One rank of a two-process run under a memory monitor; writes what it saw to a file. Started by the run tests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

from torch.utils.data import DataLoader

from lightning_memprec.callbacks.memory_monitor import MemoryMonitor
from tests.callbacks.memory_runs import ROWS, CountingMeter, Rows, counting, make_module, prediction
from tests.callbacks.runs import make_trainer
from tests.callbacks.scaler_runs import hearing


def main(folder: str) -> None:
    meter, monitor = CountingMeter(), MemoryMonitor()
    monitor.estimate = prediction()
    # Rank 1 alone gets larger batches, late.
    late = 4 * ROWS if os.environ.get("LOCAL_RANK") == "1" else ROWS
    trainer = make_trainer(
        counting(meter), monitor, strategy="ddp", devices=2, use_distributed_sampler=False,
        enable_checkpointing=True, default_root_dir=folder,
    )  # fmt: skip
    with (
        patch("lightning_memprec.callbacks.memory_monitor.meter_for", lambda device: meter),
        hearing() as said,
    ):
        trainer.fit(make_module(), DataLoader(Rows([ROWS] * 9 + [late] * 3), batch_size=None))
    found = {
        "events": [event.kind for event in monitor.events],
        "printed": [text for _, text in said if "MemoryMonitor" in text],
    }
    Path(folder, f"rank{trainer.global_rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
