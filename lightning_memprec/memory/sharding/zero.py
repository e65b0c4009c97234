"""DeepSpeed's ZeRO in a trace: a model of its engine, with every buffer at the instant at which it is made.

Follows ``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py`` and ``partitioned_param_coordinator.py``: half
weights, one flat FP32 partition of masters and optimizer states for each parameter group, buckets of gradients, and in
stage 3 weights that are gathered for the module at work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_memprec._errors import TraceError
from lightning_memprec.memory.result import Assumption
from lightning_memprec.memory.sharding.engine import Engine
from lightning_memprec.memory.sharding.gathering import Gathering
from lightning_memprec.memory.sharding.strategies import ZeRO

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lightning_memprec.memory.events import MemoryEvents
    from lightning_memprec.memory.loop import TrainingLoop
    from lightning_memprec.memory.trace import Recorder

__all__ = ["ZeROEngine"]


class ZeROEngine(Engine):
    """Partitions masters and optimizer states, and by stage gradients and weights.

    Args:
        options: Stage, offload and sizes of buckets.
        world_size: Devices of all nodes.
    """

    def __init__(self, options: ZeRO, world_size: int) -> None:
        super().__init__(world_size)
        self._options = options
        self.weights_saved = 1 / world_size if options.stage == 3 else 1.0
        self._shards: list[Tensor] = []
        self._buckets: list[Tensor] = []
        self._partitions: dict[int, tuple[nn.Parameter, list[nn.Parameter]]] = {}
        self._gradients: dict[int, Tensor] = {}

    # -- set-up ---------------------------------------------------------------------------------------

    def place(self, module: nn.Module, recorder: Recorder) -> None:
        """Count the weights, in stage 3 this rank's shard of them and the small ones whole."""
        if self._options.stage < 3:
            super().place(module, recorder)
            return
        for name, buffer in module.named_buffers():
            recorder.mark(buffer, "buffers", name)
        for name, parameter in module.named_parameters():
            recorder.exclude(parameter)
            sizes = [self._share(parameter.numel())]
            if self._is_persistent(parameter):
                sizes.append(parameter.numel())
            for number, numel in enumerate(sizes):
                shard = torch.empty(numel, dtype=parameter.dtype, device="meta")
                recorder.mark(shard, "parameters", name)
                self._shards.append(shard)
                if number == 0 and self._options.offload_parameters:
                    self.send_to_host(recorder, shard)

    def adapt(self, loop: TrainingLoop) -> None:
        """Give each optimizer flat FP32 partitions in place of the parameters, and hook the gradients."""
        recorder, options = loop.recorder, self._options
        if len(loop.optimizers) > 1:
            raise TraceError(
                f"DeepSpeed drives one optimizer, but `configure_optimizers` returned {len(loop.optimizers)}. "
                "Use another strategy, or one optimizer with parameter groups."
            )
        trainable = [p for p in loop.module.parameters() if p.requires_grad]
        for optimizer in loop.optimizers:
            for group in optimizer.param_groups:
                self._partition(recorder, group)
        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(lambda p: self._reduce(loop, p))  # type: ignore[no-untyped-call]
        if options.stage == 3:
            self._keep_buckets(trainable, recorder)  # For the whole run.
            Gathering(loop.module, recorder, options, self._is_persistent).attach()

    def _partition(self, recorder: Recorder, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.requires_grad]
        if not parameters:
            return
        numel = self._share(sum(p.numel() for p in parameters))
        partition = nn.Parameter(torch.empty(numel, dtype=torch.float32, device="meta"))
        recorder.mark(partition, "optimizer states")
        self._partitions[id(partition)] = (partition, parameters)
        group["params"] = [partition]
        if self._options.offload_optimizer:
            self.send_to_host(recorder, partition)

    def _share(self, numel: int) -> int:
        return math.ceil(numel / self.world_size)

    def _is_persistent(self, parameter: Tensor) -> bool:
        return parameter.numel() < self._options.param_persistence_threshold

    # -- backward -------------------------------------------------------------------------------------

    def before_backward(self, loop: TrainingLoop, loss: Tensor) -> None:
        """Make the buckets in which gradients are reduced, for one backward pass (stages 1 and 2)."""
        if self._options.stage < 3:
            self._keep_buckets([p for p in loop.module.parameters() if p.requires_grad], loop.recorder)

    def after_backward(self, loop: TrainingLoop) -> None:
        """Let go of the buckets."""
        if self._options.stage < 3:
            self._buckets.clear()

    def _keep_buckets(self, parameters: list[nn.Parameter], recorder: Recorder) -> None:
        options = self._options
        if not parameters or not options.contiguous_gradients:
            return
        for _ in range(2 if options.overlap_comm and options.stage < 3 else 1):
            bucket = torch.empty(options.reduce_bucket_size, dtype=parameters[0].dtype, device="meta")
            recorder.mark(bucket, "workspaces")
            self._buckets.append(bucket)

    def _reduce(self, loop: TrainingLoop, parameter: nn.Parameter) -> None:
        """Take a gradient as it comes; from stage 2 on only this rank's share of it stays."""
        if self._options.stage == 1 or parameter.grad is None:
            return
        if id(parameter) not in self._gradients and not self._options.offload_optimizer:
            share = torch.empty(self._share(parameter.numel()), dtype=parameter.dtype, device="meta")
            loop.recorder.mark(share, "gradients", loop.names.get(id(parameter)))
            self._gradients[id(parameter)] = share
        parameter.grad = None

    # -- step -----------------------------------------------------------------------------------------

    def before_step(self, loop: TrainingLoop, optimizer: Optimizer) -> None:
        """Turn this rank's gradients into FP32, a partition at a time."""
        for partition, parameters in self._partitions_of(optimizer):
            partition.grad = torch.empty_like(partition)
            loop.recorder.mark(partition.grad, "gradients")
            if self._options.offload_optimizer:
                self.send_to_host(loop.recorder, partition.grad)
            for parameter in parameters:
                self._gradients.pop(id(parameter), None)
                parameter.grad = None

    def after_step(self, loop: TrainingLoop, optimizer: Optimizer) -> None:
        """Release the FP32 gradients; weights are updated in place."""
        for partition, _ in self._partitions_of(optimizer):
            partition.grad = None

    def _partitions_of(self, optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, list[nn.Parameter]]]:
        for group in optimizer.param_groups:
            for partition in group["params"]:
                if id(partition) in self._partitions:
                    yield self._partitions[id(partition)]

    def on_host(self, events: MemoryEvents) -> set[int]:
        """Add what the optimizer makes, where it runs on the host."""
        if not self._options.offload_optimizer:
            return self._sent
        return self._sent | {
            index
            for index, record in enumerate(events.storages)
            if record.category == "optimizer states" or events.phases[record.phase][0] == "optimizer_step"
        }

    # -- what is known --------------------------------------------------------------------------------

    def assumptions(self) -> Iterator[Assumption]:
        """Yield what was modelled."""
        options = self._options
        offloaded = [
            name
            for name, is_offloaded in (
                ("masters, optimizer states and reduced gradients", options.offload_optimizer),
                ("shards of the weights", options.offload_parameters),
            )
            if is_offloaded
        ]
        kept = f" In host memory: {' and '.join(offloaded)}." if offloaded else ""
        live = (
            f" Gathered weights stay while at most {options.max_live_parameters:,} elements live."
            if options.stage == 3
            else ""
        )
        yield Assumption(
            "zero",
            f"DeepSpeed ZeRO stage {options.stage} on {self.world_size} devices is modelled: forward, backward and the "
            f"optimizer are traced; buckets of {options.reduce_bucket_size:,} elements, partitions and gathered "
            f"weights are put where DeepSpeed makes them.{live}{kept}",
            "deepspeed/runtime/zero",
        )
