"""What out-of-memory errors say, read; and what is made of it."""

from __future__ import annotations

import builtins
import errno
import json
import sys

import pytest
import torch

from lightning_memprec.memory.post_mortem import MemoryShortage, shortage_in
from lightning_memprec.memory.post_mortem_report import (
    BatchHistory,
    PostMortem,
    describe_batch,
    largest_sites,
    report_text,
)
from lightning_memprec.memory.result import Remedy

MIB, GIB = 2**20, 2**30
HINT = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation.  See documentation for Memory Management"
)

# Messages in PyTorch's own words: from users' reports, with the thread where it is public, or put together from the
# format strings in c10/cuda/CUDACachingAllocator.cpp, c10/xpu/XPUCachingAllocator.cpp and mps/MPSAllocator.mm.
FRAGMENTED = (  # github.com/murong-xu/CADS/issues/4
    "CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of 31.47 GiB of which 12.73 GiB is "
    "free. Including non-PyTorch memory, this process has 18.73 GiB memory in use. Of the allocated memory 9.08 GiB "
    "is allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated." + HINT
)
FULL = (  # github.com/pytorch/pytorch/issues/16417
    "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 11.06 MiB is "
    "free. Including non-PyTorch memory, this process has 23.60 GiB memory in use. Of the allocated memory 22.90 GiB "
    "is allocated by PyTorch, and 194.87 MiB is reserved by PyTorch but unallocated." + HINT
)
SHARED = (
    "CUDA out of memory. Tried to allocate 42.00 MiB. GPU 1 has a total capacity of 47.27 GiB of which 9.38 MiB is "
    "free. Process 644963 has 5.59 MiB memory in use. Process 3053273 has 29.04 GiB memory in use. Process 3120922 "
    "has 14.74 GiB memory in use. Including non-PyTorch memory, this process has 3.14 GiB memory in use. Of the "
    "allocated memory 2.92 GiB is allocated by PyTorch, and 34.62 MiB is reserved by PyTorch but unallocated."
    + HINT
)
CONTAINER = (  # The driver of a container does not name the own process.
    "CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total capacity of 44.34 GiB of which 160.81 MiB is "
    "free. Process 47694 has 44.17 GiB memory in use. Of the allocated memory 43.36 GiB is allocated by PyTorch, and "
    "396.27 MiB is reserved by PyTorch but unallocated." + HINT
)
LIMITED = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 15.00 GiB is "
    "free. Including non-PyTorch memory, this process has 9.00 GiB memory in use. 8.00 GiB allowed; Of the allocated "
    "memory 7.80 GiB is allocated by PyTorch, with 128.00 MiB allocated in private pools (e.g., CUDA Graphs), and "
    "0 bytes is reserved by PyTorch but unallocated." + HINT
)
XPU = (
    "XPU out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 11.93 GiB of which 5.62 MiB is "
    "free. Of the allocated memory 10.43 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
    "unallocated. Please use `empty_cache` to release all unoccupied cached memory."
)
MPS = (
    "MPS backend out of memory (MPS allocated: 17.36 GB, other allocations: 613.56 MB, max allowed: 18.13 GB). Tried "
    "to allocate 192.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory "
    "allocations (may cause system failure)."
)


@pytest.mark.parametrize(
    ("text", "cause", "device", "figures"),
    [
        (FRAGMENTED, "real need", "cuda:0", {"requested_bytes": 22.78, "cached_bytes": 9.35, "missing_bytes": 0.70}),
        (FULL, "fragmentation", "cuda:0", {"total_bytes": 23.65, "allocated_bytes": 22.90}),
        (SHARED, "fragmentation", "cuda:1", {"others_bytes": 44.12}),
        (SHARED.replace("34.62", "3.62"), "other processes", "cuda:1", {"free_bytes": 9.38 / 1024}),
        (CONTAINER, "fragmentation", "cuda:0", {"process_bytes": None, "others_bytes": 44.17}),
        (LIMITED, "limit", "cuda:0", {"allowed_bytes": 8.0, "private_pools_bytes": 0.125, "cached_bytes": 0.0}),
        (XPU, "real need", "xpu:0", {"requested_bytes": 20 / 1024}),
        (MPS, "unknown", "mps", {"allocated_bytes": 17.36, "allowed_bytes": 18.13, "requested_bytes": 0.1875}),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", "unknown", "cuda", {"total_bytes": None}),
        (
            "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
            "per_process_memory_fraction limit. Requested size: 2.00 GiB",
            "limit", "cuda", {"requested_bytes": 2.0, "allowed_bytes": None},
        ),
        ("CUDA error: out of memory", "unknown", "cuda", {"requested_bytes": None}),
        (
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "unknown",
            "cuda",
            {"free_bytes": None},
        ),
    ],
    ids=[
        "short by little", "full", "shared", "others", "container", "limit", "xpu", "mps", "exabyte", "fraction",
        "bare", "cublas",
    ],
)  # fmt: skip
def test_messages_are_read(text, cause, device, figures):
    shortage = shortage_in(torch.OutOfMemoryError(text) if "XPU" in text else RuntimeError(text))
    assert shortage.cause == cause
    assert shortage.device == device
    for name, gib in figures.items():
        value = getattr(shortage, name)
        assert value is None if gib is None else value == pytest.approx(gib * GIB, abs=0.01 * GIB), name


def test_the_real_error_of_the_cpu_allocator_is_read():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    shortage = shortage_in(caught.value)
    assert shortage == MemoryShortage("cpu", requested_bytes=2**62)


def test_errors_of_python_and_numpy_are_read():
    assert shortage_in(MemoryError()).device == "cpu"
    text = "Unable to allocate 3.25 GiB for an array with shape (1, 2) and data type float64"
    assert shortage_in(MemoryError(text)).requested_bytes == int(3.25 * GIB)


def test_the_error_behind_an_error_is_found():
    try:
        try:
            raise RuntimeError(FULL)
        except RuntimeError as first:
            raise ValueError("step failed") from first
    except ValueError as caught:
        error = caught
    assert shortage_in(error).total_bytes == pytest.approx(23.65 * GIB, rel=1e-3)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_the_error_in_a_group_is_found():
    inner = RuntimeError("step failed")
    inner.__cause__ = torch.OutOfMemoryError(FULL)
    group = builtins.ExceptionGroup("two tasks", [ValueError("other"), inner])
    assert shortage_in(group).total_bytes == pytest.approx(23.65 * GIB, rel=1e-3)


@pytest.mark.parametrize(
    ("error", "device"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "cpu"),
        (
            RuntimeError("unable to mmap 1024 bytes from file </dev/shm/x>: Cannot allocate memory (12)"),
            "cpu",
        ),
        (RuntimeError("MKL error: SPARSE_STATUS_ALLOC_FAILED when calling `mkl_sparse_d_mm`"), "cpu"),
        (
            RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
            "cuda",
        ),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), "cuda"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "cuda"),
        (
            RuntimeError("NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'"),
            "cuda",
        ),
    ],
    ids=["fork", "mmap", "mkl", "cusolver", "cufft", "cudnn", "nccl"],
)
def test_libraries_that_run_out_are_recognized(error, device):
    assert shortage_in(error) == MemoryShortage(device)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "no file"), RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")]
)
def test_other_errors_of_libraries_are_left_alone(error):
    assert shortage_in(error) is None


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shape mismatch"), KeyError("CUDA out of memory"), KeyboardInterrupt(), ValueError("")],
    ids=["runtime", "key", "interrupt", "empty"],
)
def test_other_errors_are_left_alone(error):
    assert shortage_in(error) is None


def test_a_ring_of_causes_ends():
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert shortage_in(first) is None


def test_batches_are_compared_with_those_before():
    history = BatchHistory()
    assert history.compare(torch.zeros(2, 3)) == "float32[2, 3]: the first."
    for length in (1, 2, 3, 4):
        history.add({"x": torch.zeros(1, length)})
    assert history.compare([torch.zeros(1, 4)]).startswith("float32[1, 4]: larger than 75 % of 4 before")
    assert "50 % more elements than float32[1, 4]" in history.compare(torch.zeros(1, 6))
    assert history.compare("no tensor") == ""
    same = BatchHistory()
    for _ in range(3):
        same.add(torch.zeros(5))
    assert same.compare(torch.zeros(5)) == "float32[5]: as large as all 3 before."


def test_long_batches_are_shortened():
    assert describe_batch([torch.zeros(1)] * 9).endswith("float32[1] and 3 more")


def test_a_snapshot_is_added_up_by_line():
    # The keys that `torch.cuda.memory_snapshot` documents.
    inner = {"filename": "/site-packages/torch/nn/functional.py", "line": 1, "name": "linear"}
    mine = {"filename": "/home/me/model.py", "line": 33, "name": "forward"}
    other = {"filename": "/home/me/loss.py", "line": 5, "name": "loss"}
    block = {"state": "active_allocated", "size": 100, "frames": [inner, mine]}
    blocks = [block, block, {**block, "frames": [other], "size": 150}, {**block, "state": "inactive"}]
    assert largest_sites([{"blocks": blocks}, {"blocks": [{"state": "active_allocated", "size": 9}]}]) == [
        ("/home/me/model.py:33 in forward", 200),
        ("/home/me/loss.py:5 in loss", 150),
    ]


def post_mortem(shortage, **options):
    given = {
        "phase": "backward pass",
        "step": 12,
        "epoch": 0,
        "batch_idx": 12,
        "rank": 0,
        "location": "train.py:33",
        "held": {"parameters": GIB, "gradients": GIB, "optimizer states": 2 * GIB},
        "setting": "PYTORCH_ALLOC_CONF=expandable_segments:True",
    }
    return PostMortem(shortage=shortage, **{**given, **options})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FULL, "Set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment."),
        (FRAGMENTED, "the run needs more than there is, here 716.80 MiB more."),
        (LIMITED, "this process is limited to 8.00 GiB of 24.00 GiB."),
        (SHARED.replace("34.62", "3.62"), "other processes hold 44.12 GiB of 47.27 GiB; without them"),
        ("CUDA error: out of memory", "the error tells no figures."),
    ],
    ids=["fragmentation", "need", "limit", "others", "bare"],
)
def test_the_cause_is_said_in_words(text, words):
    report = report_text(post_mortem(shortage_in(RuntimeError(text))))
    assert words in " ".join(report.split())
    assert report.startswith("Out of memory on cuda")


def test_what_is_held_adds_up_to_what_was_allocated():
    text = report_text(post_mortem(shortage_in(RuntimeError(FULL))))
    assert "activations, temporaries and what your code keeps 18.90 GiB" in " ".join(text.split())


def test_remedies_that_fit_are_shown_or_else_the_largest_savings():
    small = Remedy("a", "half the batch", "Trainer(x=1)", 9 * GIB, GIB, False)
    large = Remedy("b", "checkpointing", "use()", 5 * GIB, 5 * GIB, True)
    shortage = shortage_in(RuntimeError(FULL))
    text = report_text(post_mortem(shortage, remedies=(small, large)))
    assert "1. checkpointing: 5.00 GiB; use()" in text
    assert "half the batch" not in text
    assert "1. half the batch" in report_text(post_mortem(shortage, remedies=(small,)))
    assert "What could help: a smaller batch of that loader" in report_text(
        post_mortem(shortage, phase="validation")
    )


def test_report_is_plain_values():
    report = post_mortem(shortage_in(RuntimeError(FULL)), rank=3)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["version"] == 1
    assert plain["cause"] == "fragmentation"
    assert plain["held"]["parameters"] == GIB
    assert plain["text"].startswith("Out of memory [rank 3] on cuda:0")
