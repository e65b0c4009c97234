"""The engine of a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch.overrides import TorchFunctionMode

from lightning_memprec._errors import TraceError
from lightning_memprec.memory.sharding.engine import Engine
from lightning_memprec.memory.sharding.strategies import DDP, FSDP, FullyShard, Strategy, ZeRO
from lightning_memprec.memory.sharding.zero import ZeROEngine

if TYPE_CHECKING:
    from lightning_memprec.memory.plan import TrainingPlan
    from lightning_memprec.memory.trace import Recorder

__all__ = ["engine_of", "load"]


def load(strategy: Strategy | None) -> None:
    """Import what a strategy needs, before a trace begins.

    These modules register operators and classes when they are imported. Done inside a trace, they would keep hold of
    what is set only there.

    Args:
        strategy: How the run is spread.

    Raises:
        TraceError: If this build of torch knows no process groups.
    """
    if strategy is None or isinstance(strategy, ZeRO):
        return
    import torch.distributed

    if not torch.distributed.is_available():
        raise TraceError(
            "This build of torch has no `torch.distributed`, so no share of a device can be traced. "
            "Estimate with `num_devices=1`, or with the closed form."
        )
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.parallel
    import torch.testing._internal.distributed.fake_pg


@contextmanager
def engine_of(
    strategy: Strategy | None,
    plan: TrainingPlan,
    device: torch.device,
    recorder: Recorder,
    redirect: TorchFunctionMode,
) -> Iterator[Engine]:
    """Build what spreads a traced module over devices, for the length of a block.

    Args:
        strategy: How the run is spread; ``None`` if every device works for itself.
        plan: The run; gives the numbers of devices and nodes.
        device: Device that the trace stands for.
        recorder: Recorder of the trace, active.
        redirect: Mode of the trace that sends tensors of that device to ``meta``, active.
    """
    world_size = plan.num_devices * plan.num_nodes
    if strategy is None:
        yield Engine(world_size)
        return
    if isinstance(strategy, ZeRO):
        yield ZeROEngine(strategy, world_size)
        return
    from lightning_memprec.memory.sharding.world import fake_world

    with ExitStack() as stack:
        stack.enter_context(fake_world(world_size, device.type, redirect, recorder))
        if isinstance(strategy, DDP):
            from lightning_memprec.memory.sharding.data_parallel import DataParallelEngine

            yield DataParallelEngine(strategy, world_size)
        elif isinstance(strategy, FullyShard):
            from lightning_memprec.memory.sharding.fully_sharded import FullyShardEngine

            yield FullyShardEngine(strategy, plan.num_devices, plan.num_nodes, device.type, recorder, stack)
        elif isinstance(strategy, FSDP):
            from lightning_memprec.memory.sharding.flat import FlatShardEngine

            yield FlatShardEngine(strategy, plan.num_devices, plan.num_nodes, device, recorder, stack)
