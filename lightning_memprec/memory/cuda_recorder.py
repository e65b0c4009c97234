"""A recorder that also counts what CUDA's kernels and libraries allocate beside tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from lightning_memprec.memory.convolution import convolution_workspaces
from lightning_memprec.memory.cudnn import CudnnFlags, CudnnHeuristics
from lightning_memprec.memory.result import Assumption
from lightning_memprec.memory.trace import Recorder
from lightning_memprec.memory.workspaces import CudaWorkspaces, cuda_kernel_allocations

__all__ = ["CudaRecorder"]


class CudaRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Adds cuBLAS and cuDNN workspaces, and what some kernels allocate inside, to what a trace shows.

    Args:
        capability: Compute capability of the device.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()
        self._capability = capability
        self._heuristics = CudnnHeuristics(capability, CudnnFlags.current())
        self._workspaces = CudaWorkspaces(capability)

    def restart(self) -> None:
        """Forget all births so far; what came before took no workspace either."""
        super().restart()
        if hasattr(self, "_workspaces"):
            self._workspaces = CudaWorkspaces(self._capability)

    def finish_operator(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        """Count what a CUDA run of the operator would have allocated beside its outputs."""
        kept_bytes = self._workspaces.first_use(func, torch._C._current_autograd_node() is not None)
        if kept_bytes:
            self.keep(kept_bytes, "workspaces")
        for size_bytes in cuda_kernel_allocations(func, args, kwargs):
            self.transient(size_bytes)
        for size_bytes, smallest_bytes in convolution_workspaces(func, args, kwargs, self._heuristics):
            self.transient(size_bytes, smallest_bytes)

    def assumption(self) -> Assumption:
        """Say where the workspaces come from."""
        version = self._heuristics.version
        if version is None:
            convolutions = "no cuDNN is installed here that could be asked, so convolutions count without one"
        else:
            convolutions = f"those of convolutions are what the cuDNN installed here ({version}) chooses"
            if self._heuristics.unanswered:
                convolutions += f", but for {self._heuristics.unanswered} that it does not know"
            if torch.backends.cudnn.benchmark:
                convolutions += "; in benchmark mode each is tried with the largest workspace first"
        return Assumption(
            "library_workspaces",
            f"Workspaces of cuBLAS are modelled, one for each thread that multiplies; {convolutions}.",
            "aten/src/ATen/cuda/CublasHandlePool.cpp, aten/src/ATen/native/cudnn/Conv_v8.cpp",
        )
