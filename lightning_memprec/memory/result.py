"""What an estimate returns: plain, frozen, serialisable."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from lightning_memprec._devices import find_device
from lightning_memprec._plain import check_version, read_plain
from lightning_memprec._units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from lightning_memprec.memory.events import MemoryEvents

__all__ = [
    "SCHEMA_VERSION",
    "Assumption",
    "Breakdown",
    "HostMemory",
    "LargestBatch",
    "MemoryEstimate",
    "ModuleMemory",
    "PhasePeak",
    "Remedy",
    "TimelinePoint",
]

# A size begins with its number, the name of a device with a letter.
_SIZE = re.compile(r"\s*[+-]?[\d.]")

Basis = Literal["traced", "measured", "modelled"]
PlotKind = Literal["timeline", "modules", "measured"]

# Of the values that `to_dict` writes; raised by one whenever an older reader would misread a newer file.
SCHEMA_VERSION = 1
_OUTSIDE_STEPS = {"minimum": -1}  # `-1` is the step of phases outside the steps.


@dataclass(frozen=True)
class Assumption:
    """One thing that was modelled rather than traced, or that the estimate leaves out.

    Args:
        name: Short, stable identifier.
        text: What was assumed, in words a user can check.
        source: Where the rule or figure comes from.
        size_bytes: What it adds to the estimate; ``None`` if it adds no bytes of its own.
    """

    name: str
    text: str
    source: str = ""
    size_bytes: int | None = None


@dataclass(frozen=True)
class Breakdown:
    """Bytes of each part at one instant; the parts add up to the live tensors at that instant.

    On CUDA every tensor counts in steps of 512 bytes. The caching allocator's blocks can be up to 1 MiB larger.
    """

    parameters_bytes: int = 0
    buffers_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_states_bytes: int = 0
    activations_bytes: int = 0
    temporaries_bytes: int = 0
    inputs_bytes: int = 0
    workspaces_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def fixed_bytes(self) -> int:
        """Parameters, buffers, gradients and optimizer states."""
        return self.parameters_bytes + self.buffers_bytes + self.gradients_bytes + self.optimizer_states_bytes

    def __str__(self) -> str:
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in self.items() if size)

    def items(self) -> list[tuple[str, int]]:
        """Pairs of readable part name and bytes, in display order."""
        return [
            (f.name.removesuffix("_bytes").replace("_", " "), getattr(self, f.name)) for f in fields(self)
        ]


@dataclass(frozen=True)
class PhasePeak:
    """Highest allocation during one phase of one step.

    Args:
        name: ``"setup"``, ``"sanity_validation"``, ``"batch_transfer"``, ``"forward"``, ``"backward"``,
            ``"optimizer_step"``, ``"validation"``, ``"checkpoint_save"`` or ``"resume"``.
        step: Optimizer step to which the phase belongs, counted from 0; ``-1`` outside the steps.
        peak_allocated_bytes: Largest allocation while the phase lasted.
        peak_reserved_bytes: What the CUDA caching allocator then holds at most if nothing limits it; ``None``
            where no allocator is simulated.
    """

    name: str
    step: int = field(metadata=_OUTSIDE_STEPS)
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None = None


@dataclass(frozen=True)
class HostMemory:
    """What a run takes beside its device: memory of the machine, and disk for its checkpoints.

    The program itself, the data and the workers of data loaders are not counted.

    Args:
        setup_bytes: Weights as they are built, which every rank holds until they are on the device.
        save_bytes: What rank zero holds while it saves a checkpoint: the whole file in a buffer, and the largest
            tensor, copied from the device.
        resume_bytes: What every rank holds while it resumes: its weights and the contents of the checkpoint.
        checkpoint_bytes: Size of a full checkpoint file.
        weights_only_bytes: Size of a checkpoint file with ``save_weights_only=True``.
        ranks_per_node: Processes that share the machine's memory.
        offloaded_bytes: What every rank keeps there for the whole run: offloaded weights, gradients and optimizer
            states.
    """

    setup_bytes: int
    save_bytes: int
    resume_bytes: int
    checkpoint_bytes: int
    weights_only_bytes: int
    ranks_per_node: int = 1
    offloaded_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Largest need of one machine over set-up, saving and resuming, with what is offloaded."""
        every_rank = max(self.setup_bytes, self.resume_bytes + self.offloaded_bytes) * self.ranks_per_node
        return max(every_rank, self.save_bytes + self.offloaded_bytes * self.ranks_per_node)


@dataclass(frozen=True)
class ModuleMemory:
    """What one module holds at the peak instant, its children not included."""

    name: str
    type_name: str
    breakdown: Breakdown


@dataclass(frozen=True)
class TimelinePoint:
    """What is allocated after one recorded event.

    Args:
        event: Number of the event, a birth or a death of a tensor, counted from 0.
        phase: Name of the phase, as in :class:`PhasePeak`.
        step: Its step, ``-1`` outside the steps.
        breakdown: Parts of the live tensors.
    """

    event: int
    phase: str
    step: int = field(metadata=_OUTSIDE_STEPS)
    breakdown: Breakdown

    @property
    def allocated_bytes(self) -> int:
        """Sum of the parts."""
        return self.breakdown.total_bytes


@dataclass(frozen=True)
class Remedy:
    """One change to the run, with what it would need after the change.

    Args:
        name: Short, stable identifier, such as ``"micro_batch"``.
        description: What to change, in words that complete "Try …".
        how: The line of code or YAML that does it.
        need_bytes: Re-estimated need with the change applied, as ``minimum_device_bytes`` of the estimate.
        saving_bytes: Need before minus need after.
        fits: Whether the run then fits the capacity it was judged against.
        basis: ``"traced"`` if the changed run was traced again, else ``"modelled"``.
        cost: What is paid for it, in words.
        exact: Whether training computes the same, rounding aside.
        snippet: Lines of Python that do it, to paste.
        config: The same as YAML to lay over a LightningCLI configuration; comments say what is to be done elsewhere.
    """

    name: str
    description: str
    how: str
    need_bytes: int
    saving_bytes: int = field(metadata={"minimum": -(2**63)})
    fits: bool
    basis: Basis = "traced"
    cost: str = ""
    exact: bool = False
    snippet: str = ""
    config: str = ""


@dataclass(frozen=True)
class LargestBatch:
    """The largest training batch with which a run fits, among those that were traced.

    Args:
        size: Samples of one batch on one device.
        need_bytes: What the run needs with it.
        given_size: Samples of the batch that was given.
        too_large_size: Smallest traced size that does not fit; ``None`` if all fit.
        traces: Sizes traced, the given one included.
    """

    size: int
    need_bytes: int
    given_size: int
    too_large_size: int | None
    traces: int

    @property
    def is_exact(self) -> bool:
        """Whether one sample more does not fit."""
        return self.too_large_size == self.size + 1


@dataclass(frozen=True)
class MemoryEstimate:
    """What one device needs for a training run.

    All sizes are bytes of one device. ``breakdown`` and ``by_module`` describe the peak instant.

    Args:
        peak_allocated_bytes: Largest sum of live tensors (``torch.cuda.max_memory_allocated``).
        peak_reserved_bytes: What the caching allocator holds at its peak if nothing limits it
            (``torch.cuda.max_memory_reserved``).
        minimum_reserved_bytes: With how little it still works, giving cached memory back under pressure.
        outside_allocator_bytes: Device context, kernels and libraries.
        breakdown: The parts at the peak instant.
        peak_phase: Phase and step in which the peak falls.
        phases: Peak of each phase, in order.
        by_module: Largest holders at the peak instant, largest first.
        timeline: The parts over the recorded events, thinned; the highest point of each stretch is kept.
        assumptions: Everything that was modelled and not traced.
        device: Device the estimate is for.
        precision: Lightning's name of the precision.
        steps: Optimizer steps traced.
        trainable_parameters: Number of trainable parameter elements, tied weights once.
        total_parameters: Number of parameter elements, tied weights once.
        host: Host memory and disk; ``None`` if the module's ``state_dict`` fails.
        events: The raw births and deaths, for replay; not part of :meth:`to_dict`.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    minimum_reserved_bytes: int
    outside_allocator_bytes: int
    breakdown: Breakdown
    peak_phase: PhasePeak
    phases: tuple[PhasePeak, ...]
    by_module: tuple[ModuleMemory, ...]
    timeline: tuple[TimelinePoint, ...] = field(repr=False)
    assumptions: tuple[Assumption, ...]
    device: str
    precision: str
    steps: int
    trainable_parameters: int
    total_parameters: int
    host: HostMemory | None = None
    events: MemoryEvents | None = field(default=None, repr=False, compare=False)

    @property
    def peak_device_bytes(self) -> int:
        """What the driver shows at the peak: reserved memory plus what lies outside the allocator."""
        return self.peak_reserved_bytes + self.outside_allocator_bytes

    @property
    def minimum_device_bytes(self) -> int:
        """Smallest capacity on which the run still works, cached memory given back."""
        return self.minimum_reserved_bytes + self.outside_allocator_bytes

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.minimum_device_bytes)} needed on {self.device} in {self.precision}, at most in "
            f"{self.peak_phase.name.replace('_', ' ')}: {self.breakdown}"
        )

    def fits(self, capacity: int | str, *, safety_margin: float = 0.0) -> bool:
        """Tell whether the run fits a device.

        Args:
            capacity: Memory offered, in bytes or as text such as ``"24GiB"``, or the name of a device such as
                ``"A100-40GB"``. Another device than the one of the estimate may choose other kernels: estimate
                for it where it matters.
            safety_margin: Fraction of the capacity to keep free, in [0, 1).

        Returns:
            Whether :attr:`minimum_device_bytes` is at most ``capacity * (1 - safety_margin)``. Of a named device,
            its own context counts.

        Raises:
            ValueError: If the capacity is neither a size nor a known device, or the margin lies outside [0, 1).
        """
        if not 0.0 <= safety_margin < 1.0:
            raise ValueError(f"`safety_margin` must lie in [0, 1), got {safety_margin}.")
        need_bytes = self.minimum_device_bytes
        if isinstance(capacity, str) and not _SIZE.match(capacity):
            spec = find_device(capacity)
            capacity, need_bytes = spec.memory_bytes, self.minimum_reserved_bytes + spec.context_bytes
        return need_bytes <= parse_bytes(capacity) * (1.0 - safety_margin)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, ready for JSON; sizes stay integers in bytes.

        Returns:
            ``schema_version``, the fields without ``events``, and the two sums ``peak_device_bytes`` and
            ``minimum_device_bytes``; :meth:`from_dict` reads it again.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "events"}
        plain: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        for name, value in values.items():
            if isinstance(value, tuple):
                plain[name] = [asdict(item) for item in value]
            else:
                plain[name] = asdict(value) if hasattr(value, "__dataclass_fields__") else value
        plain["peak_device_bytes"] = self.peak_device_bytes
        plain["minimum_device_bytes"] = self.minimum_device_bytes
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MemoryEstimate:
        """Read what :meth:`to_dict` wrote; every value is checked.

        Args:
            values: Plain values, for example out of a JSON file. What is not a field is passed over.

        Returns:
            The estimate, without ``events``.

        Raises:
            ValueError: If the version is another, or a value is missing, of the wrong type or out of bounds.

        Example:
            >>> import torch
            >>> from lightning_memprec import MemoryEstimate, estimate_memory
            >>> estimate = estimate_memory(torch.nn.Linear(4, 4), torch.ones(2, 4), device="cpu")
            >>> MemoryEstimate.from_dict(estimate.to_dict()) == estimate
            True
        """
        check_version(values, SCHEMA_VERSION, "estimate")
        plain = {name: value for name, value in values.items() if name != "events"}
        read: MemoryEstimate = read_plain(cls, plain, "estimate", names={"MemoryEvents": Any})
        return read

    def plot(
        self,
        ax: Any = None,
        *,
        kind: PlotKind = "timeline",
        measured: int | Sequence[int] | None = None,
    ) -> Any:
        """Draw the estimate.

        Args:
            ax: Matplotlib axes to draw on; a new figure is made if ``None``.
            kind: ``"timeline"``: the parts over the traced events, with the peak marked. ``"modules"``: what the
                largest modules hold at the peak. ``"measured"``: the predicted peak beside the measured one.
            measured: Largest allocation of a real run in bytes (``torch.cuda.max_memory_allocated``), or one for
                each optimizer step. ``"measured"`` needs it; ``"timeline"`` draws its maximum as a line.

        Returns:
            ``(figure, axes)``.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed (extra ``plot``).
            ValueError: If the kind is unknown, or needs a measurement that is not given.
        """
        from lightning_memprec.memory._plot import plot_estimate

        return plot_estimate(self, ax, kind, measured)

    def save_snapshot(self, path: str | Path) -> None:
        """Write the predicted run as a PyTorch memory snapshot, for https://pytorch.org/memory_viz.

        Every tensor of the trace is an allocation in the simulated CUDA caching allocator, with the module that
        made it and the phase in place of a stack. Time is counted in events.

        Args:
            path: File to write, usually ``.pickle``; its folder is made if it is missing.

        Raises:
            ValueError: If the estimate has no events, as one that was read from a file.
            OSError: If the folder cannot be written.
        """
        from lightning_memprec.memory.snapshot import write_snapshot

        write_snapshot(self, path)
