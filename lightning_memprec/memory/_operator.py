"""What the recorder has to know of operators and of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from lightning_memprec.memory import _dynamic

__all__ = ["Operator", "flat_tensors", "map_arguments"]


def flat_tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                if isinstance(item, Tensor):
                    yield item


def map_arguments(function: Callable[[Tensor], Any], args: Iterable[Any]) -> list[Any]:
    mapped: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            mapped.append(function(arg))
        elif isinstance(arg, (list, tuple)):
            mapped.append(type(arg)(map_arguments(function, arg)))
        else:
            mapped.append(arg)
    return mapped


class Operator:
    """What the recorder has to know of one operator overload; read from its schema once."""

    __slots__ = (
        "_count",
        "allocates",
        "handler",
        "only_allocates",
        "resizes",
        "uninitialised",
        "writes_first",
        "written",
    )

    def __init__(self, func: OpOverload) -> None:
        schema = func._schema
        returns = schema.returns
        self.allocates = any(r.alias_info is None for r in returns)
        self.written = [
            (i, a.name)
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        # An `out=` tensor or `resize_` may give an existing storage another size.
        self.resizes = bool(self.written) and (
            func._overloadname.endswith("out") or func._opname in ("resize_", "set_", "resize_as_")
        )
        self.only_allocates = (
            not self.written and all(r.alias_info is None for r in returns) and bool(returns)
        )
        self.writes_first = (
            [i for i, _ in self.written] == [0]
            and not self.resizes
            # `squeeze_` and the like change the tensor's own shape.
            and torch.Tag.inplace_view not in func.tags
            and not self.allocates
            and len(returns) <= 1
            and isinstance(schema.arguments[0].type, (torch.TensorType, torch.ListType))
        )
        self.uninitialised = "empty" in func._opname
        self.handler = _dynamic.HANDLERS.get(func._schema.name)
        self._count = flop_registry.get(func.overloadpacket)

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """Yield the tensors that a call writes to."""
        for i, name in self.written:
            yield from flat_tensors([args[i] if i < len(args) else kwargs.get(name)])

    def flops(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Return the floating-point operations of a call; 0 for all but matrix products and the like."""
        return 0 if self._count is None else int(self._count(*args, **kwargs, out_val=out))
