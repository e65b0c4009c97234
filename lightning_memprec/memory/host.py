"""The machine around the device: host memory while a run starts, saves and resumes, and the disk for a checkpoint.

What Lightning 2.6 does on one device and under DDP: every rank builds its own weights on the host, converts them and
moves them to the device (``strategies/strategy.py``). ``torch.save`` copies one storage after the other to the host
and writes into a buffer that holds the whole file before any of it reaches the disk
(``_atomic_save`` in ``fabric/utilities/cloud_io.py``). On resume every rank loads the whole file to the host
(``TorchCheckpointIO.load_checkpoint``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memprec.memory.result import Assumption, HostMemory
from lightning_memprec.memory.tree import tensors_in

if TYPE_CHECKING:
    from lightning_memprec.memory.loop import TrainingLoop

__all__ = ["checkpoint_file_bytes", "save_checkpoint", "weights_bytes"]

# `torch.save` aligns every storage to 64 bytes (kFieldAlignment in caffe2/serialize/inline_container.h).
_ALIGNMENT = 64
# Beside its bytes, a storage takes two zip headers and its description in the pickle: 290 bytes for a weight, 250 for
# an optimizer state, told from files of torch 2.14.
_ENTRY_BYTES = 270
# The rest of such a file, with the state of Lightning 2.6's loops.
_FILE_BYTES = 2100


def weights_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers, tied ones once."""
    return sum(_storages([*module.parameters(), *module.buffers()]).values())


def checkpoint_file_bytes(storages_bytes: Iterable[int]) -> int:
    """Return the size of a file that ``Trainer.save_checkpoint`` writes.

    Args:
        storages_bytes: Size of every storage in the checkpoint, in bytes.

    Example:
        >>> checkpoint_file_bytes([4 * 1024**2])  # one float32 matrix of 1024 x 1024
        4196674
    """
    return _FILE_BYTES + sum(_ENTRY_BYTES + -(-size // _ALIGNMENT) * _ALIGNMENT for size in storages_bytes)


def save_checkpoint(loop: TrainingLoop, setup_bytes: int) -> HostMemory | None:
    """Trace how a checkpoint is gathered, in the phase ``"checkpoint_save"``, and say what it takes beside the device.

    The module's and the optimizers' own ``state_dict`` run, which may copy. ``on_save_checkpoint`` does not: it may
    write files.

    Args:
        loop: The loop, its steps done.
        setup_bytes: What the weights take on the host before they are converted and moved.

    Returns:
        ``None`` if a ``state_dict`` fails, which is noted.
    """
    loop.recorder.enter_phase("checkpoint_save", loop.step)
    try:
        engine = loop.engine
        weights = tensors_in(engine.weights(loop))
        states = tensors_in([optimizer.state_dict() for optimizer in loop.optimizers])
        of_weights = {
            key: math.ceil(size_bytes * engine.weights_saved)
            for key, size_bytes in _storages(weights, _with_masters(loop)).items()
        }
        of_states = {key: size * engine.states_saved for key, size in _storages(states).items()}
        in_all = list({**of_states, **of_weights}.values())
    except Exception as error:
        loop.note(
            Assumption(
                "checkpoint",
                f"The size of a checkpoint is unknown: its states raised {type(error).__name__}: {error}",
                "traced",
            )
        )
        return None
    checkpoint_bytes = checkpoint_file_bytes(in_all)
    # What lies on the host already is written from there.
    copied_bytes = 0 if loop.plan.device == "cpu" else max(in_all, default=0)
    return HostMemory(
        setup_bytes=setup_bytes,
        save_bytes=checkpoint_bytes + copied_bytes,
        resume_bytes=sum(in_all) + setup_bytes,
        checkpoint_bytes=checkpoint_bytes,
        weights_only_bytes=checkpoint_file_bytes(of_weights.values()),
        ranks_per_node=loop.plan.num_devices,
    )


def _storages(tensors: Iterable[Tensor], masters: frozenset[int] = frozenset()) -> dict[int, int]:
    """Return the size of every storage behind some tensors, by its identity; ``masters`` stand in for half weights."""
    sizes: dict[int, int] = {}
    for whole in tensors:
        tensor = getattr(whole, "_local_tensor", whole)  # A rank saves its shard.
        if not is_lazy(tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            key, size_bytes = storage._cdata, storage.nbytes()
            if key in masters and tensor.dtype in (torch.float16, torch.bfloat16):
                size_bytes *= 2
            sizes[key] = size_bytes
    return sizes


def _with_masters(loop: TrainingLoop) -> frozenset[int]:
    """Name the weights that a checkpoint holds in FP32: those that have a master copy."""
    if loop.masters is None:
        return frozenset()
    return frozenset(p.untyped_storage()._cdata for p in loop.module.parameters() if p.requires_grad)
