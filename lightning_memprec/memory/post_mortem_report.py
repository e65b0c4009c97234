"""What is known of a run at the moment in which its memory ran out, and how it is told."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_memprec._text import wrap
from lightning_memprec._units import format_bytes
from lightning_memprec.memory.post_mortem import MemoryShortage
from lightning_memprec.memory.result import MemoryEstimate, Remedy
from lightning_memprec.memory.tree import tensors_in

__all__ = ["BatchHistory", "PostMortem", "describe_batch", "largest_sites", "report_text"]

# Batches to compare with: enough for a quantile, and a few hundred kilobytes at most.
_MOST_BATCHES = 10_000
_MOST_TENSORS = 6
_MOST_SITES = 5
_MOST_REMEDIES = 4  # On the screen; the file has all.


def describe_batch(batch: Any) -> str:
    """Write the tensors of a batch as dtypes and shapes.

    Example:
        >>> import torch
        >>> describe_batch((torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)))
        'float32[8, 3, 32, 32], int64[8]'
    """
    tensors = tensors_in(batch)
    words = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:_MOST_TENSORS]]
    more = len(tensors) - _MOST_TENSORS
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")


class BatchHistory:
    """Sizes of the batches so far, in elements; costs a sum a batch."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque(maxlen=_MOST_BATCHES)
        self.largest = 0
        self.largest_text = ""

    def add(self, batch: Any) -> None:
        """Note a batch that went well."""
        size = _elements(batch)
        self._sizes.append(size)
        if size > self.largest:
            self.largest, self.largest_text = size, describe_batch(batch)

    def compare(self, batch: Any) -> str:
        """Say how a batch stands among those before it; empty if it holds no tensor.

        Example:
            >>> import torch
            >>> history = BatchHistory()
            >>> for length in (10, 20, 30):
            ...     history.add(torch.zeros(4, length))
            >>> history.compare(torch.zeros(4, 60))
            'float32[4, 60]: the largest so far, 100 % more elements than float32[4, 30], the largest of 3 before.'
        """
        size = _elements(batch)
        if not size:
            return ""
        text = describe_batch(batch)
        if not self._sizes:
            return f"{text}: the first."
        before = f"the largest of {len(self._sizes)} before"
        if size > self.largest:
            more = size / self.largest - 1
            return f"{text}: the largest so far, {more:.0%} more elements than {self.largest_text}, {before}.".replace(
                "%", " %"
            )
        ordered = sorted(self._sizes)
        if ordered[0] == size == ordered[-1]:
            before = f"all {len(ordered)}" if len(ordered) > 1 else "the one"
            return f"{text}: as large as {before} before."
        share = bisect_left(ordered, size) / len(ordered)
        return (
            f"{text}: larger than {share * 100:.0f} % of {len(ordered)} before; the largest, {self.largest_text}, "
            "went well."
        )


def _elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch))


def largest_sites(segments: Iterable[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Add up the live blocks of an allocator snapshot by the line of code that asked for them.

    Args:
        segments: What ``torch.cuda.memory_snapshot()`` returns. Without
            ``torch.cuda.memory._record_memory_history()`` its blocks name no code, and the result is empty.

    Returns:
        ``(line, bytes)``, largest first, five at most.
    """
    sites: dict[str, int] = {}
    for segment in segments:
        for block in segment.get("blocks", ()):
            site = _site(block.get("frames", ())) if block.get("state") == "active_allocated" else ""
            if site:
                sites[site] = sites.get(site, 0) + int(block["size"])
    return sorted(sites.items(), key=lambda item: -item[1])[:_MOST_SITES]


def _site(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line outside of torch, in Python."""
    for frame in frames:
        name = str(frame.get("filename", ""))
        if name.endswith(".py") and "/torch/" not in name.replace("\\", "/"):
            return f"{name}:{frame.get('line')} in {frame.get('name')}"
    return ""


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    """What is known of a run whose memory ran out.

    Args:
        phase: What it was doing, in words.
        step: Optimizer steps taken.
        epoch: Epoch, counted from 0.
        batch_idx: Index of the batch in its epoch; ``None`` outside of one.
        rank: Rank of the process.
        location: The user's line, ``None`` where unknown.
        shortage: What the error tells.
        batch: The batch beside those before it, in words.
        held: Bytes on the device by part, as far as they could be walked over.
        sites: Lines of code that held most, where the allocator's history was on.
        retries: How often the allocator had given back its whole cache before; ``None`` where unknown.
        predicted: What an estimate of this very step says; ``None`` without one.
        capacity_bytes: What the run could have, ``None`` if unknown.
        remedies: Changes that were estimated.
        setting: The environment line against fragmentation, ``None`` if it is set already.
    """

    phase: str
    step: int
    epoch: int
    batch_idx: int | None
    rank: int
    location: str | None
    shortage: MemoryShortage
    batch: str = ""
    held: Mapping[str, int]
    sites: tuple[tuple[str, int], ...] = ()
    retries: int | None = None
    predicted: MemoryEstimate | None = None
    capacity_bytes: int | None = None
    remedies: tuple[Remedy, ...] = ()
    setting: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; sizes are integers in bytes."""
        plain = {**vars(self), "shortage": asdict(self.shortage), "cause": self.shortage.cause}
        plain["held"] = dict(self.held)
        plain["remedies"] = [asdict(remedy) for remedy in self.remedies]
        plain["predicted"] = None if self.predicted is None else self.predicted.to_dict()
        return {"version": 1, **plain, "text": report_text(self)}


def report_text(report: PostMortem) -> str:
    """Write a post-mortem for people, some lines long."""
    batch = "" if report.batch_idx is None else f", batch {report.batch_idx} of epoch {report.epoch}"
    rank = f" [rank {report.rank}]" if report.rank else ""
    steps = f"{report.step} optimizer step{'s' if report.step != 1 else ''}"
    lines = [f"Out of memory{rank} on {report.shortage.device}: {report.phase}, after {steps}{batch}."]
    if report.location:
        lines += _item("Where", report.location)
    lines += _item("Cause", _cause(report))
    lines += _item("Batch", report.batch)
    lines += _item("Held", _held(report))
    for site, size in report.sites:
        lines += _item("", f"{format_bytes(size)} from {site}")
    lines += _item("Predicted", _predicted(report))
    return "\n".join([*lines, *_remedies(report)])


def _item(name: str, text: str) -> list[str]:
    return wrap(f"{name}: {text}" if name else f"- {text}", "  ") if text else []


def _remedies(report: PostMortem) -> list[str]:
    """List what fits; where nothing does, what saves most."""
    if not report.remedies:
        return _item("What could help", _no_remedy(report))
    fitting = [remedy for remedy in report.remedies if remedy.fits]
    shown = fitting or sorted(report.remedies, key=lambda remedy: remedy.need_bytes)
    lines = ["  What would have fitted:" if fitting else "  Not enough alone, but the largest savings:"]
    for number, remedy in enumerate(shown[:_MOST_REMEDIES], start=1):
        text = f"{remedy.description}: {format_bytes(remedy.need_bytes)}; {remedy.how}"
        lines += wrap(text, f"  {number}. ")
    return lines


def _cause(report: PostMortem) -> str:
    s = report.shortage
    asked = f"{format_bytes(s.requested_bytes)} asked for" if s.requested_bytes is not None else ""
    if s.is_limited:
        return f"{asked}: a limit on this process stops it (`set_per_process_memory_fraction`). Raise it."
    if s.missing_bytes is None:
        return f"{asked}; the error tells no more." if asked else "the error tells no figures."
    asked += f", {format_bytes(s.free_bytes or 0)} free"
    if s.cached_bytes is not None:
        asked += f", {format_bytes(s.cached_bytes)} cached in pieces"
    total = "" if s.total_bytes is None else f" of {format_bytes(s.total_bytes)}"
    missing = format_bytes(s.missing_bytes)
    texts = {
        "fragmentation": "fragmentation: free and cached memory together would have been enough, but no piece was "
        f"large enough. {f'Set {report.setting} in the environment.' if report.setting else ''}",
        "limit": f"this process is limited to {format_bytes(s.allowed_bytes or 0)}{total}. Raise the limit "
        "(`set_per_process_memory_fraction`).",
        "other processes": f"other processes hold {format_bytes(s.others_bytes or 0)}{total}; without them it would "
        "have fitted.",
        "real need": f"the run needs more than there is, here {missing} more.",
        "unknown": "",
    }  # fmt: skip
    retries = ""
    if report.retries:
        retries = f" The allocator had emptied its cache {report.retries} times before to make room."
    return f"{asked}: {texts[s.cause]}".rstrip() + retries


def _held(report: PostMortem) -> str:
    parts = [(name, size) for name, size in report.held.items() if size]
    allocated = report.shortage.allocated_bytes
    if allocated is not None:
        rest = allocated - sum(report.held.values())
        if rest > 0:
            parts.append(("activations, temporaries and what your code keeps", rest))
    if report.shortage.private_pools_bytes:
        parts.append(("(of these in CUDA graphs)", report.shortage.private_pools_bytes))
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)


def _predicted(report: PostMortem) -> str:
    estimate = report.predicted
    if estimate is None:
        return ""
    text = str(estimate)
    if report.capacity_bytes is None:
        return text
    if estimate.minimum_device_bytes <= report.capacity_bytes:
        return (
            f"{text}. That fits {format_bytes(report.capacity_bytes)}, so something beyond a single step holds memory: "
            "outputs or losses kept in a list, a cache, another model, or other callbacks."
        )
    return f"{text}. The device offers {format_bytes(report.capacity_bytes)}."


def _no_remedy(report: PostMortem) -> str:
    if report.phase in ("validation", "sanity check", "test", "prediction"):
        return "a smaller batch of that loader; training is not affected by it."
    return "not estimated; a smaller batch, activation checkpointing or lower precision are the first to try."
