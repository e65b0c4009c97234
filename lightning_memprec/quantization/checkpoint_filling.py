"""Fill a model with the state of a file, checked name by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memprec.quantization.checkpoint_layout import QuantizedFileError
from lightning_memprec.quantization.modules.base import SharedBuffers
from lightning_memprec.quantization.modules.linear import Int8Linear

__all__ = ["OUTLIERS", "arguments_for", "fill"]

OUTLIERS = ("outlier_indices", "outlier_weight")  # Optional state of `Int8Linear`.
_SHOWN = 5  # Names in a message.


def arguments_for(make: Callable[..., Any], hyperparameters: Any) -> dict[str, Any]:
    """Return those hyperparameters of a checkpoint that a class takes; none for another callable.

    Args:
        make: What builds the model.
        hyperparameters: ``hyper_parameters`` of a checkpoint, if it has any.
    """
    if not isinstance(make, type) or not isinstance(hyperparameters, dict):
        return {}
    parameters = inspect.signature(make).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return {key: value for key, value in hyperparameters.items() if takes_all or key in names}


def fill(module: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load a state whose dtypes, shapes and names must be right."""
    state = dict(state)
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, SharedBuffers):
            part.pack_state(state, f"{name}." if name else "")
    variables = module.state_dict(keep_vars=True)
    own = {name: value for name, value in variables.items() if isinstance(value, Tensor)}
    own |= _outlier_columns(module, state, source)
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unexpected:
        raise QuantizedFileError(
            f"{source!r} does not match a `{type(module).__name__}`: {len(missing)} tensors are missing"
            f" {missing[:_SHOWN]}, {len(unexpected)} are not of this model {unexpected[:_SHOWN]}. Give the model"
            " that was quantized."
        )
    for name, value in own.items():
        given = state[name]
        cast = given.dtype != value.dtype
        allowed = given.is_floating_point() and value.is_floating_point() and not _is_scale(name, own)
        if given.shape != value.shape or (cast and not allowed):
            raise QuantizedFileError(
                f"{source!r} holds {name!r} as {given.dtype} {list(given.shape)}, but this"
                f" `{type(module).__name__}` has {value.dtype} {list(value.shape)}. Give the model that was quantized."
            )
        if cast:
            # What stayed in floating point keeps the dtype of the file.
            value.data = value.data.to(given.dtype)
    with torch.no_grad():
        module.load_state_dict(state, strict=False)


def _outlier_columns(module: nn.Module, state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return the columns kept in floating point, checked; only the file knows how many there are."""
    found: dict[str, Tensor] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        columns, weight = (state.get(f"{name}.{key}") for key in OUTLIERS)
        if not isinstance(part, Int8Linear) or columns is None or weight is None:
            continue
        inside = columns.dtype == torch.int64 and bool(((columns >= 0) & (columns < part.in_features)).all())
        increasing = columns.dim() == 1 and bool((columns.diff() > 0).all())
        if not inside or not increasing or weight.shape != (part.out_features, len(columns)):
            raise QuantizedFileError(
                f"{source!r} keeps columns of {name!r} that a layer of {part.in_features} features does not have."
                " Export it again."
            )
        found |= {f"{name}.{OUTLIERS[0]}": columns, f"{name}.{OUTLIERS[1]}": weight}
    return found


def _is_scale(name: str, own: Mapping[str, Tensor]) -> bool:
    of = name.removesuffix("_scale")
    of = f"{of.removesuffix('input')}weight" if of.endswith("input") else of
    weight = own.get(of, own.get(f"{of}_packed"))
    return name.endswith("_scale") and weight is not None and weight.dtype in (torch.int8, torch.int32)
