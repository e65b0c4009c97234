"""FSDP1 in a trace: torch's own ``FullyShardedDataParallel`` on the shard of one rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_memprec.memory.result import Assumption
from lightning_memprec.memory.sharding.engine import Engine, offloaded, redirected
from lightning_memprec.memory.sharding.strategies import FSDP
from lightning_memprec.memory.sharding.world import replace
from lightning_memprec.memory.sharding.wrapping import chosen_modules

if TYPE_CHECKING:
    from lightning_memprec.memory.events import MemoryEvents
    from lightning_memprec.memory.loop import TrainingLoop
    from lightning_memprec.memory.trace import Recorder

__all__ = ["FlatShardEngine"]


class FlatShardEngine(Engine):
    """Wraps the module in ``FullyShardedDataParallel``, over a process group that moves nothing.

    Args:
        options: How it is sharded.
        num_devices: Devices per node.
        num_nodes: Nodes.
        device: Device that the trace stands for.
        recorder: Recorder of the trace.
        stack: Restores what is changed in torch for the length of the trace.
    """

    inference_mode = False

    def __init__(
        self,
        options: FSDP,
        num_devices: int,
        num_nodes: int,
        device: torch.device,
        recorder: Recorder,
        stack: ExitStack,
    ) -> None:
        super().__init__(num_devices * num_nodes)
        self.states_saved = self.world_size  # Rank zero collects those of all.
        self._options = options
        self._ranks = (num_nodes, num_devices)
        self._device = device
        self._wrapper: nn.Module | None = None
        _mark_flat_parameters(recorder, stack, on_arrival=device.type != "cpu")
        _take_meta_for_real(stack)

    def place(self, module: nn.Module, recorder: Recorder) -> None:
        """Count the whole module on a CPU; on another device parameters come with the call that shards them."""
        # Afterwards parameters are what one rank holds.
        self._counts = super().count(module)
        self._whole = {name: (p.shape, p.dtype) for name, p in module.named_parameters()}
        self._whole |= {name: (b.shape, b.dtype) for name, b in module.named_buffers()}
        if self._device.type == "cpu":
            super().place(module, recorder)
        else:
            for name, buffer in module.named_buffers():
                recorder.mark(buffer, "buffers", name)

    def count(self, module: nn.Module) -> tuple[int, int]:
        """Return the numbers of trainable elements and of all elements of the whole model."""
        return self._counts

    def wrap(self, loop: TrainingLoop) -> None:
        """Flatten and shard each block, then what is left of the module."""
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        gc.collect(0)  # In the first trace of a process, frames in a cycle still hold a whole weight.
        options = self._options
        keywords = {"use_orig_params": True, **dict(options.options)}
        strategy = ShardingStrategy[options.sharding_strategy]
        if "HYBRID" in options.sharding_strategy:
            from torch.distributed.device_mesh import init_device_mesh

            shape = keywords.get("device_mesh", self._ranks)
            keywords["device_mesh"] = init_device_mesh(
                self._device.type, shape, mesh_dim_names=("replicate", "shard")
            )
        self._wrapper = FullyShardedDataParallel(
            loop.module,
            sharding_strategy=strategy,
            auto_wrap_policy=options.policy or self._policy(loop.module),
            mixed_precision=options.mixed_precision or _mixed_precision(loop.policy.name),
            device_id=self._device,
            **keywords,
        )
        if options.prepare is not None:
            options.prepare(self._wrapper)

    def _policy(self, module: nn.Module) -> Any:
        from torch.distributed.fsdp.wrap import CustomPolicy

        chosen = {id(child) for child in chosen_modules(module, self._options.wrap)}
        return CustomPolicy(lambda child: id(child) in chosen)

    def forward(self, loop: TrainingLoop, function: Callable[..., Any], *args: Any) -> Any:
        """Run the step through the wrapper's forward, which gathers the root's weights and casts inputs."""
        assert self._wrapper is not None
        return redirected(self._wrapper, loop.module, function, *args)

    def weights(self, loop: TrainingLoop) -> dict[str, Any]:
        """Gather one block after the other, to send it to the host, as Lightning's ``state_dict_type="full"`` does."""
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.utils._python_dispatch import _disable_current_modes

        assert self._wrapper is not None
        for block in FullyShardedDataParallel.fsdp_modules(self._wrapper):
            with FullyShardedDataParallel.summon_full_params(block, recurse=False, writeback=False):
                pass
        with _disable_current_modes():  # What lies on the host is not counted.
            return {
                name: torch.empty(shape, dtype=dtype, device="meta")
                for name, (shape, dtype) in self._whole.items()
            }

    def on_host(self, events: MemoryEvents) -> set[int]:
        """Leave gathered weights and buffers alone on the device under CPU offload."""
        return offloaded(events) if self._options.cpu_offload else set()

    def assumptions(self) -> Iterator[Assumption]:
        """Yield how the figures came about."""
        yield Assumption(
            "sharding",
            f"FSDP ({self._options.sharding_strategy}) on {self.world_size} devices: torch's own wrapper is traced on "
            "the shard of rank zero, which no other rank's exceeds. Streams are traced as one.",
            "torch/distributed/fsdp/fully_sharded_data_parallel.py",
        )


def _mixed_precision(precision: str) -> Any:
    """Return what Lightning 2.6 passes (``FSDPPrecision.mixed_precision_config``)."""
    from torch.distributed.fsdp import MixedPrecision

    names = {"bf16": torch.bfloat16, "16": torch.float16}
    dtype = names.get(precision.partition("-")[0], torch.float32)
    return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)


def _take_meta_for_real(stack: ExitStack) -> None:
    """Answer for ``meta`` what FSDP asks of a tensor's memory."""
    from torch.distributed.fsdp import _flat_param, _init_utils

    replace(stack, _init_utils, "_need_to_materialize_module", lambda *args: (False, False))
    replace(stack, _flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().size() > 0)


def _mark_flat_parameters(recorder: Recorder, stack: ExitStack, *, on_arrival: bool) -> None:
    """Count weights as parameters where they arrive, as shards and whenever they are gathered."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    build, shard, gather = (
        vars(FlatParamHandle)[name] for name in ("__init__", "shard", "_alloc_padded_unsharded_flat_param")
    )

    def building(handle: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in params if on_arrival else ():
            recorder.mark(parameter, "parameters")
        build(handle, params, *args, **kwargs)

    def sharding(handle: Any) -> None:
        shard(handle)
        recorder.mark(handle.flat_param, "parameters")

    def gathering(handle: Any) -> Any:
        gathered = gather(handle)
        recorder.mark(gathered, "parameters")
        return gathered

    replace(stack, FlatParamHandle, "__init__", building)
    replace(stack, FlatParamHandle, "shard", sharding)
    replace(stack, FlatParamHandle, "_alloc_padded_unsharded_flat_param", gathering)
