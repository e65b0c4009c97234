"""The closed-form estimate: bytes per parameter, sharded, plus the activations of a transformer.

It needs no model, so it serves for planning on paper. What it leaves out is described in
``docs/closed-form.md``; :func:`lightning_memprec.estimate_memory` traces the real training step instead.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from lightning_memprec.memory.recipes import RECIPES, Recipe
from lightning_memprec.memory.transformer import activation_bytes, logits_and_loss_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_memprec.memory.transformer import ActivationFormula, TransformerShape

__all__ = [
    "DEVICE_COUNT_REASONS",
    "FormulaEstimate",
    "Offload",
    "estimate_formula",
    "fewest_devices",
    "minimum_devices",
]

Offload = Literal["none", "optimizer", "parameters"]

# Parts that each choice keeps in host memory.
_OFFLOADED: dict[Offload, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("gradients_bytes", "optimizer_states_bytes", "master_bytes"),
    "parameters": ("gradients_bytes", "optimizer_states_bytes", "master_bytes", "parameters_bytes"),
}

# More devices than in any published run: shards of that size are nothing beside what every device holds.
_MOST_DEVICES = 2**20

DEVICE_COUNT_REASONS = (
    "the caching allocator reserves more than it hands out, and fragments",
    "sharded training gathers whole layers and buckets for a moment (unsharded peaks)",
    "sharding splits no activations: each device keeps those of its own micro-batch",
    "each process takes a CUDA context, kernels and communication buffers",
)


@dataclass(frozen=True)
class FormulaEstimate:
    """What one device needs by the closed form; all sizes in bytes.

    Args:
        parameters: Number of parameter elements of the whole model.
        recipe: Bytes per parameter.
        devices: Devices that share the fixed memory.
        zero_stage: ZeRO stage, 0 to 3.
        offload: What was moved to host memory.
        parameters_bytes: Weights on one device.
        gradients_bytes: Gradients on one device.
        optimizer_states_bytes: Optimizer states on one device.
        master_bytes: FP32 master weights on one device.
        activations_bytes: Activations of the layers for one micro-batch; 0 without a shape.
        logits_bytes: Output of the vocabulary projection; 0 without a vocabulary.
        loss_bytes: Copies of the logits that the loss makes; 0 without a vocabulary.
        host_bytes: Host memory per device's process that offloading takes.
    """

    parameters: int
    recipe: Recipe
    devices: int
    zero_stage: int
    offload: Offload
    parameters_bytes: int
    gradients_bytes: int
    optimizer_states_bytes: int
    master_bytes: int
    activations_bytes: int
    logits_bytes: int
    loss_bytes: int
    host_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Weights, gradients, optimizer states and masters on one device."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_states_bytes + self.master_bytes

    @property
    def total_bytes(self) -> int:
        """All parts on one device."""
        return self.fixed_bytes + self.activations_bytes + self.logits_bytes + self.loss_bytes

    def items(self) -> list[tuple[str, int]]:
        """Pairs of readable part name and bytes on one device, in display order."""
        return [
            ("parameters", self.parameters_bytes),
            ("gradients", self.gradients_bytes),
            ("optimizer states", self.optimizer_states_bytes),
            ("master weights", self.master_bytes),
            ("activations", self.activations_bytes),
            ("logits", self.logits_bytes),
            ("loss copies", self.loss_bytes),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, ready for JSON; sizes stay integers in bytes."""
        return {**asdict(self), "fixed_bytes": self.fixed_bytes, "total_bytes": self.total_bytes}


def estimate_formula(
    *,
    parameters: int | None = None,
    shape: TransformerShape | None = None,
    recipe: str = "fp32-adam",
    recompute: bool = False,
    fused_attention: bool = False,
    activation_formula: ActivationFormula = "uniform",
    devices: int = 1,
    zero_stage: int = 0,
    offload: Offload = "none",
) -> FormulaEstimate:
    """Estimate a training run by closed forms.

    Args:
        parameters: Number of parameter elements; by default those of ``shape``.
        shape: Sizes from which activations follow; without it they are not counted.
        recipe: A name in :data:`~lightning_memprec.memory.recipes.RECIPES`.
        recompute: Full activation recomputation: the inputs of all layers and the inside of one.
        fused_attention: Leave out the attention scores, which fused (flash) attention never stores.
        activation_formula: See :func:`~lightning_memprec.memory.transformer.activation_bytes`.
        devices: Data-parallel devices.
        zero_stage: Which parts the devices share (arXiv 1910.02054): 1 optimizer states and masters, 2 also
            gradients, 3 also parameters.
        offload: ``"optimizer"`` keeps states, masters and gradients in host memory (arXiv 2101.06840),
            ``"parameters"`` the weights too. The layer at work stays on the device and is not counted.

    Returns:
        Every part on one device, and their total.

    Raises:
        ValueError: If neither ``parameters`` nor ``shape`` is given, or a value is unknown or out of range.

    Example:
        >>> estimate = estimate_formula(parameters=7_000_000_000)
        >>> estimate.recipe.bytes_per_parameter, estimate.total_bytes
        (16, 112000000000)
    """
    if parameters is None:
        if shape is None:
            raise ValueError("Neither `parameters` nor `shape` was given. Give one of them.")
        parameters = shape.parameters
    _check_choices(parameters, recipe, devices, zero_stage, offload)
    chosen = RECIPES[recipe]

    def share(bytes_per_parameter: float, sharded_from_stage: int) -> int:
        shards = devices if zero_stage >= sharded_from_stage else 1
        return math.ceil(parameters * bytes_per_parameter / shards)

    fixed = {
        "optimizer_states_bytes": share(chosen.optimizer_states_bytes, 1),
        "master_bytes": share(chosen.master_bytes, 1),
        "gradients_bytes": share(chosen.gradients_bytes, 2),
        "parameters_bytes": share(chosen.parameters_bytes, 3),
    }
    moved = _OFFLOADED[offload]
    activations = logits = loss = 0
    if shape is not None:
        element_bytes = chosen.activation_element_bytes
        activations = activation_bytes(
            shape,
            element_bytes=element_bytes,
            recompute=recompute,
            fused_attention=fused_attention,
            formula=activation_formula,
        )
        logits, loss = logits_and_loss_bytes(shape, element_bytes=element_bytes)
    return FormulaEstimate(
        parameters=parameters,
        recipe=chosen,
        devices=devices,
        zero_stage=zero_stage,
        offload=offload,
        activations_bytes=activations,
        logits_bytes=logits,
        loss_bytes=loss,
        host_bytes=sum(fixed[part] for part in moved),
        **(fixed | dict.fromkeys(moved, 0)),
    )


def minimum_devices(total_bytes: int, capacity_bytes: int) -> int:
    """Smallest number of devices whose capacities add up to ``total_bytes``.

    A lower bound: :data:`DEVICE_COUNT_REASONS` says why a real run needs more.

    Args:
        total_bytes: What one device would need, unsharded.
        capacity_bytes: Capacity of one device.

    Returns:
        Number of devices, at least 1.

    Example:
        >>> minimum_devices(148_000_000_000, 80_000_000_000)
        2
    """
    return max(1, -(-total_bytes // capacity_bytes))


def fewest_devices(total_bytes: Callable[[int], int], capacity_bytes: int) -> int | None:
    """Smallest number of devices on each of which a sharded run fits.

    Args:
        total_bytes: From a number of devices to what each of them needs; it must not grow.
        capacity_bytes: Capacity of one device.

    Returns:
        Number of devices; ``None`` if what every device holds whole is too much already.

    Example:
        >>> fewest_devices(lambda devices: 20 + 100 // devices, 50)
        4
        >>> fewest_devices(lambda devices: 60 + 100 // devices, 50) is None
        True
    """
    high = 1
    while total_bytes(high) > capacity_bytes:
        high *= 2
        if high > _MOST_DEVICES:
            return None
    return bisect.bisect_left(range(1, high), True, key=lambda n: total_bytes(n) <= capacity_bytes) + 1


def _check_choices(parameters: int, recipe: str, devices: int, zero_stage: int, offload: str) -> None:
    if parameters < 1 or devices < 1:
        raise ValueError(f"`parameters` and `devices` must be positive, got {parameters} and {devices}.")
    if recipe not in RECIPES:
        raise ValueError(f"Unknown recipe {recipe!r}. Choose one of: {', '.join(RECIPES)}.")
    if zero_stage not in range(4):
        raise ValueError(f"`zero_stage` must be 0, 1, 2 or 3, got {zero_stage}.")
    if offload not in _OFFLOADED:
        raise ValueError(f"Unknown offload {offload!r}. Choose one of: {', '.join(_OFFLOADED)}.")
