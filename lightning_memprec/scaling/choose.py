"""``choose_precision``: which of Lightning's precisions suits a device, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_memprec._devices import find_device
from lightning_memprec._text import wrap
from lightning_memprec.scaling.answers import Answer, Estimate, answers_for
from lightning_memprec.scaling.capabilities import Capabilities, capabilities_of_cuda, detect_capabilities

if TYPE_CHECKING:
    import torch

__all__ = ["Alternative", "Answer", "PrecisionChoice", "choose_precision"]

_TORCH_DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True)
class Alternative:
    """Another precision, and when to take it.

    Args:
        precision: Lightning's name, or ``"bf16-master"``/``"16-master"`` of this package.
        when: What speaks for it, and what it costs.
    """

    precision: str
    when: str


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision that suits a device.

    Args:
        precision: ``"bf16-mixed"``, ``"16-mixed"`` or ``"32-true"``, for ``Trainer(precision=...)``.
        capabilities: What the device computes natively.
        reason: Why, in one paragraph.
        alternatives: Other precisions that have their place on this device.
        watch: What to keep an eye on.
        answers: Questions that often follow this choice, answered; none after ``"32-true"``.
    """

    precision: str
    capabilities: Capabilities
    reason: str
    alternatives: tuple[Alternative, ...]
    watch: tuple[str, ...]
    answers: tuple[Answer, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.capabilities.device}: precision={self.precision!r}", "", *wrap(self.reason), ""]
        lines += ["Alternatives"]
        for other in self.alternatives:
            lines += wrap(f"{other.precision}: {other.when}", "- ")
        lines += ["", "Watch", *(line for text in self.watch for line in wrap(text, "- "))]
        for answer in self.answers:
            lines += ["", answer.question, *wrap(answer.answer, "  ")]
        return "\n".join(lines)


def choose_precision(
    device: str | torch.device | None = None,
    *,
    capabilities: Capabilities | None = None,
    memory: Mapping[str, Estimate] | None = None,
) -> PrecisionChoice:
    """Choose a precision by what the hardware computes natively.

    The rule: ``"bf16-mixed"`` where matrix units (tensor cores, matrix cores, AMX) multiply bfloat16;
    else ``"16-mixed"`` where a GPU has such units for float16; else ``"32-true"``. Emulation does not count,
    and neither do vector instructions alone. Pure half precision is never chosen.

    Args:
        device: A device of this machine (``"cuda:1"``, ``"cpu"``), or a card of the catalogue
            (``"T4-16GB"``). Default: this machine's accelerator, or its CPU.
        capabilities: Use these instead of asking a device.
        memory: Estimates of one run by precision, from ``estimate_memory``. Their figures are quoted in the
            answer about memory.

    Returns:
        The choice, with its reasons.

    Raises:
        ValueError: If the device is neither in this machine nor in the catalogue, or if both ``device`` and
            ``capabilities`` are given.

    Example:
        >>> choose_precision("T4-16GB").precision
        '16-mixed'
        >>> choose_precision("A100-80GB").precision
        'bf16-mixed'
    """
    if capabilities is None:
        capabilities = _look_up(device)
    elif device is not None:
        raise ValueError(f"`capabilities` already describe a device; drop `device`, got {device!r}.")
    precision = _native_mixed(capabilities)
    return PrecisionChoice(
        precision=precision,
        capabilities=capabilities,
        reason=f"{capabilities.device}: {capabilities.reason}. {_REASONS[precision]}",
        alternatives=_alternatives(precision, capabilities),
        watch=_WATCH[precision],
        answers=answers_for(precision, memory or {}),
    )


def _look_up(device: str | torch.device | None) -> Capabilities:
    if isinstance(device, str) and device.partition(":")[0] not in _TORCH_DEVICES:
        spec = find_device(device, otherwise="choose on the machine that has the card")
        return capabilities_of_cuda(spec.name, spec.compute_capability)
    return detect_capabilities(device)


def _native_mixed(capabilities: Capabilities) -> str:
    if capabilities.fast_bf16:
        return "bf16-mixed"
    return "16-mixed" if capabilities.fast_fp16 else "32-true"


_REASONS = {
    "bf16-mixed": (
        "bf16 has the exponents of FP32 and reaches 3.4e38, so gradients keep their range and no loss scale "
        "is needed. Its products run on matrix units. Weights, gradients and optimizer states "
        "stay in FP32, so that small updates are kept."
    ),
    "16-mixed": (
        "fp16 products run on matrix units. fp16 ends at 65504, and gradients under 6e-8 vanish, so Lightning "
        "multiplies the loss by a scale that it adapts as it goes. Weights, gradients and optimizer states "
        "stay in FP32, so that small updates are kept."
    ),
    "32-true": (
        "No matrix unit is known that multiplies half precision here. PyTorch would convert, compute and "
        "convert back, which saves some memory of activations and most often costs time. FP32 is exact and "
        "the safe choice."
    ),
}

_WATCH = {
    "bf16-mixed": (
        "bf16 keeps 8 significant bits: compare the first steps with FP32 (`compare_precisions`).",
        "There is no loss scale that could skip a bad step: one NaN in the loss reaches the weights.",
    ),
    "16-mixed": (
        "Add `GradScalerMonitor()`: a loss scale that keeps falling means exploding gradients.",
        "A skipped step still advances the learning-rate schedule in Lightning.",
        "Weights that were pretrained in bf16 can overflow in fp16.",
    ),
    "32-true": ("Memory: FP32 keeps every activation with 4 bytes an element.",),
}


def _alternatives(precision: str, capabilities: Capabilities) -> tuple[Alternative, ...]:
    half = {"bf16-mixed": "bf16", "16-mixed": "16"}.get(precision)
    if half is None:
        return _alternatives_to_fp32(capabilities)
    tf32 = (
        " `torch.set_float32_matmul_precision('high')` makes it faster by TF32 products (11 significant bits)."
        if capabilities.tf32
        else ""
    )
    spacing = "0.0078" if half == "bf16" else "0.00098"
    master = (
        "weights, gradients and activations in half and FP32 masters for the optimizer "
        f"(`MasterWeightPrecision('{half}-master')`). Saves casts and memory of activations; weights with "
        "masters, gradients and states together need no less than in mixed precision. Not to be confused "
        f"with '{half}-true', which has no masters: near 1 its weights lie {spacing} apart, and an update "
        "smaller than half of that is lost."
    )
    return (
        Alternative(f"{half}-master", master),
        Alternative("32-true", f"the reference when quality is in doubt.{tf32}"),
    )


def _alternatives_to_fp32(capabilities: Capabilities) -> tuple[Alternative, ...]:
    # A Trainer turns "16-mixed" on a CPU into "bf16-mixed".
    bf16 = capabilities.native_bf16 or capabilities.kind == "cpu"
    mixed = "bf16-mixed" if bf16 else "16-mixed"
    when = "if activations do not fit: they shrink towards half. Time it first; expect it to be slower."
    return (Alternative(mixed, when),)
