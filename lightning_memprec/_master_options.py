"""What a ``MasterWeightPrecision`` means for an estimate."""

from __future__ import annotations

import functools
from typing import Any

from lightning_memprec.master_weights.casting import cast_module, patterns_of
from lightning_memprec.memory.plan import MasterOptions

__all__ = ["master_options"]


def master_options(
    keep_fp32: list[str] | str | None = None,
    low_memory: bool = False,
    step_in_backward: bool = False,
    **_: Any,
) -> MasterOptions:
    """Describe a ``MasterWeightPrecision`` by its arguments; those that do not matter for memory are ignored."""
    return MasterOptions(
        low_memory=low_memory,
        step_in_backward=step_in_backward,
        cast=functools.partial(cast_module, patterns=patterns_of(keep_fp32)),
    )
