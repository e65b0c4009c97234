"""The configuration by which other tools read our files: ``compressed-tensors``, format ``int-quantized``.

Keys and shapes of the tensors are those of our layers already: ``weight`` int8, ``weight_scale``, and
``weight_zero_point`` if affine (https://github.com/vllm-project/compressed-tensors).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_memprec.quantization.checkpoint_layout import LayerLayout
from lightning_memprec.quantization.modules.base import Scheme

__all__ = ["quantization_config"]

_FORMAT = "int-quantized"


def quantization_config(layers: Mapping[str, LayerLayout], ignore: Iterable[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a ``config.json``.

    Only what the format can express is listed: linear layers and embeddings. Convolutions, attention and
    recurrent layers are read by this package alone.

    Args:
        layers: The int8 layers.
        ignore: Names of linear layers that are not quantized.
    """
    groups: dict[Scheme, list[str]] = {}
    for name, layer in layers.items():
        if layer.kind != "other" and layer.scheme.mapping != "affine_textbook":
            groups.setdefault(layer.scheme, []).append(name)
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMAT,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "config_groups": {
            f"group_{index}": {
                "targets": names,
                # Without it in the group, readers of weight-only files take the weights for packed int32.
                "format": _FORMAT,
                "weights": _weights(scheme),
                "input_activations": _activations(scheme),
                "output_activations": None,
            }
            for index, (scheme, names) in enumerate(groups.items())
        },
    }


def _weights(scheme: Scheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.mapping == "symmetric",
        "strategy": scheme.weight_granularity,
        "group_size": scheme.group_size,
        "dynamic": False,
    }


def _activations(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.activations == "float":
        return None
    return {
        "num_bits": 8,
        "type": "int",
        "symmetric": scheme.mapping == "symmetric",
        "strategy": scheme.activations,
        "group_size": None,
        "dynamic": True,
    }
