"""Births and deaths of storages, and the book in which they are kept."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_memprec._errors import TraceError

__all__ = ["Ledger", "MemoryEvents", "StorageRecord", "strided_parts"]

_NO_EVENT = -1


class StorageRecord:
    """One storage: its size, where it was made, when it lived.

    Attributes:
        size_bytes: Bytes asked for, not rounded.
        phase: Index into :attr:`MemoryEvents.phases` at birth.
        module: Index into :attr:`MemoryEvents.modules` at birth.
        grad_enabled: Whether autograd recorded at birth: tells recomputed activations from temporaries.
        birth: Event at which it was born.
        death: Event at which it died, or -1 while it lives.
        category: Set by :meth:`Recorder.mark`; ``None`` is resolved by age.
        owner: Name of the parameter it belongs to, for gradients and optimizer states.
        smallest_bytes: With how little whoever asked would do if memory is out; ``None`` if with nothing less.
    """

    __slots__ = (
        "birth",
        "category",
        "death",
        "grad_enabled",
        "module",
        "owner",
        "phase",
        "size_bytes",
        "smallest_bytes",
    )

    def __init__(self, size_bytes: int, phase: int, module: int, grad_enabled: bool, birth: int) -> None:
        self.size_bytes = size_bytes
        self.phase = phase
        self.module = module
        self.grad_enabled = grad_enabled
        self.birth = birth
        self.death = _NO_EVENT
        self.category: str | None = None
        self.owner: str | None = None
        self.smallest_bytes: int | None = None


@dataclass
class MemoryEvents:
    """Everything a trace recorded.

    Attributes:
        storages: One record a storage, in order of birth.
        order: Storage numbers, ``k`` for a birth and ``~k`` for a death, in order of time.
        phases: ``(name, step, first event)`` of each phase, in order of time.
        modules: Names of the modules that made storages; entry 0 is the root.
        flops: Floating-point operations of matrix products, convolutions and attention, as ``torch.utils.flop_counter``
            counts them.
    """

    storages: list[StorageRecord] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    phases: list[tuple[str, int, int]] = field(default_factory=list)
    modules: list[str] = field(default_factory=lambda: [""])
    flops: int = 0


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """Weak reference that knows which record and address it stands for."""

    __slots__ = ("index", "key", "size_bytes")
    index: int
    key: int
    size_bytes: int


class Ledger:
    """Counts storages from birth to death, each with the phase and the module that made it."""

    def __init__(self) -> None:
        self._live: dict[int, _StorageRef] = {}
        self._excluded: set[int] = set()
        self.restart()

    def restart(self) -> None:
        """Forget all births so far, but not the contents that are known: what came before was no training."""
        self.events = MemoryEvents(phases=[("setup", -1, 0)])
        self.phase = self.module = 0
        self._live.clear()
        self._sequence: tuple[list[int], list[int]] = ([-1], [0])

    # -- phases, modules, categories ------------------------------------------------------------------

    def enter_phase(self, name: str, step: int) -> None:
        """Start a phase; everything born from now on belongs to it."""
        self.phase = len(self.events.phases)
        self.events.phases.append((name, step, len(self.events.order)))

    def enter_module(self, module: int) -> None:
        """Make ``module`` the owner of what is born, and of the backward nodes made from now on."""
        self.module = module
        numbers, modules = self._sequence
        numbers.append(torch._C._autograd._get_sequence_nr())
        modules.append(module)

    def mark(self, tensor: Tensor | None, category: str, owner: str | None = None) -> None:
        """Say what a tensor is; registers it if it was not seen being born."""
        if tensor is None or isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):  # type: ignore[attr-defined]
            return
        for part in strided_parts(tensor):
            if not part.is_meta:
                continue
            index = self.register(part)
            if index is not None:
                record = self.events.storages[index]
                record.category, record.owner = category, owner

    # -- births and deaths ----------------------------------------------------------------------------

    def register(self, tensor: Tensor) -> int | None:
        """Count the storage of a strided meta tensor, if it is new; return the number of its record."""
        return self.register_storage(tensor.untyped_storage())

    def register_storage(self, storage: torch.UntypedStorage) -> int | None:
        """Count a storage, if it is new or has another size than before."""
        key = storage._cdata
        ref = self._live.get(key)
        size_bytes = storage.nbytes()
        if ref is not None:
            if ref.size_bytes == size_bytes:
                return ref.index
            self._on_death(ref)
        if size_bytes == 0 or key in self._excluded:
            return None
        index = self._birth(size_bytes)
        ref = _StorageRef(storage, self._on_death)
        ref.index, ref.key, ref.size_bytes = index, key, size_bytes
        self._live[key] = ref
        return index

    def _birth(self, size_bytes: int) -> int:
        events = self.events
        index = len(events.storages)
        module = self.module
        grad_enabled = torch.is_grad_enabled()
        if not grad_enabled:
            node = torch._C._current_autograd_node()
            if node is not None:
                numbers, modules = self._sequence
                module = modules[bisect_right(numbers, node._sequence_nr()) - 1]
        events.storages.append(StorageRecord(size_bytes, self.phase, module, grad_enabled, len(events.order)))
        events.order.append(index)
        return index

    def _on_death(self, ref: _StorageRef) -> None:
        events = self.events
        if self._live.get(ref.key) is not ref:
            return  # Born before a restart.
        del self._live[ref.key]
        events.storages[ref.index].death = len(events.order)
        events.order.append(~ref.index)

    def is_newest(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's storage is the one born last."""
        ref = self._live.get(tensor.untyped_storage()._cdata)
        return ref is not None and ref.index == len(self.events.storages) - 1

    def exclude(self, tensor: Tensor) -> Tensor:
        """Leave a meta tensor uncounted: it stands for a host copy of unknown contents."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._excluded.add(key)
        weakref.finalize(storage, self._excluded.discard, key)
        return tensor

    def keep(self, size_bytes: int, category: str) -> None:
        """Count a storage that lives for the rest of the trace and belongs to no tensor."""
        self.events.storages[self._birth(size_bytes)].category = category

    def transient(self, size_bytes: int, smallest_bytes: int | None = None) -> None:
        """Count a storage that lives only inside one operator, which may do with ``smallest_bytes``."""
        if size_bytes > 0:
            index = self._birth(size_bytes)
            self.events.storages[index].smallest_bytes = smallest_bytes
            self.events.storages[index].death = len(self.events.order)
            self.events.order.append(~index)


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors a tensor is made of; of a distributed one, what this rank holds."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    raise TraceError(
        f"A tensor of layout {tensor.layout} cannot be traced. Use dense or COO tensors, or `probe_memory`."
    )
