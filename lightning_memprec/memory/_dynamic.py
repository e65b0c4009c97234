"""Operators whose Python result or output shape depends on tensor contents.

Each handler gets ``(recorder, func, args, kwargs)`` with every tensor on meta and returns the operator's
result, or ``NotImplemented`` to let the ordinary meta kernel run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_memprec._errors import DataDependentError
from lightning_memprec.memory._collectives import COLLECTIVE_HANDLERS
from lightning_memprec.memory._location import user_location
from lightning_memprec.memory._sparse import SPARSE_HANDLERS
from lightning_memprec.memory.accumulation import sums_in_place
from lightning_memprec.memory.known import MAX_KNOWN_NUMEL
from lightning_memprec.memory.losses import COMPOSED

if TYPE_CHECKING:
    from lightning_memprec.memory.trace import Recorder

__all__ = ["HANDLERS", "HOST_ARGUMENTS"]

Handler = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any]], Any]

# Operators that take a host tensor on purpose.
HOST_ARGUMENTS = frozenset(
    {"_to_copy", "_pack_padded_sequence", "copy_", "_cudnn_rnn", "_cudnn_rnn_backward"}
)


def _require(recorder: Recorder, tensor: Tensor, func: Any) -> Tensor:
    value = recorder.known.value(tensor)
    if value is None:
        location = user_location()
        raise DataDependentError(
            f"`{func._opname}` makes a shape from values that depend on weights or on data"
            f"{f', at {location}' if location else ''}. A trace has shapes but no values. "
            "Guard that line, or measure a few real steps (`probe_memory`, or `MemoryPreflight(probe=True)`).",
            location,
        )
    return value


def _item(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return recorder.scalar(args[0])


def _answer(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compare for real what is known."""
    for tensor in args[:2]:
        _require(recorder, tensor, func)
    return recorder.run_real(func, args, kwargs)


def _all_known(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the output's shape from a real run on known contents."""
    for arg in args:
        if isinstance(arg, Tensor):
            _require(recorder, arg, func)
    real = recorder.run_real(func, args, kwargs)
    if isinstance(real, Tensor):
        return recorder.meta_twin(real)
    return type(real)(recorder.meta_twin(t) for t in real)


def _index(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Turn boolean masks into the index tensors that they stand for."""
    indices = args[1]
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return NotImplemented
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            value = _require(recorder, index, func)
            expanded.extend(recorder.meta_twin(i) for i in value.nonzero(as_tuple=True))
        else:
            expanded.append(index)
    out = func(args[0], expanded)
    known = recorder.known.value(args[0])
    if known is not None:
        real = func(known, [None if i is None else recorder.known.value(i) for i in expanded])
        recorder.known.remember(out, real)
    return out


def _masked_select(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0] in recorder.known:
        return _all_known(recorder, func, args, kwargs)
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    count = int(_require(recorder, args[1], func).expand(shape).sum())
    return args[0].new_empty(count)


def _pack_padded_sequence(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    data, lengths = args[:2]
    lengths = _require(recorder, lengths, func).cpu()
    steps = int(lengths.max())
    batch_sizes = torch.stack([(lengths > step).sum() for step in range(steps)])
    packed = data.new_empty((int(lengths.sum()), *data.shape[2:]))
    return packed, batch_sizes


def _in_place_in_backward(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Write into the zeros that a gradient formula has just made, as a real run does.

    ``value_selecting_reduction_backward``, ``gather_backward``, ``index_backward`` and their kin
    (aten/src/ATen/native, torch/csrc/autograd/FunctionsManual.cpp) fill fresh zeros in place, unless
    ``areAnyTensorSubclassLike`` holds, which it does under any dispatch mode: then they copy.
    """
    target = args[0]
    fresh = not torch.is_grad_enabled() and torch._C._current_autograd_node() is not None
    if not fresh or not recorder.is_newest(target):
        return NotImplemented
    if func is torch.ops.aten.scatter_add.default:
        func = torch.ops.aten.scatter_add_.default
    for size_bytes in recorder._kernel_allocations(func, args, kwargs):
        recorder.transient(size_bytes)
    return target


def _grouped_mm(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The meta kernel takes half precision alone, though CPU and CUDA have a way for float32 too."""
    left, right = args[:2]
    rows, columns = left.shape[-2], right.shape[-1]
    if left.ndim == right.ndim == 2:  # One product a group of the inner dimension.
        groups = (args[2] if len(args) > 2 else kwargs["offs"]).shape[0]
        return left.new_empty(groups, rows, columns)
    groups = (left.shape[0],) if left.ndim == right.ndim == 3 else ()
    return left.new_empty(*groups, rows, columns)


def _ctc_loss(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """No meta kernel exists: losses ``(N,)`` and the alphas, ``(N, T, 2 S + 1)`` (aten/native/LossCTC.cpp)."""
    log_probs, _, _, target_lengths = args[:4]
    if isinstance(target_lengths, Tensor):
        target_lengths = _require(recorder, target_lengths, func).tolist()
    steps, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(
        batch, steps, 2 * max(target_lengths, default=0) + 1
    )


def _ctc_loss_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    log_probs, log_alpha = args[1], args[6]
    recorder.transient(log_alpha.numel() * log_alpha.element_size())  # log_beta
    return torch.empty_like(log_probs)


def _assertion(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Used by argument checks alone (``torch.distributions``): a run that trains passes them."""
    out = func(*args, **kwargs)
    recorder.known.remember(out, torch.tensor(func._opname == "_is_all_true"))
    return out


def _like_first(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Samplers without a meta kernel: the sample has the shape of the first parameter."""
    known = all(arg in recorder.known for arg in args if isinstance(arg, Tensor))
    real = recorder.run_real(func, args, kwargs) if known else None
    return torch.empty_like(args[0]) if real is None else recorder.meta_twin(real)


def _to_copy(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies between host and device: contents travel along, host copies are not counted."""
    device = kwargs.get("device")
    source = args[0]
    if source.is_meta and (device is None or torch.device(device).type == "meta"):
        return NotImplemented
    if source.is_meta:  # device to host
        value = recorder.known.value(source)
        rest = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
        if value is not None:
            return func(value, **rest, device="cpu")
        return recorder.exclude(func(source, **rest))
    meta = func(source, **kwargs)
    rest = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory")}
    if source.device.type == "cpu" and source.layout is torch.strided:
        same = rest.get("dtype") in (None, source.dtype) and rest.get("memory_format") is None
        recorder.register(meta)
        recorder.known.remember(meta, source if same else func(source, **rest), borrow=same)
    return meta


def _copy_(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not target.is_meta:
        value = recorder.known.value(source)
        return target if value is None else func(target, value)
    value = recorder.known.value(source) if source.layout is torch.strided else None
    covers_all = (
        target.is_contiguous() and target.untyped_storage().nbytes() == target.numel() * target.element_size()
    )
    if value is not None and covers_all and target.numel() <= MAX_KNOWN_NUMEL:
        recorder.known.remember(target, value.to(target.dtype).expand(target.shape).contiguous().clone())
    elif value is not None and target in recorder.known:
        recorder.known.own(target)
        real_target = recorder.known.value(target)
        assert real_target is not None
        real_target.copy_(value)
    else:
        recorder.known.forget(target)
    return target


def _batch_norm(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # The schema does not say so, but training writes the running statistics.
    if args[5]:
        for tensor in args[3:5]:
            if tensor is not None:
                recorder.known.forget(tensor)
    return NotImplemented


def _add(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not sums_in_place(func, args, kwargs):
        return NotImplemented
    recorder.known.forget(args[0])
    return args[0]


def _composed(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the operators that an operator is made of."""
    with recorder:
        return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _four_bit_product(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Unpack the whole weight and multiply, as bitsandbytes does on CPUs and with many rows on GPUs.

    With fewer than 5 to 1,536 rows, by GPU and shape, a kernel unpacks as it goes, and less is needed.
    """
    from bitsandbytes.backends.default.ops import _gemm_4bit_default_impl

    with recorder:
        return _gemm_4bit_default_impl(*args, **kwargs)


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(COMPOSED, _composed),
    "bitsandbytes::gemm_4bit": _four_bit_product,
    **SPARSE_HANDLERS,
    **COLLECTIVE_HANDLERS,
    "aten::add": _add,
    "aten::_local_scalar_dense": _item,
    "aten::equal": _answer,
    "aten::allclose": _answer,
    "aten::nonzero": _all_known,
    "aten::_unique2": _all_known,
    "aten::_unique": _all_known,
    "aten::unique_dim": _all_known,
    "aten::unique_consecutive": _all_known,
    "aten::unique_dim_consecutive": _all_known,
    "aten::bincount": _all_known,
    "aten::repeat_interleave": _all_known,
    "aten::index": _index,
    "aten::masked_select": _masked_select,
    "aten::_pack_padded_sequence": _pack_padded_sequence,
    "aten::scatter": _in_place_in_backward,
    "aten::scatter_add": _in_place_in_backward,
    "aten::index_put": _in_place_in_backward,
    "aten::index_add": _in_place_in_backward,
    "aten::_grouped_mm": _grouped_mm,
    "aten::_ctc_loss": _ctc_loss,
    "aten::_ctc_loss_backward": _ctc_loss_backward,
    "aten::_is_all_true": _assertion,
    "aten::_is_any_true": _assertion,
    "aten::_sample_dirichlet": _like_first,
    "aten::binomial": _like_first,
    "aten::_to_copy": _to_copy,
    "aten::copy_": _copy_,
    "aten::native_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm": _batch_norm,
}
