"""How much memory a run may use, as far as this process can know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightning_memprec._devices import find_device
from lightning_memprec._units import parse_bytes

if TYPE_CHECKING:
    pass

__all__ = ["Target", "choose_target"]


@dataclass(frozen=True)
class Target:
    """The device that a run is judged for.

    Args:
        estimate_for: ``device`` of the estimate: ``"cuda"``, ``"cpu"`` or a catalogue name.
        name: Name of the device for people.
        total_bytes: Capacity set by the user or the catalogue; ``None`` to ask the device.
        root_device: Device of this process, asked for its free memory.
    """

    estimate_for: str
    name: str
    total_bytes: int | None
    root_device: torch.device

    def capacity_bytes(self, context_bytes: int) -> int | None:
        """Return what the device offers this process, ``None`` if nothing tells.

        A live device offers what is free plus what this process holds already: memory that its allocator has
        reserved, and the context, which the estimate counts and which exists by now.

        Args:
            context_bytes: The estimate's ``outside_allocator_bytes``.
        """
        if self.total_bytes is not None or self.root_device.type != "cuda":
            return self.total_bytes
        free_bytes, _ = torch.cuda.mem_get_info(self.root_device)
        return free_bytes + torch.cuda.memory_reserved(self.root_device) + context_bytes


def choose_target(device: str | None, device_memory: int | str | None, root_device: torch.device) -> Target:
    """Decide for which device a run is judged, and against which capacity.

    Args:
        device: Catalogue name, ``"cuda"`` or ``"cpu"``; ``None`` for the Trainer's own device.
        device_memory: Capacity that overrides the catalogue and the device.
        root_device: The Trainer's device.

    Raises:
        ValueError: If the device or the size is unknown.
    """
    total_bytes = None if device_memory is None else parse_bytes(device_memory)
    if device is None:
        name = torch.cuda.get_device_name(root_device) if root_device.type == "cuda" else root_device.type
        return Target(_estimated_as(name, root_device), f"`{name}`", total_bytes, root_device)
    if device in ("cuda", "cpu"):
        return Target(device, f"`{device}`", total_bytes, torch.device("cpu"))
    spec = find_device(device)
    return Target(spec.name, f"`{spec.name}`", total_bytes or spec.memory_bytes, root_device)


def _estimated_as(name: str, root_device: torch.device) -> str:
    """Estimate for the catalogue's entry of a live device, if it has one."""
    if root_device.type == "cpu":
        return "cpu"
    try:
        return find_device(name).name
    except ValueError:
        return "cuda"
