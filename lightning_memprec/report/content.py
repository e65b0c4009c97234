"""What a report says, apart from how it looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_memprec._units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprec.memory.result import HostMemory, MemoryEstimate, PhasePeak, Remedy
    from lightning_memprec.report.verdict import Verdict

__all__ = [
    "capacity_rows",
    "host_lines",
    "largest_batch_sentence",
    "largest_part",
    "module_rows",
    "overflow_message",
    "part_rows",
    "peak_sentence",
    "phase_rows",
    "remark_lines",
    "remedy_lines",
    "title",
    "verdict_sentence",
]

# The errors of the estimate on training runs of CNNs and transformers whose peaks on GPUs were published with xMem
# (github.com/Stone-ResearchLife/xMem), as `python -m benchmarks.memory_accuracy --cudnn` printed them on 2026-11-30.
_SCORED_RUNS = 28
_MEDIAN_ERROR, _ERROR_OF_NINE_IN_TEN = "1.1 %", "12.7 %"
_FIVE_TOO_LOW, _EIGHT_TOO_LOW = "two", "two"

# Phases that do not belong to one step.
_OUTSIDE = ("setup", "sanity_validation", "validation", "checkpoint_save", "resume")

_WORDS = {"fits": "FITS", "tight": "TIGHT", "overflow": "DOES NOT FIT", "undetermined": "UNDETERMINED"}


def title(estimate: MemoryEstimate) -> str:
    """Say what was estimated."""
    trainable, total = estimate.trainable_parameters, estimate.total_parameters
    count = f"{_count(total)} parameters"
    if trainable != total:
        count += f" ({_count(trainable)} trainable)"
    return f"Memory preflight: {count}, {estimate.precision} on {estimate.device}"


def part_rows(estimate: MemoryEstimate) -> list[tuple[str, int]]:
    """List the parts that are not empty at the peak, then what a device needs beyond them."""
    rows = [(name, size) for name, size in estimate.breakdown.items() if size]
    reserve = estimate.minimum_reserved_bytes - estimate.breakdown.total_bytes
    rows.append(("allocator reserve", reserve))
    rows.append(("context and libraries", estimate.outside_allocator_bytes))
    return [(name, size) for name, size in rows if size > 0]


def largest_part(estimate: MemoryEstimate) -> tuple[str, int]:
    """Return the name and bytes of the largest part at the peak."""
    return max(part_rows(estimate), key=lambda row: row[1], default=("nothing", 0))


def module_rows(estimate: MemoryEstimate, limit: int = 5) -> list[tuple[str, str, int, str]]:
    """List the modules that hold most at the peak: name, type, bytes, and what most of them are."""
    rows = []
    for module in estimate.by_module:
        part, size = max(module.breakdown.items(), key=lambda item: item[1])
        total = module.breakdown.total_bytes
        if size:
            mostly = part if size == total else f"{part} {size / total:.0%}"
            rows.append((module.name or "(root)", module.type_name, total, mostly))
    return sorted(rows, key=lambda row: -row[2])[:limit]


def peak_sentence(estimate: MemoryEstimate) -> str:
    """Say when memory peaks, and how far the cache grows."""
    peak = estimate.peak_phase
    name = peak.name.replace("_", " ")
    in_step = peak.step >= 0 and peak.name not in _OUTSIDE
    text = f"Peak: {name}, step {peak.step + 1} of {estimate.steps}." if in_step else f"Peak: {name}."
    cached = estimate.peak_device_bytes
    # Where there is room, the allocator keeps what it could give back: the driver then shows more than is needed.
    if cached > estimate.minimum_device_bytes * 1.01:
        text += f" With room to spare, PyTorch's cache grows to {format_bytes(cached)} in all."
    return text


def phase_rows(estimate: MemoryEstimate) -> list[tuple[str, int, int | None]]:
    """List the phases of a run: name, most allocated, and most reserved where the allocator is simulated."""
    phases: dict[str, list[PhasePeak]] = {}
    for phase in estimate.phases:
        if phase.name in _OUTSIDE:
            names = ["set-up" if phase.name == "setup" else phase.name.replace("_", " ")]
        else:
            names = ["first step" if phase.step == 0 else "later steps"]
            names += ["optimizer step of these"] if phase.name == "optimizer_step" else []
        for name in names:
            phases.setdefault(name, []).append(phase)
    order = list(phases)
    if "optimizer step of these" in phases and "later steps" in phases:
        order.remove("optimizer step of these")
        order.insert(order.index("later steps") + 1, "optimizer step of these")
    return [(name, *_highest(phases[name])) for name in order]


def _highest(phases: list[PhasePeak]) -> tuple[int, int | None]:
    reserved = [p.peak_reserved_bytes for p in phases if p.peak_reserved_bytes is not None]
    return max(p.peak_allocated_bytes for p in phases), max(reserved, default=None)


def host_lines(host: HostMemory) -> list[str]:
    """Say what the run takes of the machine around the device."""
    ranks = host.ranks_per_node
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    return [
        f"A checkpoint takes {format_bytes(host.checkpoint_bytes)} on disk, weights only "
        f"{format_bytes(host.weights_only_bytes)}.",
        f"Host memory: {format_bytes(host.setup_bytes)}{each} until the weights are on the device; "
        f"{format_bytes(host.save_bytes)} to save a checkpoint; {format_bytes(host.resume_bytes)}{each} to resume "
        "from one. Data and its workers come on top.",
    ]


def capacity_rows(estimate: MemoryEstimate, verdict: Verdict | None) -> list[tuple[str, str]]:
    """List what the run needs, what the device offers, and what stays free."""
    rows = [("needed", format_bytes(_need(estimate, verdict)))]
    if verdict is not None and verdict.capacity_bytes is not None:
        rows.append(("offered", format_bytes(verdict.capacity_bytes)))
        if verdict.safety_margin:
            kept = int(verdict.capacity_bytes * verdict.safety_margin)
            rows.append((f"to keep free ({verdict.safety_margin * 100:.3g} %)", format_bytes(kept)))
        if verdict.headroom_bytes is not None:
            rows.append(("headroom", format_bytes(verdict.headroom_bytes)))
    return rows


def verdict_sentence(verdict: Verdict) -> str:
    """Say the verdict in one line."""
    word = _WORDS[verdict.status]
    headroom = verdict.headroom_bytes
    if headroom is None:
        return f"{word}: {verdict.reason or 'the capacity of the device is unknown.'}"
    if verdict.status == "overflow":
        return f"{word}: {format_bytes(-headroom)} too much."
    if verdict.status == "tight":
        return f"{word}: it fits only inside the safety margin, with {format_bytes(headroom)} to spare."
    return f"{word}: {format_bytes(headroom)} to spare."


def largest_batch_sentence(verdict: Verdict) -> str:
    """Say which training batch would still fit; empty if none was found."""
    largest = verdict.largest_batch
    if largest is None:
        return ""
    beyond = "" if largest.too_large_size is None else f", and {largest.too_large_size} does not fit"
    at_least = "" if largest.is_exact else "at least "
    return (
        f"Largest batch that fits: {at_least}{largest.size}, where the run needs "
        f"{format_bytes(largest.need_bytes)}{beyond} (traced with {largest.traces} sizes; this run has "
        f"{largest.given_size})."
    )


def remedy_lines(remedies: tuple[Remedy, ...]) -> list[tuple[str, str]]:
    """List each remedy as what to change and what it then needs, with the line that does it."""
    lines = []
    for remedy in remedies:
        outcome = "fits" if remedy.fits else "not enough alone"
        facts = f"{format_bytes(remedy.need_bytes)}, {outcome}"
        if remedy.basis != "traced":
            facts += f", {remedy.basis}"
        if remedy.exact:
            facts += ", computes the same"
        if remedy.cost:
            facts += f"; cost: {remedy.cost}"
        lines.append((f"{remedy.description}: {facts}", remedy.how))
    return lines


def remark_lines(estimate: MemoryEstimate, verdict: Verdict | None, notes: Sequence[str] = ()) -> list[str]:
    """List what a reader should know of the figures: given notes, the margin's basis, what was assumed."""
    assumed = [
        assumption.text if not assumption.size_bytes
        else f"{assumption.text} ({format_bytes(assumption.size_bytes)})"
        for assumption in estimate.assumptions
    ]  # fmt: skip
    margin = "" if verdict is None else _margin_sentence(estimate, verdict)
    return [*notes, *([margin] if margin else []), *assumed]


def _margin_sentence(estimate: MemoryEstimate, verdict: Verdict) -> str:
    """Say what the safety margin rests on; empty where there is no verdict, or none for a GPU."""
    if verdict.headroom_bytes is None or estimate.device == "cpu":
        return ""
    return (
        f"The margin of {verdict.safety_margin * 100:.3g} % is for what the estimate misses. Of {_SCORED_RUNS} GPU "
        f"runs published with xMem, half were estimated to {_MEDIAN_ERROR} and nine in ten to {_ERROR_OF_NINE_IN_TEN}; "
        f"{_FIVE_TOO_LOW} needed over 5 % more than estimated, {_EIGHT_TOO_LOW} over 8 % more. Runs of other sources "
        "lie further off: see `docs/estimate.md`."
    )


def overflow_message(
    estimate: MemoryEstimate, verdict: Verdict, remedies: tuple[Remedy, ...], device: str
) -> str:
    """Say in one paragraph why a run is refused and what to do next."""
    part, size = largest_part(estimate)
    need, capacity = _need(estimate, verdict), verdict.capacity_bytes or 0
    tight = ", which leaves less than the safety margin free" if verdict.status == "tight" else ""
    text = (
        f"Training needs about {format_bytes(need)} on each device but {device} offers "
        f"{format_bytes(capacity)} (`safety_margin={verdict.safety_margin:g}`){tight}. "
        f"Largest part: {part} ({format_bytes(size)})."
    )
    if estimate.peak_phase.name == "validation":
        steps = max(p.peak_allocated_bytes for p in estimate.phases if p.name not in _OUTSIDE)
        text += f" The peak is in validation; the training steps allocate at most {format_bytes(steps)}."
    if verdict.largest_batch is not None:
        text += f" {largest_batch_sentence(verdict)}"
    fitting = [remedy for remedy in remedies if remedy.fits]
    if fitting:
        return f"{text} Try {'; or '.join(map(_offer, fitting[:3]))}."
    if remedies:
        best = min(remedies, key=lambda remedy: remedy.need_bytes)
        tried = (
            "Not even all changes together are" if best.name == "combined" else "No change that was tried is"
        )
        return f"{text} {tried} enough; the largest saving: {_offer(best)}. Use a larger device or a smaller model."
    batch = "validation batch size" if estimate.peak_phase.name == "validation" else "batch size"
    return f"{text} Reduce the {batch} or use a larger device."


def _offer(remedy: Remedy) -> str:
    how = f" with `{remedy.how}`" if remedy.how and "\n" not in remedy.how else ""
    return f"{remedy.description}{how} ({format_bytes(remedy.need_bytes)})"


def _need(estimate: MemoryEstimate, verdict: Verdict | None) -> int:
    """Prefer the verdict's need: it is the largest of all ranks."""
    if verdict is not None and verdict.need_bytes is not None:
        return verdict.need_bytes
    return estimate.minimum_device_bytes


def _count(elements: int) -> str:
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if elements >= factor:
            return f"{elements / factor:.3g}{unit}"
    return str(elements)
