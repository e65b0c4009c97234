"""What a report says, apart from how it looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_memprec._units import format_bytes

if TYPE_CHECKING:
    from lightning_memprec.memory.result import Assumption, MemoryEstimate, Remedy
    from lightning_memprec.report.verdict import Verdict

__all__ = [
    "assumption_lines",
    "capacity_rows",
    "largest_part",
    "module_rows",
    "overflow_message",
    "part_rows",
    "peak_sentence",
    "remedy_lines",
    "title",
    "verdict_sentence",
]

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
    """Say when memory peaks, and how high the other phases reach."""
    peak = estimate.peak_phase
    highest: dict[str, int] = {}
    for phase in estimate.phases:
        highest[phase.name] = max(highest.get(phase.name, 0), phase.peak_allocated_bytes)
    others = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(size)}"
        for name, size in highest.items()
        if name != peak.name
    )
    where = (
        f"{peak.name.replace('_', ' ')}, step {peak.step + 1} of {estimate.steps}"
        if peak.step >= 0
        else peak.name
    )
    text = f"Peak: {where}." + (f" Elsewhere at most: {others}." if others else "")
    cached = estimate.peak_device_bytes
    # Where there is room, the allocator keeps what it could give back: the driver then shows more than is needed.
    if cached > estimate.minimum_device_bytes * 1.01:
        text += f" With room to spare, PyTorch's cache grows to {format_bytes(cached)} in all."
    return text


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


def remedy_lines(remedies: tuple[Remedy, ...]) -> list[tuple[str, str]]:
    """List each remedy as what to change and what it then needs, with the line that does it."""
    lines = []
    for remedy in remedies:
        outcome = "fits" if remedy.fits else "not enough alone"
        facts = f"{format_bytes(remedy.need_bytes)}, {outcome}"
        if remedy.basis != "traced":
            facts += f", {remedy.basis}"
        if remedy.cost:
            facts += f"; cost: {remedy.cost}"
        lines.append((f"{remedy.description}: {facts}", remedy.how))
    return lines


def assumption_lines(assumptions: tuple[Assumption, ...]) -> list[str]:
    """List what was assumed, with the bytes it adds."""
    return [
        assumption.text if not assumption.size_bytes
        else f"{assumption.text} ({format_bytes(assumption.size_bytes)})"
        for assumption in assumptions
    ]  # fmt: skip


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
    fitting = [remedy for remedy in remedies if remedy.fits]
    if fitting:
        return f"{text} Try {'; or '.join(map(_offer, fitting[:3]))}."
    if remedies:
        best = min(remedies, key=lambda remedy: remedy.need_bytes)
        tried = (
            "Not even all changes together are" if best.name == "combined" else "No change that was tried is"
        )
        return f"{text} {tried} enough; the largest saving: {_offer(best)}. Use a larger device or a smaller model."
    return f"{text} Reduce the batch size or use a larger device."


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
