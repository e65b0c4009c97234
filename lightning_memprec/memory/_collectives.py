"""Collectives inside a trace: they end at once and move nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_memprec.memory.trace import Recorder

__all__ = ["COLLECTIVE_HANDLERS"]


def _finished_work(value: Any) -> Any:
    future: Any = torch.futures.Future()  # type: ignore[no-untyped-call]
    future.set_result(value)
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()


def _collective(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer an operator of ``c10d``, which writes to its first argument."""
    for size_bytes in recorder._kernel_allocations(func, args, kwargs):
        recorder.transient(size_bytes)
    target = args[0]
    work = _finished_work([target] if isinstance(target, Tensor) else target)
    return work if len(func._schema.returns) == 1 else (target, work)


def _wait(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


COLLECTIVE_HANDLERS = {
    **{
        f"c10d::{name}": _collective
        for name in (
            "allgather_",
            "_allgather_base_",
            "allgather_coalesced_",
            "allgather_into_tensor_coalesced_",
            "allreduce_",
            "allreduce_coalesced_",
            "alltoall_",
            "alltoall_base_",
            "broadcast_",
            "gather_",
            "recv_",
            "reduce_",
            "reduce_scatter_",
            "_reduce_scatter_base_",
            "reduce_scatter_tensor_coalesced_",
            "scatter_",
            "send",
        )
    },
    "_c10d_functional::wait_tensor": _wait,
}
