"""Tensors that belong to a module's weights but are neither parameters nor buffers.

bitsandbytes keeps the scales of quantized weights in objects beside them: ``QuantState`` on a ``Params4bit``,
``CB`` and ``SCB`` on an ``Int8Params`` or in the ``MatmulLtState`` of its layer. They move with the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["carried_tensors"]


def carried_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what quantized weights carry, with the weights' names.

    Args:
        module: Module with layers of bitsandbytes, or without.
    """
    for prefix, child in module.named_modules():
        if type(child).__module__.startswith("bitsandbytes."):
            for name, parameter in child.named_parameters(prefix, recurse=False):
                for value in vars(parameter).values():
                    yield from ((name, tensor) for tensor in _tensors(value))
            for value in vars(child).values():
                if _is_theirs(value):
                    yield from ((f"{prefix}.weight", tensor) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif _is_theirs(value):
        for part in vars(value).values():
            yield from _tensors(part)


def _is_theirs(value: Any) -> bool:
    # A weight refers to its module, too.
    is_object = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type))
    return is_object and type(value).__module__.startswith("bitsandbytes.")
