"""What fits where: one run with other batches, sequence lengths, recipes and numbers of devices, each traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lightning_memprec._errors import MemPrecError
from lightning_memprec.memory._processes import run_tasks
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.largest_batch import batch_size_of, resized
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.remedies.adapters import adapters
from lightning_memprec.memory.remedies.change import Change, skeleton
from lightning_memprec.memory.remedies.checkpointing import checkpointing
from lightning_memprec.memory.remedies.optimizers import optimizers
from lightning_memprec.memory.sequences import resequenced, sequence_length_of
from lightning_memprec.memory.sharding.strategies import FullyShard, Strategy, resolve_strategy

__all__ = ["PlanAxes", "PlanCell", "fewest_devices", "plan_cells", "with_recipe"]

_LIMIT = 2**63  # torch's sizes have 64 bits.
_OPTIONS = ("checkpointing", "8bit", "fused", "lora")


@dataclass(frozen=True, kw_only=True)
class PlanAxes:
    """What to vary; an empty axis keeps what the run has.

    Args:
        batches: Samples of one batch on one device.
        sequences: Tokens of one sequence.
        recipes: Precision and options, such as ``"bf16-mixed+checkpointing+8bit"``; ``"as-is"`` changes nothing.
            Options: ``checkpointing`` of activations, an ``8bit`` or ``fused`` optimizer, ``lora`` adapters.
        device_counts: Numbers of devices; more than one shard the run by ``strategy``.
        strategy: Lightning's name of the strategy for several devices.
    """

    batches: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()
    recipes: tuple[str, ...] = ("as-is",)
    device_counts: tuple[int, ...] = (1,)
    strategy: str = "fsdp"

    def __post_init__(self) -> None:
        for name in ("batches", "sequences", "device_counts"):
            wrong = [value for value in getattr(self, name) if not 1 <= value < _LIMIT]
            if wrong:
                raise ValueError(f"`{name}` must be at least 1 and below 2^63, got {wrong[0]}.")
        for recipe in self.recipes:
            unknown = [option for option in recipe.split("+")[1:] if option not in _OPTIONS]
            if unknown:
                raise ValueError(
                    f"Unknown option {unknown[0]!r} in recipe {recipe!r}. Choose among: {', '.join(_OPTIONS)}."
                )
        resolve_strategy(self.strategy, 2)


@dataclass(frozen=True, kw_only=True)
class PlanCell:
    """One combination.

    Args:
        batch: Samples of one batch on one device; ``None`` if the batch has no size.
        sequence: Tokens of one sequence; ``None`` if the batch holds no token ids.
        recipe: Precision and options.
        num_devices: Devices.
        need_bytes: What each device must offer; ``None`` if it could not be traced.
        basis: ``"traced"``; ``"implied"``: a smaller batch did not fit any device, and this one needs more than that
            one's ``need_bytes``; ``"refused"``: it cannot be traced.
        reason: Why it was refused.
    """

    batch: int | None
    sequence: int | None
    recipe: str
    num_devices: int
    need_bytes: int | None
    basis: Literal["traced", "implied", "refused"] = "traced"
    reason: str = ""

    def fits(self, capacity_bytes: int, safety_margin: float = 0.0) -> bool:
        """Tell whether the run fits devices of a capacity."""
        enough = self.need_bytes is not None and self.need_bytes <= capacity_bytes * (1.0 - safety_margin)
        return enough and self.basis == "traced"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def plan_cells(
    plan: TrainingPlan,
    axes: PlanAxes,
    *,
    largest_bytes: int,
    processes: int | None = None,
    on_cells: Callable[[list[PlanCell]], None] = lambda cells: None,
) -> list[PlanCell]:
    """Trace all combinations.

    Args:
        plan: The run as it is.
        axes: What to vary.
        largest_bytes: Capacity of the largest device, in bytes: batches beyond the first that needs more are not
            traced.
        processes: How many to trace at the same time; ``None`` takes the cores of this process.
        on_cells: Called with the cells as they come: those that differ in the batch only come together.

    Returns:
        The cells, ordered by recipe, number of devices, sequence and batch.

    Raises:
        ValueError: If a batch size or sequence length is asked for that the batch does not have.
    """
    batch = plan.make_batch()
    plan = replace(plan, batch=batch)
    size, length = batch_size_of(batch), sequence_length_of(batch)
    if axes.batches and size is None:
        raise ValueError(
            "The batch holds no tensors, so there is no batch size to vary. Leave `batches` out."
        )
    if axes.sequences and length is None:
        raise ValueError(
            "The batch holds no matrix of token ids, so there is no sequence length to vary. Leave `sequences` out."
        )
    batches: list[int | None] = [*sorted(axes.batches)] or [size]
    sequences: list[int | None] = [*sorted(axes.sequences)] or [length]
    rows = [
        _Row(plan, recipe, count, sequence, size, length, batches, axes.strategy)
        for recipe in axes.recipes
        for count in axes.device_counts
        for sequence in sequences
    ]
    cells: list[PlanCell] = []
    for found in run_tasks([functools.partial(row.cells, largest_bytes) for row in rows], processes):
        cells += found
        on_cells(found)
    return cells


def fewest_devices(
    cells: Iterable[PlanCell], capacity_bytes: int, safety_margin: float = 0.0
) -> dict[tuple[str, int | None, int | None], int | None]:
    """Return the smallest number of devices by recipe, batch and sequence; ``None`` where none tried is enough."""
    fewest: dict[tuple[str, int | None, int | None], int | None] = {}
    for cell in sorted(cells, key=lambda cell: cell.num_devices):
        key = cell.recipe, cell.batch, cell.sequence
        if fewest.get(key) is None:
            fewest[key] = cell.num_devices if cell.fits(capacity_bytes, safety_margin) else None
    return fewest


@dataclass(frozen=True)
class _Row:
    """Combinations that differ in the batch only."""

    plan: TrainingPlan
    recipe: str
    num_devices: int
    sequence: int | None
    given_size: int | None
    given_length: int | None
    batches: Sequence[int | None]
    strategy: str

    def cells(self, largest_bytes: int) -> list[PlanCell]:
        cells: list[PlanCell] = []
        smaller: PlanCell | None = None
        for batch in self.batches:
            cell = PlanCell(
                batch=batch,
                sequence=self.sequence,
                recipe=self.recipe,
                num_devices=self.num_devices,
                need_bytes=None if smaller is None else smaller.need_bytes,
                basis="implied",
            )
            if smaller is None or smaller.fits(largest_bytes):
                cell = smaller = self._traced(cell)
            cells.append(cell)
        return cells

    def _traced(self, cell: PlanCell) -> PlanCell:
        try:
            need = estimate_plan(self._plan(cell.batch)).minimum_device_bytes
        except (
            MemPrecError,
            RuntimeError,
        ) as error:  # Of a batch whose bytes pass 64 bits torch makes no tensor.
            return replace(cell, need_bytes=None, basis="refused", reason=str(error))
        return replace(cell, need_bytes=need, basis="traced")

    def _plan(self, batch: int | None) -> TrainingPlan:
        data = self.plan.batch
        if self.sequence is not None and self.given_length is not None:
            data = resequenced(data, self.given_length, self.sequence)
        if batch is not None and self.given_size is not None:
            data = resized(data, self.given_size, batch)
        plan = replace(self.plan, batch=data, num_devices=self.num_devices)
        plan = replace(plan, strategy=plan.strategy if self._keeps(plan.strategy) else self._strategy())
        return with_recipe(plan, self.recipe)

    def _keeps(self, strategy: str | Strategy) -> bool:
        # A module that shards itself reads its mesh on one device too.
        by_module = isinstance(strategy, FullyShard) and strategy.by_module
        return by_module or (self.num_devices > 1 and strategy not in ("auto", "single_device"))

    def _strategy(self) -> str:
        return self.strategy if self.num_devices > 1 else "auto"


def with_recipe(plan: TrainingPlan, recipe: str) -> TrainingPlan:
    """Return a plan in another recipe, see :class:`PlanAxes`.

    Raises:
        MemPrecError: If an option does not apply to the plan.
    """
    precision, *options = recipe.split("+")
    if precision != "as-is":
        plan = replace(plan, precision=precision)
    for option in options:
        plan = _change(plan, option).apply(plan)
    return plan


def _change(plan: TrainingPlan, option: str) -> Change:
    changes: dict[str, Callable[[], Iterator[Change]]] = {
        "checkpointing": lambda: checkpointing(skeleton(plan)),
        "8bit": lambda: (change for change in optimizers(plan) if change.name == "eight_bit_optimizer"),
        "fused": lambda: (change for change in optimizers(plan) if change.name == "fused_optimizer"),
        "lora": lambda: adapters(skeleton(plan)),
    }
    change = next(changes[option](), None)
    if change is None:
        raise MemPrecError(f"`{option}` does not apply to this run. Leave it out of the recipe.")
    return change
