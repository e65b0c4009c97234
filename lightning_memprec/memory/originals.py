"""Keep the contents of the user's real tensors that a trace writes to, such as a teacher's in a global variable."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Originals"]


class Originals:
    """Contents of real tensors before the first write, for as long as the tensors live."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[weakref.ref[torch.UntypedStorage], Tensor]] = {}

    def save(self, tensors: Iterable[Tensor]) -> None:
        """Copy what is about to be written to the host, each storage once.

        Args:
            tensors: Real tensors; sparse ones are left out.
        """
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._saved:
                forget = functools.partial(self._forget, storage._cdata)
                self._saved[storage._cdata] = (
                    weakref.ref(storage, forget),
                    _all_bytes(storage).to("cpu", copy=True),
                )

    def _forget(self, key: int, _: object) -> None:
        self._saved.pop(key, None)

    def put_back(self) -> None:
        """Give the tensors that are still alive their contents again."""
        for reference, contents in list(self._saved.values()):
            storage = reference()
            if storage is not None and storage.nbytes() == contents.numel():
                _all_bytes(storage).copy_(contents)
        self._saved.clear()


def _all_bytes(storage: torch.UntypedStorage) -> Tensor:
    # A tensor of its own, so that no version counter of the user's tensors moves.
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
