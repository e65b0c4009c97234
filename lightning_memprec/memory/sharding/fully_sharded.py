"""FSDP2 in a trace: torch's own ``fully_shard`` on the shard of one rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_memprec._errors import TraceError
from lightning_memprec.memory.result import Assumption
from lightning_memprec.memory.sharding.engine import Engine, offloaded
from lightning_memprec.memory.sharding.strategies import FullyShard
from lightning_memprec.memory.sharding.world import replace
from lightning_memprec.memory.sharding.wrapping import chosen_modules

if TYPE_CHECKING:
    from lightning_memprec.memory.events import MemoryEvents
    from lightning_memprec.memory.loop import TrainingLoop
    from lightning_memprec.memory.trace import Recorder

__all__ = ["FullyShardEngine"]

# What Lightning calls on a module instead of its `forward`.
_STEPS = ("training_step", "validation_step")


class FullyShardEngine(Engine):
    """Shards the module with ``fully_shard``, over a process group that moves nothing.

    Args:
        options: How it is sharded.
        num_devices: Devices per node.
        num_nodes: Nodes.
        device_type: ``"cpu"`` or ``"cuda"``.
        recorder: Recorder of the trace.
        stack: Restores what is changed in torch for the length of the trace.

    Raises:
        TraceError: If the devices cannot be divided into groups that split each layer.
    """

    def __init__(
        self,
        options: FullyShard,
        num_devices: int,
        num_nodes: int,
        device_type: str,
        recorder: Recorder,
        stack: ExitStack,
    ) -> None:
        super().__init__(num_devices * num_nodes)
        self._options = options
        self._recorder = recorder
        from torch.distributed.device_mesh import init_device_mesh

        size = options.tensor_parallel_size
        tensor_parallel = num_devices if size == "auto" else size
        if self.world_size % tensor_parallel:
            raise TraceError(
                f"{self.world_size} devices cannot be divided into groups of {tensor_parallel} "
                "(`tensor_parallel_size`). Take a multiple of it."
            )
        # Names and order as in Lightning's strategy.
        self._mesh = init_device_mesh(
            device_type,
            (self.world_size // tensor_parallel, tensor_parallel),
            mesh_dim_names=("data_parallel", "tensor_parallel"),
        )
        _mark_gathered_weights(recorder, stack)
        _hide_propagation(stack)

    def prepare(self, module: nn.Module) -> None:
        """Give a LightningModule the mesh that its ``configure_model`` reads."""
        if hasattr(module, "_device_mesh"):
            vars(module)["_device_mesh"] = self._mesh

    def building(self) -> AbstractContextManager[Any]:
        """Build on ``meta`` what is sharded at once."""
        return torch.device("meta") if self._options.by_module else nullcontext()

    def place(self, module: nn.Module, recorder: Recorder) -> None:
        """Count the whole module on a CPU; on another device its parameters come with the call that shards them."""
        if self._mesh.device_type == "cpu" or self._options.by_module:
            super().place(module, recorder)
        else:
            for name, buffer in module.named_buffers():
                recorder.mark(buffer, "buffers", name)

    def wrap(self, loop: TrainingLoop) -> None:
        """Shard each block, then what is left of the module."""
        if self._options.by_module:
            return
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        gc.collect(0)  # In the first trace of a process, frames in a cycle still hold a whole weight.
        blocks = chosen_modules(loop.module, self._options.wrap)
        keywords = self._keywords()
        for module in (*blocks, loop.module):
            super().place(module, loop.recorder)  # Torch moves them to the device, then cuts them.
            fully_shard(module, **keywords)
        for name in _STEPS:
            if hasattr(loop.module, name):
                register_fsdp_forward_method(loop.module, name)

    def _keywords(self) -> dict[str, Any]:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        options = self._options
        return {
            "mesh": self._mesh["data_parallel"],
            "reshard_after_forward": options.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=_dtype(options.param_dtype), reduce_dtype=_dtype(options.reduce_dtype)
            ),
        }

    def on_host(self, events: MemoryEvents) -> set[int]:
        """Leave gathered weights and buffers alone on the device under CPU offload."""
        return offloaded(events) if self._options.cpu_offload else set()

    def assumptions(self) -> Iterator[Assumption]:
        """Yield how the figures came about."""
        yield Assumption(
            "sharding",
            f"FSDP2 on {self.world_size} devices: torch's own `fully_shard` is traced on the shard of rank zero, which "
            "no other rank's exceeds. Streams are traced as one. Each rank saves its own share of a checkpoint.",
            "torch/distributed/fsdp/_fully_shard",
        )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _mark_gathered_weights(recorder: Recorder, stack: ExitStack) -> None:
    """Count gathered weights as parameters, whenever memory is given to them."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    def marking(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(param: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(param, *args, **kwargs)
            for tensor in param.all_gather_outputs:
                recorder.mark(tensor, "parameters", param._param_fqn)
            return result

        return call

    for name in ("init_all_gather_outputs", "alloc_all_gather_outputs"):
        replace(stack, FSDPParam, name, marking(vars(FSDPParam)[name]))


def _hide_propagation(stack: ExitStack) -> None:
    """Keep the fake tensors with which DTensor finds the shapes of its results out of the trace."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    name = "_propagate_tensor_meta_non_cached"
    propagate = vars(ShardingPropagator)[name]

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return propagate(*args, **kwargs)

    replace(stack, ShardingPropagator, name, unseen)
