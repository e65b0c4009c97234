from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from .ddp_run import CASES
from .runs import data, net, same

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both ranks ended with, by case; one start serves all."""
    folder = tmp_path_factory.mktemp("ddp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in ("0", "1"):
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).with_name("ddp_run.py")),
            str(folder),
            rank,
        ]
        of_rank = {**environment, "LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": "2"}
        processes.append(
            subprocess.Popen(
                command, env=of_rank, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_process_with_both_halves_of_the_batch(case, ranks):
    left, right = (rank[case] for rank in ranks)
    assert same(left["state"], right["state"])
    assert same(left["halves"], right["halves"])
    assert left["scale"] == right["scale"] == (2.0**14 if case == "overflow" else None)
    expected = two_ranks(case)
    for key, value in left["state"].items():
        # DDP rounds each sum over ranks to half, by up to 2^-9 of gradients below 1; four steps at lr 0.5.
        assert torch.allclose(value, expected[key], rtol=0, atol=4 * 0.5 * 2.0**-9), key
    assert any((value != value.to(left["halves"][0].dtype)).any() for value in left["state"].values())
    assert same([value.to(left["halves"][0].dtype) for value in left["state"].values()], left["halves"])


def half_gradients(masters, case, index, rank):
    """Yield the gradients of one rank in half, for each backward of a batch."""
    dtype = torch.float16 if case == "overflow" else torch.bfloat16
    half = copy.deepcopy(masters).to(dtype)
    rows = torch.arange(8 * index + rank, 8 * index + 8, 2)
    for part in rows.split(2) if case == "manual" else [rows]:
        x, y = (tensor[part].to(dtype) for tensor in data(8))
        output = half[2](half[1](half[0](x)))
        if case == "unused" and rank == 1 and index % 2 == 0:
            output = output + half.extra(x)
        half.zero_grad()
        nn.functional.mse_loss(output, y).backward()
        yield [p.grad for p in half.parameters()]


def two_ranks(case):
    """Two ranks in one process: half gradients of each rank, averaged and summed in FP32."""
    every = 2 if case in ("accumulate", "unused", "bucket_view") else 1
    masters = net(seed=1)
    if case == "unused":
        masters.extra = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.5)
    average = AveragedModel(masters, avg_fn=get_ema_avg_fn(0.5))
    for index in range(8 // 2):
        for rank in range(2):
            for gradients in half_gradients(masters, case, index, rank):
                for master, gradient in zip(masters.parameters(), gradients, strict=True):
                    if gradient is not None:
                        share = gradient.float() / 2 / every / (2 if case == "manual" else 1)
                        master.grad = share if master.grad is None else master.grad + share
        if (index + 1) % every == 0:
            if case != "overflow" or index != 1:
                optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(masters)
    return average.module.state_dict() if case == "average" else masters.state_dict()
