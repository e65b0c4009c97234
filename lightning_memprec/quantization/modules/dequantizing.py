"""Int8 weights for modules that read their weights themselves: attention and recurrent layers.

``nn.MultiheadAttention`` passes ``in_proj_weight`` and ``out_proj.weight`` to a function, and recurrent layers keep
a flat list of theirs, so their parts cannot be swapped one by one. The whole module is kept as a shell without
weights, and each call runs a shallow copy of that shell which holds the dequantized weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_memprec.quantization.affine import Quantized, dequantize_matrix
from lightning_memprec.quantization.modules.base import Scheme, SharedBuffers
from lightning_memprec.quantization.packing import is_packed, unpack

__all__ = ["DequantizingModule"]


class DequantizingModule(SharedBuffers):
    """A module whose matrices are int8 and are dequantized for each call; activations stay in floating point.

    State: for every matrix ``name`` of the float module, ``name`` (int8) or, for up to 4 bits, ``name_packed`` (int32),
    ``name_scale`` (FP32) and, if affine, ``name_zero_point``; other parameters and buffers are as they were.

    Args:
        module: The float module. Its matrices are taken out of it.
        weights: A quantized matrix for each of the module's own matrices, by name.
        children: Replacements of the module's children, by name.
        scheme: How the matrices were quantized.
    """

    _shell: nn.Module

    def __init__(
        self,
        module: nn.Module,
        weights: dict[str, Quantized],
        children: dict[str, nn.Module],
        scheme: Scheme,
    ) -> None:
        super().__init__()
        self.scheme, self._names = scheme, tuple(weights)
        self._shapes = {name: weight.values.shape for name, weight in weights.items()}
        floats = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
        self.float_dtype = floats[0] if floats else torch.float32
        self.training = module.training
        for name, weight in weights.items():
            self._register(name, weight)
        for name, parameter in module._parameters.items():
            if name not in weights:
                self.register_parameter(name, parameter)
        for name, buffer in module._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            self.register_module(name, children.get(name, child))
        # Kept out of `_modules`: it has no state of its own.
        self.__dict__["_shell"] = _empty(module)

    def _register(self, name: str, weight: Quantized) -> None:
        self._hold(name, weight.values, weight.values)
        self.register_buffer(f"{name}_scale", weight.scale)
        self.register_buffer(f"{name}_zero_point", weight.zero_point)

    def _integers(self, name: str) -> Tensor:
        stored = self.stored(name)
        return (
            unpack(stored, self.scheme.bits, self._shapes[name][1]) if is_packed(self.scheme.bits) else stored
        )

    def weight_shape(self, name: str = "weight") -> torch.Size:
        """Return the shape of one matrix."""
        return self._shapes[name]

    def dequantize_weight(self, name: str) -> Tensor:
        """Return one matrix in FP32."""
        integers = self._integers(name)
        scale: Tensor = self._buffers[f"{name}_scale"]  # type: ignore[assignment]
        zero_point = self._buffers[f"{name}_zero_point"]
        return dequantize_matrix(integers, scale, zero_point, self.scheme.group_size)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the float module with dequantized weights."""
        return self._filled()(*args, **kwargs)

    def _filled(self) -> nn.Module:
        shell = self._shell
        filled = object.__new__(type(shell))
        filled.__dict__.update(shell.__dict__)
        weights = {name: self.dequantize_weight(name).to(self.float_dtype) for name in self._names}
        parameters = {name: weights.get(name, self._parameters.get(name)) for name in shell._parameters}
        children = {
            name: child._filled() if isinstance(child, DequantizingModule) else child
            for name, child in self._modules.items()
        }
        buffers = {name: self._buffers[name] for name in shell._buffers}
        filled.__dict__.update(
            _parameters=parameters, _buffers=buffers, _modules=children, training=self.training
        )
        if isinstance(filled, nn.RNNBase):
            filled._init_flat_weights()
        return filled

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self.__dict__.get("_names", ()):
                return self._integers(name)  # Packed, so that there is no buffer of this name.
            # `num_heads`, `batch_first`, `hidden_size`: what surrounding modules ask of the float module.
            shell = self.__dict__.get("_shell")
            if shell is None or name.startswith("__"):
                raise
            return getattr(shell, name)

    def extra_repr(self) -> str:
        """Describe the module and the scheme."""
        return f"{type(self._shell).__name__}, {', '.join(self._names)}: {self.scheme}"


def _empty(module: nn.Module) -> nn.Module:
    """Return a copy of a module's settings that holds on to none of its tensors and hooks."""
    shell: nn.Module = object.__new__(type(module))
    shell.__dict__.update(module.__dict__)
    # Hooks move to the replacement; run by the shell as well, they would act twice.
    shell.__dict__.update({name: value for name, value in vars(nn.Module()).items() if "_hook" in name})
    shell.__dict__.update(
        _parameters=dict.fromkeys(module._parameters),
        _buffers=dict.fromkeys(module._buffers),
        _modules=dict.fromkeys(module._modules),
    )
    if isinstance(shell, nn.RNNBase):
        none = [None] * len(shell._flat_weights_names)
        shell.__dict__.update(_flat_weights=none, _flat_weight_refs=list(none))
    return shell
