"""Values that a trace without storage still knows: those that follow from the batch and constants alone.

Meta tensors have shapes but no contents. Lengths, masks and indices steer Python code and output shapes, so
their contents are computed for real, on the CPU, beside the meta tensors. A meta storage and its real twin
have the same layout: every view of one is a view of the other.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

__all__ = ["MAX_KNOWN_NUMEL", "KnownValues"]

# What is larger is not even computed: it could not be kept.
MAX_KNOWN_NUMEL = 2**21

# A twin larger than this is not kept: large float tensors do not steer control flow, and the trace promises
# to stay small whatever the model's size.
_MAX_TWIN_BYTES = 8 * 1024**2
_MAX_TOTAL_BYTES = 64 * 1024**2


class KnownValues:
    """Real contents of meta storages, keyed by the storage's address."""

    def __init__(self) -> None:
        self._twins: dict[int, torch.UntypedStorage] = {}
        self._borrowed: set[int] = set()
        # The address of a dead storage is used again: its contents go when it goes.
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._owned_bytes = 0

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._twins

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return the contents of a tensor as a real CPU tensor, or ``None`` if they are unknown.

        Args:
            tensor: Real tensor (returned as it is) or meta tensor.
        """
        if not tensor.is_meta:
            return tensor
        twin = self._twins.get(tensor.untyped_storage()._cdata)
        if twin is None:
            return None
        real = torch.empty(0, dtype=tensor.dtype)
        return real.set_(twin, tensor.storage_offset(), tensor.size(), tensor.stride())

    def remember(self, tensor: Tensor, real: Tensor, *, borrow: bool = False) -> None:
        """Store the contents of a fresh meta tensor.

        Args:
            tensor: Meta tensor that owns its storage.
            real: Its contents, same shape and dtype, on the CPU.
            borrow: The real storage belongs to the user: it is copied before anything is written to it.
        """
        key, size_bytes = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        if not borrow and (size_bytes > _MAX_TWIN_BYTES or self._owned_bytes + size_bytes > _MAX_TOTAL_BYTES):
            return
        same_layout = (
            real.stride() == tensor.stride()
            and real.storage_offset() == tensor.storage_offset()
            and real.untyped_storage().nbytes() >= size_bytes
        )
        if not same_layout:
            if size_bytes > _MAX_TWIN_BYTES:
                return
            real = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(real)
            borrow = False
        self._forget_key(key)
        self._refs[key] = weakref.ref(tensor.untyped_storage(), lambda _: self._forget_key(key))
        self._twins[key] = real.untyped_storage()
        if borrow:
            self._borrowed.add(key)
        else:
            self._owned_bytes += size_bytes

    def own(self, tensor: Tensor) -> None:
        """Copy a borrowed twin before it is written to."""
        key = tensor.untyped_storage()._cdata
        if key in self._borrowed:
            self._borrowed.discard(key)
            self._twins[key] = self._twins[key].clone()  # type: ignore[no-untyped-call]
            self._owned_bytes += self._twins[key].nbytes()

    def forget(self, tensor: Tensor) -> None:
        """Drop the contents of a storage that something unknown was written to."""
        if tensor.is_meta:
            self._forget_key(tensor.untyped_storage()._cdata)

    def _forget_key(self, key: int) -> None:
        """Drop the contents of the storage at an address."""
        self._refs.pop(key, None)
        twin = self._twins.pop(key, None)
        if twin is None:
            return
        if key in self._borrowed:
            self._borrowed.discard(key)
        else:
            self._owned_bytes -= twin.nbytes()
