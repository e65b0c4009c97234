"""What an estimate assumes, in words, with the bytes that each assumption adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lightning_memprec.memory.result import Assumption

if TYPE_CHECKING:
    from lightning_memprec._devices import DeviceSpec
    from lightning_memprec.memory.loop import TrainingLoop
    from lightning_memprec.memory.plan import TrainingPlan

__all__ = ["collect"]


def collect(
    plan: TrainingPlan, spec: DeviceSpec | None, loop: TrainingLoop
) -> tuple[int, tuple[Assumption, ...]]:
    """Return the bytes outside the allocator and the list of assumptions.

    Args:
        plan: The run.
        spec: The device, or ``None`` for a generic one.
        loop: The loop that was traced.
    """
    notes = [
        Assumption(
            "traced_batch",
            "Every step needs what the traced batch needs: give the largest batch of the run.",
            "traced",
        )
    ]
    outside_bytes = 0
    if plan.device != "cpu":
        if spec is not None:
            outside_bytes = spec.context_bytes
            notes.append(
                Assumption(
                    "device_context",
                    f"CUDA context and kernels ({spec.name}): modelled, 2 KiB for each thread that can be "
                    "resident and 64 MiB of kernels that load when first used; differs by driver and build.",
                    "lightning_memprec/_devices.py",
                    outside_bytes,
                )
            )
        else:
            notes.append(
                Assumption(
                    "device_context",
                    "The CUDA context and kernels (100 to 600 MiB) are not counted, since no device was named.",
                    "lightning_memprec/_devices.py",
                )
            )
        if any(isinstance(module, nn.RNNBase) for module in loop.module.modules()):
            notes.append(
                Assumption(
                    "cudnn_rnn_reserve",
                    "What cuDNN keeps of a recurrent layer for its backward pass is modelled: per layer, time step "
                    "and hidden unit 5 elements (LSTM), 6 (GRU) or 1 (plain), and the outputs between layers.",
                    "github.com/pytorch/pytorch/issues/2895",
                )
            )
    notes.extend(loop.engine.assumptions())
    notes.extend(loop.notes)
    return outside_bytes, tuple(notes)
