"""DDP in a trace: torch's own reducer, whose buckets are tensors like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_memprec.memory.result import Assumption
from lightning_memprec.memory.sharding.engine import Engine, redirected
from lightning_memprec.memory.sharding.strategies import DDP
from lightning_memprec.memory.sharding.world import replace

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_memprec.memory.events import Ledger
    from lightning_memprec.memory.loop import TrainingLoop

__all__ = ["DataParallelEngine"]


class DataParallelEngine(Engine):
    """Wraps the module in ``DistributedDataParallel``, over a process group that moves nothing.

    Args:
        options: How DDP is set up.
        world_size: Devices of all nodes.
    """

    def __init__(self, options: DDP, world_size: int) -> None:
        super().__init__(world_size)
        self._options = options
        self._wrapper: DistributedDataParallel | None = None

    def wrap(self, loop: TrainingLoop) -> None:
        """Build the reducer; a module without trainable parameters needs none."""
        if not any(p.requires_grad for p in loop.module.parameters()):
            return
        options = self._options
        with ExitStack() as stack:
            # It would read the shapes of all ranks from a tensor without contents.
            replace(
                stack,
                torch.nn.parallel.distributed,
                "_verify_param_shape_across_processes",
                lambda *args, **kwargs: None,
            )
            with _buckets_marked(loop.recorder):
                wrapper = DistributedDataParallel(
                    loop.module,
                    bucket_cap_mb=options.bucket_cap_mb,
                    gradient_as_bucket_view=options.gradient_as_bucket_view,
                    static_graph=options.static_graph,
                    find_unused_parameters=options.find_unused_parameters,
                    broadcast_buffers=options.broadcast_buffers,
                )
        wrapper.logger = _NoStatistics()
        pre_forward = wrapper._pre_forward

        def marking_pre_forward(*args: Any, **kwargs: Any) -> Any:
            with _buckets_marked(loop.recorder):  # They are built anew in the second step.
                return pre_forward(*args, **kwargs)  # type: ignore[no-untyped-call]

        vars(wrapper)["_pre_forward"] = marking_pre_forward
        self._wrapper = wrapper

    def forward(self, loop: TrainingLoop, function: Callable[..., Any], *args: Any) -> Any:
        """Run the step through DDP's forward, which sends buffers and rebuilds buckets first."""
        wrapper = self._wrapper
        if wrapper is None:
            return function(*args)
        if loop.automatic:
            return redirected(wrapper, loop.module, function, *args)

        def step(*inner_args: Any) -> Any:
            output = function(*inner_args)
            wrapper.require_backward_grad_sync = False  # The step has run its backward passes itself.
            return output

        try:
            return redirected(wrapper, loop.module, step, *args)
        finally:
            wrapper.require_backward_grad_sync = True

    @contextmanager
    def synchronized(self, is_last: bool) -> Iterator[None]:
        """Leave gradients alone in all micro-batches but the last (``no_sync``)."""
        with self._wrapper.no_sync() if self._wrapper is not None and not is_last else nullcontext():  # type: ignore[no-untyped-call]
            yield

    def before_backward(self, loop: TrainingLoop, loss: Tensor) -> None:
        """Prepare the reducer under manual optimization, as Lightning does (``prepare_for_backward``)."""
        if self._wrapper is None or loop.automatic:
            return
        reducer = self._wrapper.reducer
        with _buckets_marked(loop.recorder):
            reducer._rebuild_buckets()
        find_unused = self._options.find_unused_parameters and not self._options.static_graph
        reducer.prepare_for_backward([loss] if find_unused else [])

    def assumptions(self) -> Iterator[Assumption]:
        """Yield what is known of the buckets."""
        where = (
            "which are the gradients (`gradient_as_bucket_view=True`)"
            if self._options.gradient_as_bucket_view
            else "as large as the gradients, beside them: `gradient_as_bucket_view=True` saves that"
        )
        yield Assumption(
            "ddp_buckets",
            f"DDP on {self.world_size} devices is traced with torch's own reducer and its buckets, {where}.",
            "torch/csrc/distributed/c10d/reducer.cpp",
        )


class _NoStatistics:
    """DDP's logger: it would warn that it cannot time what runs on ``meta``."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@contextmanager
def _buckets_marked(ledger: Ledger) -> Iterator[None]:
    """Call what the block leaves behind workspaces: nothing but the reducer's buckets outlives it."""
    first = len(ledger.events.storages)
    yield
    for record in ledger.events.storages[first:]:
        if record.death == -1 and record.category is None:
            record.category = "workspaces"
