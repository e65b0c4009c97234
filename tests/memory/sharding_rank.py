"""One rank of real sharded training steps on gloo; prints its peaks. Started by ``test_sharding_cpu.py``."""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_memprec.memory.sharding.strategies import DDP, FSDP, FullyShard
from lightning_memprec.memory.sharding.wrapping import repeated_blocks
from tests.memory.peaks import peak_of
from tests.memory.sharding_cases import CASES, ShardedCase, loss

STEPS = 2


def measure(case: ShardedCase) -> int:
    """Return the largest sum of live tensors. The profiler must see the weights made, to see that they are released."""
    torch.manual_seed(0)
    return peak_of(lambda: train(case, *prepare(case)))


class Step(nn.Module):
    """The loss inside of what is wrapped, as Lightning has it: hooks on the output then begin with the loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: object) -> torch.Tensor:
        return loss(self.module, batch)


def prepare(case: ShardedCase) -> tuple[nn.Module, object]:
    module, batch = case.build()
    if case.precision == "bf16-true":
        module.to(torch.bfloat16)
        batch = tree_map(lambda t: t.bfloat16() if t.is_floating_point() else t, batch)
    return module, batch


def wrap(case: ShardedCase, module: nn.Module) -> nn.Module:
    options = case.strategy
    if isinstance(options, DDP):
        return DistributedDataParallel(
            module,
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
        )
    if isinstance(options, FSDP):
        return wrap_flat(case, options, module)
    assert isinstance(options, FullyShard)
    if options.by_module:
        size = options.tensor_parallel_size
        shape, names = (dist.get_world_size() // size, size), ("data_parallel", "tensor_parallel")
        module._device_mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        module.shard()
        return module
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtypes = {
        name: None if value is None else getattr(torch, value)
        for name, value in (("param_dtype", options.param_dtype), ("reduce_dtype", options.reduce_dtype))
    }
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*repeated_blocks(module), module):
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(**dtypes),
        )
    return module


def wrap_flat(case: ShardedCase, options: FSDP, module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy

    blocks = repeated_blocks(module) if options.wrap is None else []
    dtype = torch.bfloat16 if "bf16" in case.precision else torch.float32
    return FullyShardedDataParallel(
        module,
        sharding_strategy=ShardingStrategy[options.sharding_strategy],
        auto_wrap_policy=CustomPolicy(lambda child: any(child is block for block in blocks)),
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def train(case: ShardedCase, module: nn.Module, batch: object) -> None:
    """Train in the order of Lightning's loop, as the zoo's reference does."""
    if isinstance(case.strategy, FSDP):
        module = wrap(case, Step(module))
        run = module
    else:
        module = wrap(case, module)
        run = functools.partial(loss, module)
    settle()
    optimizer = case.optimizer(module.parameters())

    def micro_step(index: int) -> torch.Tensor:
        result = run(batch) / case.accumulate
        if index == 0:
            optimizer.zero_grad()
        settle()
        result.backward()
        settle()
        return result.detach()

    @torch.enable_grad()
    def last_step() -> torch.Tensor:
        result = micro_step(case.accumulate - 1)
        if case.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), case.clip)
        return result

    for _ in range(STEPS):
        for index in range(case.accumulate - 1):
            is_ddp = isinstance(module, DistributedDataParallel)
            with module.no_sync() if is_ddp else nullcontext():
                micro_step(index)
        optimizer.step(last_step)


class OneThreadGloo(dist.ProcessGroupGloo):
    """Gloo with one thread: it has let go of all that earlier collectives held when it runs the next."""

    def __init__(self, store: dist.Store, rank: int, size: int, **options: object) -> None:
        settings = dist.ProcessGroupGloo._Options()
        settings._threads = 1
        settings._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        super().__init__(store, rank, size, settings)


def settle() -> None:
    """Wait until gloo's thread has freed its copies, which happens out of the profiler's sight if it comes too late."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.barrier(group)


def settle_after_collectives() -> None:
    def settling(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            settle()
            return result

        return call

    for name in ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        setattr(dist, name, settling(getattr(dist, name)))
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    for cls in (collectives.DefaultAllGather, collectives.DefaultReduceScatter):
        cls.__call__ = settling(cls.__call__)


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.distributed_c10d.ProcessGroupGloo = OneThreadGloo
    dist.init_process_group("gloo", init_method="env://")
    settle_after_collectives()
    found = {name: measure(CASES[name]) for name in names}
    peaks = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, found)
    if dist.get_rank() == 0:
        Path(os.environ["PEAKS"]).write_text(json.dumps(peaks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
