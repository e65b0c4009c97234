"""FP32 masters in the place of the half parameters, for code that must read or write unrounded weights.

An average of weights taken from half values is rounded, and one that passes through half parameters, as
averaged weights do around validation, stays rounded.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_memprec.master_weights.pair import Pair, merge

if TYPE_CHECKING:
    from collections.abc import Generator

    from lightning_memprec.master_weights.store import MasterStore

__all__ = ["masters_in_place"]


@contextmanager
def masters_in_place(module: nn.Module, store: MasterStore) -> Generator[None, None, None]:
    """Let ``module.parameters()`` be FP32 masters for a while.

    What others wrote over half parameters is merged before; what was written into the masters, and whether they
    require gradients, is carried over to the parameters afterwards. A half parameter that no optimizer steps is
    replaced as well, for the time being; if it was added to an optimizer meanwhile, it keeps its master.

    Args:
        module: The module that ``store`` is attached to. It must not compute meanwhile.
        store: Its masters.
    """
    store.mirror_requires_grad(to_masters=True)
    pairs = {p: _pair(store, p) for p in module.parameters() if p.dtype in (torch.float16, torch.bfloat16)}
    places = [
        (owner._parameters, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter in pairs
    ]
    # The dict itself is written: unlike a change of `.data`, that leaves DDP's hooks on the parameters alone.
    for parameters, name, parameter in places:
        parameters[name] = pairs[parameter].master  # type: ignore[index]
    try:
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter
        for pair in pairs.values():
            store.settle(pair)


def _pair(store: MasterStore, parameter: nn.Parameter) -> Pair:
    pair = store.pairs.get(parameter)
    if pair is not None:
        merge(pair)
        return pair
    value = store.value(parameter)
    return Pair(parameter, parameter.detach().float() if value is None else value.clone())
