"""Modules that are alike, such as the layers of a network, counted as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from lightning_memprec.memory.result import Breakdown, ModuleMemory

__all__ = ["modules_alike"]


def modules_alike(modules: Iterable[ModuleMemory]) -> list[tuple[int, ModuleMemory]]:
    """Add up modules of one type whose names differ in numbers only.

    Args:
        modules: What each module holds; those that hold nothing are left out.

    Returns:
        How many were added up, and the sum under their name with ``*`` for each number; the largest first.

    Example:
        >>> layers = [ModuleMemory(f"layers.{i}.mlp", "MLP", Breakdown(activations_bytes=8)) for i in range(3)]
        >>> ((count, module),) = modules_alike(layers)
        >>> count, module.name, module.breakdown.total_bytes
        (3, 'layers.*.mlp', 24)
    """
    together: dict[tuple[str, str], list[ModuleMemory]] = {}
    for module in modules:
        if module.breakdown.total_bytes:
            name = ".".join("*" if part.isdecimal() else part for part in module.name.split("."))
            together.setdefault((name, module.type_name), []).append(module)
    groups = [
        (len(members), ModuleMemory(name if members[1:] else members[0].name, type_name, _sum(members)))
        for (name, type_name), members in together.items()
    ]
    return sorted(groups, key=lambda group: -group[1].breakdown.total_bytes)


def _sum(modules: list[ModuleMemory]) -> Breakdown:
    sums: dict[str, int] = {}
    for module in modules:
        for part, size_bytes in asdict(module.breakdown).items():
            sums[part] = sums.get(part, 0) + size_bytes
    return Breakdown(**sums)
