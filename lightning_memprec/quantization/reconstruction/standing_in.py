"""Let float layers behave as their int8 replacements do, for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_memprec.quantization.calibration import stand_in
from lightning_memprec.quantization.modules.conv import Int8Conv
from lightning_memprec.quantization.modules.linear import Int8Linear
from lightning_memprec.quantization.targets import Target

__all__ = ["rounding_inputs", "standing_in"]


@contextmanager
def standing_in(targets: Sequence[Target], layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let int8 layers answer in the place of float ones.

    Args:
        targets: The float layers.
        layers: Their replacements, by name.
    """
    with ExitStack() as hooks:
        for target in targets:
            hooks.callback(stand_in(target.module, layers[target.name]).remove)
        yield


@contextmanager
def rounding_inputs(layers: Sequence[tuple[Target, nn.Module]]) -> Iterator[None]:
    """Let float layers round their inputs as int8 ones do; gradients pass straight through.

    Args:
        layers: Float layers, each with an int8 layer that rounds as it will.
    """
    with ExitStack() as hooks:
        for target, layer in layers:
            if target.scheme.activations == "float":
                continue

            # Bound here, because hooks are only told of the module.
            def hook(module: nn.Module, args: Any, kwargs: Any, layer: nn.Module = layer) -> Any:
                if args:
                    return (_rounded(layer, args[0]), *args[1:]), kwargs
                name, values = next(iter(kwargs.items()))
                return args, {**kwargs, name: _rounded(layer, values)}

            hooks.callback(target.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _rounded(layer: nn.Module, values: Tensor) -> Tensor:
    if isinstance(layer, Int8Conv):
        return layer._quantized(values)
    assert isinstance(layer, Int8Linear)
    rows = values.flatten(0, -2) if values.dim() > 1 else values[None]
    return layer._rounded(rows).reshape(values.shape).to(values.dtype)
