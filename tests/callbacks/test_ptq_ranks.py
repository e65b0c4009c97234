from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memprec.quantization.checkpoint import load_quantized
from lightning_memprec.quantization.convert import quantize_

from .ptq_runs import loader, make_module

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """One start of two processes, for all tests of this file."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "NODE_RANK"):
        environment.pop(name, None)
    script = Path(__file__).with_name("ptq_ddp_run.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, "-W", "ignore", *launcher, str(script), str(folder)]
    done = subprocess.run(command, env=environment, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def expected(best, quantized):
    """What two ranks measure: accuracy over all samples, the loss as the mean of each rank's mean over batches."""
    module = make_module()
    module.load_state_dict(torch.load(best, weights_only=True)["state_dict"])
    module.eval()
    if quantized:
        quantize_(module)
    x, y = loader(20, seed=8).dataset.tensors
    with torch.no_grad():
        logits = module(x)
        losses = [nn.functional.cross_entropy(logits[rank::2], y[rank::2]).item() for rank in range(2)]
    hits = [(logits.argmax(1) == y)[y == k].double().mean().item() for k in (0, 1)]
    return {"val_acc": sum(hits) / 2, "val_loss": sum(losses) / 2}


def test_each_rank_measures_its_share_and_rank_zero_writes(ranks):
    folder, (zero, one) = ranks
    assert zero["before"] == one["before"]
    assert zero["after"] == one["after"]
    for key, quantized in (("before", False), ("after", True)):
        reference = expected(zero["best"], quantized)
        for name, value in reference.items():
            # FP32 sums in another order.
            assert zero[key][name] == pytest.approx(value, rel=1e-5), (key, name)
    assert [rank["rank"] for rank in (zero, one)] == [(0, 0), (1, 1)]
    assert zero["paths"][0] == one["paths"][0] == str(folder / "out" / "int8")
    assert load_quantized(folder / "out" / "int8", type(make_module()))
    assert all(torch.equal(a, b) for a, b in zip(zero["state"].values(), one["state"].values(), strict=True))


def test_the_copy_reduces_and_gathers_over_the_ranks(ranks):
    for rank in ranks[1]:
        assert rank["after"]["samples"] == 20
        assert rank["after"]["ranks"] == 1  # 0 + 1


def test_a_fault_on_one_rank_ends_the_export_on_all(ranks):
    folder, both = ranks
    assert [rank["paths"][1] for rank in both] == ["None", "None"]
    assert not (folder / "faulty").exists()


def test_outliers_that_differ_between_the_ranks_leave_their_layers_alike(ranks):
    folder, (zero, one) = ranks
    x = loader(20, seed=8).dataset.tensors[0]
    assert (x[0::2].abs() >= 2.0).any(0).sum() != (x[1::2].abs() >= 2.0).any(0).sum()
    assert zero["columns"][0] > 0
    assert zero["split"] == one["split"]
    exported = load_quantized(folder / "split" / "int8", type(make_module()))
    assert exported.net[0].outlier_indices is None
