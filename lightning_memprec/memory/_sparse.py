"""Sparse COO gradients: their meta kernels lose the number of entries, which is what they need memory for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_memprec.memory.trace import Recorder

__all__ = ["SPARSE_HANDLERS"]


def _build(like: Tensor, indices: Tensor, values: Tensor, *, coalesced: bool = False) -> Tensor:
    built: Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default(
        like.sparse_dim(), like.dense_dim(), like.size(), indices, values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device, is_coalesced=coalesced,
    )  # fmt: skip
    return built


def _is_sparse(*tensors: Any) -> bool:
    return all(isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo for tensor in tensors)


def _known_indices(recorder: Recorder, indices: Tensor, value: Tensor | None) -> Tensor:
    if value is not None:
        recorder.known.remember(indices, value.contiguous())
    return indices


def _clone(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _is_sparse(args[0]):
        return NotImplemented
    indices = args[0]._indices()
    copied = indices.clone(memory_format=torch.contiguous_format)
    _known_indices(recorder, copied, recorder.known.value(indices))
    return _build(args[0], copied, args[0]._values().clone(), coalesced=args[0].is_coalesced())


def _add(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The entries of both, one after the other (aten/native/sparse/cuda/SparseCUDATensorMath.cu)."""
    if not _is_sparse(args[1]):
        return NotImplemented
    if not _is_sparse(args[0]):  # The entries are added to the dense tensor one by one.
        return args[0] if func._opname == "add_" else args[0].clone()
    parts = args[0]._indices(), args[1]._indices()
    known = [recorder.known.value(part) for part in parts]
    indices = torch.cat(parts, 1)
    if known[0] is not None and known[1] is not None:
        _known_indices(recorder, indices, torch.cat([known[0], known[1]], 1))
    total = _build(args[0], indices, torch.cat([args[0]._values(), args[1]._values()]))
    if func._opname == "add":
        return total
    args[0].data = total
    return args[0]


def _scale(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if _is_sparse(args[0]) else NotImplemented


def _coalesce(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One entry for each index; if the indices are not known, none is taken to repeat."""
    indices, values = args[0]._indices(), args[0]._values()
    known = recorder.known.value(indices)
    unique = None if known is None else known.unique(dim=1)  # type: ignore[no-untyped-call]
    count = indices.shape[1] if unique is None else unique.shape[1]
    kept = _known_indices(recorder, indices.new_empty((indices.shape[0], count)), unique)
    return _build(args[0], kept, values.new_empty((count, *values.shape[1:])), coalesced=True)


def _sparse_mask(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dense, mask = args[:2]
    values = dense.new_empty(mask._values().shape)
    return _build(mask, mask._indices(), values, coalesced=mask.is_coalesced())


SPARSE_HANDLERS = {
    "aten::clone": _clone,
    "aten::add": _add,
    "aten::add_": _add,
    "aten::mul_": _scale,
    "aten::div_": _scale,
    "aten::_coalesce": _coalesce,
    "aten::sparse_mask": _sparse_mask,
}
