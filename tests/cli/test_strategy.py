"""What a configuration's `trainer.strategy` is read as."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec import estimate_memory
from lightning_memprec._errors import MemPrecError
from lightning_memprec.cli._strategy import read_strategy
from lightning_memprec.memory.sharding.strategies import FullyShard

PATH = "lightning.pytorch.strategies.ModelParallelStrategy"


@pytest.mark.parametrize(
    ("options", "size"),
    [({}, "auto"), ({"tensor_parallel_size": "auto"}, "auto"), ({"tensor_parallel_size": 2}, 2)],
    ids=["left_out", "auto", "two"],
)
def test_model_parallel_keeps_its_tensor_parallel_size(options, size):
    read = read_strategy({"class_path": PATH, "init_args": options})
    assert read == FullyShard(by_module=True, tensor_parallel_size=size)


def test_model_parallel_without_init_args_is_lightnings_default():
    assert read_strategy({"class_path": PATH}) == FullyShard(by_module=True, tensor_parallel_size="auto")


def test_devices_that_cannot_be_grouped_are_told():
    with pytest.raises(MemPrecError, match=r"4 devices cannot be divided into groups of 3 .*multiple"):
        estimate_memory(
            module=lambda: nn.Linear(8, 8),
            batch=torch.empty(2, 8),
            optimizer=torch.optim.SGD,
            device="A100-40GB",
            num_devices=4,
            strategy=FullyShard(tensor_parallel_size=3),
        )
