"""``scaled_dot_product_attention`` as a CUDA device would run it.

Rules of torch 2.14: ``aten/src/ATen/native/transformers/attention.cpp`` (what is padded and converted) and
``cuda/sdp_utils.cpp`` (which kernel is taken). What a kernel saves for the backward pass follows from the
real operators, whose meta kernels and autograd formulas are used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_memprec.memory.interpose import Kernel

__all__ = ["AttentionCall", "attention_kernel", "choose_backend"]

Backend = Literal["math", "flash", "efficient", "cudnn"]

# torch.nn.attention.SDPBackend by number.
_BACKENDS: dict[int, Backend] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
# The order until somebody sets one: as built, and as Hopper and Blackwell change it at the first call.
_DEFAULT_ORDER: tuple[Backend, ...] = ("flash", "efficient", "math")
_CUDNN_FIRST: tuple[Backend, ...] = ("cudnn", *_DEFAULT_ORDER)
_HALF = (torch.float16, torch.bfloat16)
_FUSED_RANGE = (8, 0), (12, 1)
_CUDNN_VERSION = 92400  # Bundled with torch 2.14 for CUDA 13; assumed where no cuDNN is installed.
_MASK_ALIGNMENT = 16


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one call that decide on the kernel; shapes ``(batch, heads, length, head size)``."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def requires_grad(self) -> bool:
        """Whether the log-sum-exp is kept for a backward pass."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


def choose_backend(call: AttentionCall, capability: tuple[int, int]) -> Backend:
    """Choose the attention kernel as CUDA would.

    Args:
        call: The call; its tensors may be on meta.
        capability: Compute capability, such as ``(8, 0)``.

    Returns:
        The first kernel of the priority order whose conditions hold.

    Raises:
        RuntimeError: If the kernels that are enabled cannot run the call; torch raises there too.

    References:
        ``select_sdp_backend`` in ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, torch 2.14.

    Example:
        >>> x = torch.empty(2, 8, 128, 64, dtype=torch.bfloat16, device="meta")
        >>> choose_backend(AttentionCall(x, x, x), (8, 0))
        'flash'
    """
    conditions: dict[Backend, Callable[[AttentionCall, tuple[int, int]], bool]] = {
        "math": lambda call, capability: torch._C._get_math_sdp_enabled(),
        "flash": _can_flash,
        "efficient": _can_efficient,
        "cudnn": _can_cudnn,
    }
    for backend in _priority_order(capability):
        if conditions[backend](call, capability):
            return backend
    raise RuntimeError(
        f"No enabled attention kernel runs a query of shape {tuple(call.query.shape)} and {call.query.dtype} "
        f"on compute capability {capability[0]}.{capability[1]}. "
        "Enable the math kernel with `torch.nn.attention.sdpa_kernel`."
    )


def attention_kernel(capability: tuple[int, int]) -> Kernel:
    """Return the kernel that stands in for ``scaled_dot_product_attention`` on meta tensors.

    Args:
        capability: Compute capability of the device that is stood in for.
    """
    aten = torch.ops.aten

    def attention(
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        on_meta = query.is_meta and all(t.numel() > 0 for t in call.tensors)
        backend = choose_backend(call, capability) if on_meta else "math"
        if backend == "math":
            return func(*call.tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if backend == "flash":
            padded = [_pad_last(t, 8) for t in call.tensors]
            scale = scale if scale is not None else 1.0 / math.sqrt(query.shape[-1])
            outputs = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)
            return outputs[0] if padded[0] is query else outputs[0][..., : query.shape[-1]]
        mask = _additive(attn_mask, query.dtype)
        fused = aten._scaled_dot_product_cudnn_attention
        if backend == "efficient":
            fused = aten._scaled_dot_product_efficient_attention
            if mask is not None:
                mask = _align_mask(mask).expand(*query.shape[:3], key.shape[2])
        return fused(*call.tensors, mask, call.requires_grad, dropout_p, is_causal, scale=scale)[0]

    return attention


# -- what is converted ---------------------------------------------------------------------------------


def _pad_last(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Turn a boolean mask into one to add, in the query's dtype."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _align_mask(mask: Tensor) -> Tensor:
    """Copy a mask whose rows do not start at multiples of 16 elements into one whose rows do."""
    if mask.stride(-1) == 1 and all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]


# -- which kernel --------------------------------------------------------------------------------------


def _priority_order(capability: tuple[int, int]) -> tuple[Backend, ...]:
    current = tuple(_BACKENDS[n] for n in torch._C._get_sdp_priority_order() if n in _BACKENDS)
    if current[:3] != _DEFAULT_ORDER and current != _CUDNN_FIRST:
        return current  # Set by the user.
    return _CUDNN_FIRST if _prefers_cudnn(capability) else (*_DEFAULT_ORDER, "cudnn")


def _prefers_cudnn(capability: tuple[int, int]) -> bool:
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or capability[0] not in (9, 10):
        return False
    built_for = int((torch.version.cuda or "13.0").split(".")[0])
    return _cudnn_version() > 91500 and (built_for >= 13 or capability[1] in (0, 3))


@lru_cache(maxsize=1)
def _cudnn_version() -> int:
    installed: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return installed or _CUDNN_VERSION


def _can_flash(call: AttentionCall, capability: tuple[int, int]) -> bool:
    size = call.query.shape[-1]
    # Consumer chips lack the shared memory for the backward pass of large heads.
    small_chip = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    fits_backward = size <= 192 or (call.dropout == 0.0 and size > 224)
    return (
        torch._C._get_flash_sdp_enabled()
        and all(t.dim() == 4 for t in call.tensors)
        and call.mask is None
        and all(t.shape[-1] == size for t in call.tensors)
        and size <= 256
        and _FUSED_RANGE[0] <= capability <= _FUSED_RANGE[1]
        and (not small_chip or not call.requires_grad or fits_backward)
        and (not call.is_causal or call.query.shape[-2] == call.key.shape[-2])
        and _same_dtype(call, _HALF)
        and _heads_match(call, same_key_value=True)
        and _rows_are_dense(call, ignore_single=True)
    )


def _can_efficient(call: AttentionCall, capability: tuple[int, int]) -> bool:
    modern = capability[0] >= 8
    half = call.query.dtype in _HALF
    # 128-bit loads where tensor cores are used, from Ampere on at least 4 elements.
    alignment = max(4 if modern else 1, (8 if half else 4) if modern or (capability[0] == 7 and half) else 1)
    dtypes = (torch.float16, torch.float32) + ((torch.bfloat16,) if modern else ())
    return (
        torch._C._get_mem_efficient_sdp_enabled()
        and (5, 0) <= capability <= _FUSED_RANGE[1]
        and all(t.dim() == 4 for t in call.tensors)
        and call.query.shape[-1] == call.key.shape[-1]
        and call.query.shape[-1] % alignment == 0
        and call.value.shape[-1] % alignment == 0
        and (not modern or all(t.storage_offset() % alignment == 0 for t in call.tensors))
        and _rows_are_dense(call, ignore_single=False)
        and _heads_match(call, same_key_value=True)
        and _same_dtype(call, dtypes)
    )


def _can_cudnn(call: AttentionCall, capability: tuple[int, int]) -> bool:
    deterministic = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    return (
        torch._C._get_cudnn_sdp_enabled()
        and not deterministic
        and all(t.dim() == 4 for t in call.tensors)
        and _same_dtype(call, _HALF)
        and _cudnn_mask(call)
        and _FUSED_RANGE[0] <= capability <= _FUSED_RANGE[1]
        and (call.dropout * 16.0).is_integer()
        and not (call.dropout > 0.0 and 91100 < _cudnn_version() < 91400)
        and _rows_are_dense(call, ignore_single=True)
        and _heads_match(call, same_key_value=False)
        and max(call.query.shape[:2]) <= 65535
        and _cudnn_head_size(call, capability)
        and call.key.shape[2] != 1
        and (call.dropout == 0.0 or call.query.shape[2] != 1)
    )


def _cudnn_head_size(call: AttentionCall, capability: tuple[int, int]) -> bool:
    sizes = call.query.shape[-1], call.value.shape[-1]
    large = (capability == (9, 0) or capability[0] == 10) and _cudnn_version() > 92200
    fits_backward = max(sizes) <= 128 or sizes in ((192, 128), (256, 256))
    return (
        max(sizes) <= (256 if large else 128)
        and all(size % 8 == 0 for size in sizes)
        and (not large or not call.requires_grad or fits_backward)
    )


def _cudnn_mask(call: AttentionCall) -> bool:
    mask = call.mask
    if mask is None:
        return True
    wanted = (*call.query.shape[:3], call.key.shape[2])
    return (
        not mask.requires_grad
        and mask.dim() in (2, 4)
        and all(m in (1, w) for m, w in zip(reversed(mask.shape), reversed(wanted), strict=False))
    )


def _same_dtype(call: AttentionCall, allowed: tuple[torch.dtype, ...]) -> bool:
    dtype = call.query.dtype
    return dtype in allowed and call.key.dtype is dtype and call.value.dtype is dtype


def _heads_match(call: AttentionCall, *, same_key_value: bool) -> bool:
    query, key, value = (t.shape[1] for t in call.tensors)
    if len({t.shape[0] for t in call.tensors}) != 1:
        return False
    if call.enable_gqa:
        return query % key == 0 and (key == value if same_key_value else query % value == 0)
    return query == key == value or key == value == 1


def _rows_are_dense(call: AttentionCall, *, ignore_single: bool) -> bool:
    rows = all(t.stride(-1) == 1 for t in call.tensors) or (ignore_single and call.query.shape[-1] == 1)
    return rows and (call.mask is None or call.mask.stride(-1) == 1)
