"""The keys under which bitsandbytes keeps int8 layers, as Hugging Face Transformers writes and reads them.

``weight`` is int8 ``[N, K]``; ``SCB`` is the largest magnitude of each row, FP32 ``[N]``, so the scale is
``SCB / 127``; ``weight_format`` is 0 for rows (bitsandbytes/nn/modules.py, ``Linear8bitLt._save_to_state_dict``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_memprec.quantization.checkpoint_layout import LayerLayout
from lightning_memprec.quantization.streaming import StreamedTensor

__all__ = ["from_bitsandbytes", "holds", "quantization_config", "stream_to_bitsandbytes", "to_bitsandbytes"]

_STEPS = 127.0


def holds(layer: LayerLayout) -> bool:
    """Tell whether bitsandbytes can hold a layer: linear, 8 bits, symmetric, one scale a row, no static activations."""
    scheme = layer.scheme
    plain = (scheme.bits, scheme.mapping, scheme.weight_granularity) == (8, "symmetric", "channel")
    return layer.kind == "Linear" and plain and scheme.activations != "static"


def to_bitsandbytes(state: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Rename and rescale the tensors of int8 layers.

    Args:
        state: State of the model under our keys.
        names: Its int8 layers.

    Returns:
        A new state; what does not belong to the layers is the same.
    """
    state = dict(state)
    for name in names:
        state[f"{name}.SCB"] = state.pop(f"{name}.weight_scale").flatten() * _STEPS
        state[f"{name}.weight_format"] = _row_format()
    return state


def stream_to_bitsandbytes(
    tensors: Mapping[str, StreamedTensor], names: Iterable[str]
) -> dict[str, StreamedTensor]:
    """Do as :func:`to_bitsandbytes` with tensors that are not computed yet.

    Args:
        tensors: State of the model under our keys.
        names: Its int8 layers.
    """
    renamed = dict(tensors)
    for name in names:
        scale = renamed.pop(f"{name}.weight_scale")
        maxima = functools.partial(_maxima, scale)
        renamed[f"{name}.SCB"] = StreamedTensor(scale.dtype, scale.shape[:1], maxima)
        renamed[f"{name}.weight_format"] = StreamedTensor(torch.uint8, torch.Size(), _row_format)
    return renamed


def _maxima(scale: StreamedTensor) -> Tensor:
    return scale.read().flatten() * _STEPS


def _row_format() -> Tensor:
    return torch.zeros((), dtype=torch.uint8)


def from_bitsandbytes(state: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Undo :func:`to_bitsandbytes`.

    FP32 cannot always undo a multiplication by 127: a scale may come back one unit in the last place off.

    Args:
        state: What the file holds.
        names: The int8 layers in it.
    """
    state = dict(state)
    for name in names:
        maxima = state.pop(f"{name}.SCB", None)
        state.pop(f"{name}.weight_format", None)
        if maxima is not None:  # What is missing is reported with all other keys.
            state[f"{name}.weight_scale"] = maxima.reshape(-1, 1) / _STEPS
    return state


def quantization_config(layers: Mapping[str, LayerLayout], ignore: Iterable[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a ``config.json``.

    Args:
        layers: The int8 layers.
        ignore: Names of linear layers that are not quantized.
    """
    thresholds = {layer.scheme.outlier_threshold for layer in layers.values()} - {None}
    return {
        "quant_method": "bitsandbytes",
        "load_in_8bit": True,
        "load_in_4bit": False,
        # Theirs always quantizes activations; 6.0 is its default and the paper's (arXiv 2208.07339, section 3.2).
        "llm_int8_threshold": min((t for t in thresholds if t is not None), default=6.0),
        "llm_int8_skip_modules": list(ignore),
        "llm_int8_has_fp16_weight": False,
        "llm_int8_enable_fp32_cpu_offload": False,
    }
