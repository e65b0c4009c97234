"""The allocator's rules once more, slow and plain: a list of segments, a list of what is live, gaps between.

Written from the prose of the rules, not from the package: free blocks are not kept but found anew as the gaps
between live blocks, so that nothing has to be split, merged or sorted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 2**20
FAR = 2**60


def naive_round(size, divisions=0):
    if divisions > 1 and size > 512 * divisions:
        low = 1
        while low * 2 <= size:
            low *= 2
        return next(
            low + k * low // divisions for k in range(divisions + 1) if low + k * low // divisions >= size
        )
    return max(512, (size + 511) // 512 * 512)


@dataclass
class NaiveAllocator:
    capacity: int = FAR
    allowed: int = FAR  # the per-process limit
    max_split: int = FAR
    rounding: int = 20 * MIB
    large_segment: int = 20 * MIB
    threshold: float = 0.0
    expandable: bool = False
    segments: list = field(default_factory=list)  # (small?, start, end), or pages if expandable
    live: dict = field(default_factory=dict)  # key: (small?, start, end)
    lookups: dict = field(default_factory=lambda: {True: 0, False: 0})
    seen: dict = field(default_factory=dict)  # gap: lookups when it first appeared
    next_start: int = 0
    retries: int = 0
    driver_calls: int = 0

    @property
    def reserved(self):
        return sum(end - start for _, start, end in self.segments)

    @property
    def allocated(self):
        return sum(end - start for _, start, end in self.live.values())

    @property
    def inactive_split(self):
        return sum(
            end - start
            for small in (True, False)
            for start, end in self.gaps(small)
            if self.split(start, end)
        )

    def split(self, start, end):
        return not any((a, b) == (start, end) for _, a, b in self.segments)

    def regions(self, small):
        """Stretches backed by memory: segments, or runs of neighboring pages."""
        regions = []
        for _, start, end in sorted(s for s in self.segments if s[0] == small):
            if self.expandable and regions and regions[-1][1] == start:
                regions[-1] = (regions[-1][0], end)
            else:
                regions.append((start, end))
        return regions

    def gaps(self, small):
        gaps = []
        for start, end in self.regions(small):
            for a, b in sorted((a, b) for s, a, b in self.live.values() if s == small and start <= a < end):
                if a > start:
                    gaps.append((start, a))
                start = b
            if start < end:
                gaps.append((start, end))
        return gaps

    def malloc(self, key, size):
        small = size <= MIB
        self.lookups[small] += 1
        gap = self.best_fit(small, size) or self.new_gap(small, size)
        if gap is None:
            return False
        start, end = gap
        rest = end - start - size
        splits = rest >= 512 if small or self.expandable else size < self.max_split and rest > MIB
        self.live[key] = (small, start, start + size if splits else end)
        self.remember()
        return True

    def free(self, key):
        del self.live[key]
        self.remember()

    def remember(self):
        gaps = {(small, *gap) for small in (True, False) for gap in self.gaps(small)}
        self.seen = {gap: self.seen.get(gap, self.lookups[gap[0]]) for gap in gaps}

    def best_fit(self, small, size):
        fitting = sorted(
            (g for g in self.gaps(small) if g[1] - g[0] >= size), key=lambda g: (g[1] - g[0], g[0])
        )
        if not fitting:
            return None
        gap = fitting[0]
        if self.expandable:
            for other in fitting[1:]:
                if self.with_space_behind(small, other) >= self.with_space_behind(small, gap):
                    break
                gap = other
        length = gap[1] - gap[0]
        if size < self.max_split and length >= self.max_split:
            return None
        if size >= self.max_split and length >= size + self.rounding:
            return None
        return gap

    def with_space_behind(self, small, gap):
        starts = [s for s, _ in self.regions(small) if s > gap[0]]
        if gap[1] in [end for _, end in self.regions(small)]:
            return min(starts, default=FAR) - gap[0]
        return gap[1] - gap[0]

    def segment_size(self, size):
        if size <= MIB:
            return 2 * MIB
        if size < 10 * MIB:
            return self.large_segment
        return (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB

    def new_gap(self, small, size):
        if self.allowed < FAR and self.threshold:
            self.collect()
        gap = self.ask_driver(small, size)
        if gap is None and self.max_split < FAR and not self.expandable and self.drop_oversize(small, size):
            gap = self.ask_driver(small, size)
        if gap is None:
            self.drop_cached()
            self.retries += 1
            gap = self.ask_driver(small, size)
        return gap

    def ask_driver(self, small, size):
        segment = self.segment_size(size)
        if self.reserved + segment > self.allowed:
            return None
        if self.expandable:
            return self.ask_for_pages(small, size)
        if self.reserved + segment > self.capacity:
            return None
        self.segments.append((small, self.next_start, self.next_start + segment))
        self.next_start += segment
        self.driver_calls += 1
        return self.segments[-1][1:]

    def ask_for_pages(self, small, size):
        """Map pages at the lowest hole that, with the free memory around it, is large enough."""
        page = 2 * MIB if small else self.large_segment
        regions = self.regions(small)
        for hole_start, hole_end in zip(
            [0, *(e for _, e in regions)], [*(s for s, _ in regions), FAR], strict=True
        ):
            if hole_start == hole_end:
                continue
            start = hole_start
            for gap in self.gaps(small):
                if gap[1] == hole_start:
                    start = gap[0]
            if self.free_stretch_end(small, start) - start < size:
                continue
            at = start
            while at < start + size:
                gap = next((g for g in self.gaps(small) if g[0] <= at < g[1]), None)
                if gap is not None:
                    at = gap[1]
                    continue
                hole = min([s for s, _ in self.regions(small) if s > at], default=FAR)
                wanted = min(start + size, hole) - at
                pages = (wanted + page - 1) // page
                if self.reserved + pages * page > self.capacity:
                    return None
                self.segments += [(small, at + k * page, at + (k + 1) * page) for k in range(pages)]
                self.driver_calls += 1
                at += pages * page
            return next(g for g in self.gaps(small) if g[0] == start)
        raise AssertionError

    def free_stretch_end(self, small, start):
        return min([a for s, a, _ in self.live.values() if s == small and a >= start], default=FAR)

    def drop_oversize(self, small, size):
        wanted = max(size, self.max_split)
        by_size = sorted(self.gaps(small), key=lambda g: (g[1] - g[0], g[0]))
        for gap in by_size:
            if gap[1] - gap[0] >= wanted:
                self.segments.remove((small, *gap))
                return True
        dropped = 0
        for gap in reversed(by_size):
            if dropped >= wanted or gap[1] - gap[0] < self.max_split:
                break
            self.segments.remove((small, *gap))
            dropped += gap[1] - gap[0]
        return dropped >= wanted

    def drop_cached(self):
        gaps = [(small, *gap) for small in (True, False) for gap in self.gaps(small)]
        self.segments = [
            s for s in self.segments if not any(g[0] == s[0] and g[1] <= s[1] and s[2] <= g[2] for g in gaps)
        ]

    def collect(self):
        wanted = self.reserved - int(self.threshold * self.allowed)
        while wanted > 0:
            ages = {
                gap: self.lookups[False] - self.seen[(False, *gap)]
                for gap in self.gaps(False)
                if not self.split(*gap) and not self.expandable
            }
            if not ages:
                return
            mean = sum(ages.values()) / len(ages)
            for gap, age in ages.items():
                if age >= mean:
                    self.segments.remove((False, *gap))
                    wanted -= gap[1] - gap[0]
