"""Casting a module to half, but for what half would ruin or the user wants in FP32."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Float32Island", "cast_module", "kept_modules", "patterns_of", "ruined_buffers", "unmatched"]

_CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype in _CASTABLE else value


class Float32Island:
    """Hooks that let an FP32 module live among half ones.

    Floating-point inputs are cast to FP32, floating-point outputs to the dtype that the inputs had.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None

    def attach(self, module: nn.Module) -> None:
        """Put the hooks on a module, unless it has them."""
        if not any(
            getattr(hook, "__self__", None).__class__ is Float32Island
            for hook in module._forward_hooks.values()
        ):
            module.register_forward_pre_hook(self.enter, with_kwargs=True)
            module.register_forward_hook(self.leave)

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast the inputs to FP32."""
        leaves = tree_flatten((args, kwargs))[0]
        floating = [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in _CASTABLE]
        self.dtype = floating[0] if floating else None
        return cast("tuple[Any, Any]", tree_map(lambda leaf: _cast(leaf, torch.float32), (args, kwargs)))

    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        """Cast the outputs back."""
        dtype = self.dtype
        return output if dtype is None else tree_map(lambda leaf: _cast(leaf, dtype), output)


def has_running_statistics(module: nn.Module) -> bool:
    """Tell whether a module averages statistics over batches.

    Such an average stops moving in half: a running mean near 100 settles at 96 in bfloat16, because the
    update is smaller than the spacing of numbers there. The kernels take half inputs with FP32 parameters.
    """
    return isinstance(module, _NormBase) and module.track_running_stats


def patterns_of(keep_fp32: Sequence[str] | str | None) -> list[str]:
    """Return the names of what stays in FP32 as a list.

    Args:
        keep_fp32: Names, a single one, or ``None``.

    Raises:
        ValueError: If one of them is not a string.

    Example:
        >>> patterns_of("LayerNorm")
        ['LayerNorm']
    """
    patterns = [keep_fp32] if isinstance(keep_fp32, str) else list(keep_fp32 or ())
    for pattern in patterns:
        if not isinstance(pattern, str):
            name = pattern.__name__ if isinstance(pattern, type) else "head"
            raise ValueError(f"`keep_fp32` takes names, got {pattern!r}. Write it as text, such as '{name}'.")
    return patterns


def _matches(name: str, module: nn.Module, patterns: Sequence[str]) -> bool:
    classes = {kind.__name__ for kind in type(module).__mro__}
    return any(pattern in classes or fnmatchcase(name, pattern) for pattern in patterns)


def kept_modules(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Find the submodules that stay in FP32 as a whole because a pattern names them.

    Args:
        module: The module to cast.
        patterns: Names as in ``named_modules()`` with ``*`` and ``?``, or names of classes.

    Returns:
        The outermost ones, by name.
    """
    found: dict[str, nn.Module] = {}
    for name, submodule in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and _matches(name, submodule, patterns):
            found[name] = submodule
    return found


def unmatched(module: nn.Module, patterns: Sequence[str]) -> dict[str, str | None]:
    """Find the patterns that name no submodule, class, parameter or buffer of a module.

    Returns:
        Patterns with the name that was perhaps meant.
    """
    modules = [(name, submodule) for name, submodule in module.named_modules() if name]
    tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    names = [
        *(type(submodule).__name__ for _, submodule in modules),
        *(name for name, _ in modules),
        *tensors,
    ]
    known = {name.lower(): name for name in reversed(names)}
    found = {}
    for pattern in patterns:
        matches = any(_matches(name, submodule, [pattern]) for name, submodule in modules)
        if not matches and not any(fnmatchcase(name, pattern) for name in tensors):
            near = get_close_matches(pattern.lower(), known, n=1)
            found[pattern] = known[near[0]] if near else None
    return found


def _owned(module: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules whose own tensors are to be cast, with their names."""
    kept = set()
    for submodule in kept_modules(module, patterns).values():
        kept |= set(submodule.modules())
    for name, submodule in module.named_modules():
        if submodule not in kept and not has_running_statistics(submodule):
            yield submodule, f"{name}." if name else ""


def _is_kept_tensor(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def cast_module(
    module: nn.Module,
    dtype: torch.dtype,
    patterns: Sequence[str] = (),
    before: Callable[[nn.Parameter], None] = lambda parameter: None,
) -> None:
    """Cast the floating-point parameters and buffers of a module in place.

    Modules with running statistics stay in FP32, as do buffers named ``inv_freq``, the frequencies of rotary
    embeddings, whose products with positions need more digits than half has.

    Args:
        module: The module to cast.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        patterns: Names of modules, parameters or buffers with ``*`` and ``?``, or names of module classes, that
            stay in FP32. Modules get hooks that cast their inputs and outputs.
        before: Called with each parameter before it is cast.

    Raises:
        ValueError: If a parameter has no shape yet, as in ``nn.LazyLinear`` before its first batch.
    """
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"The parameters {lazy} have no shape yet, so they cannot have masters. Pass one batch through the "
            "module before training, for example at the end of its `__init__`."
        )
    for submodule in kept_modules(module, patterns).values():
        Float32Island().attach(submodule)
    for owner, prefix in _owned(module, patterns):
        for name, parameter in owner._parameters.items():
            if parameter is None or parameter.dtype not in _CASTABLE or parameter.dtype == dtype:
                continue
            if not _is_kept_tensor(prefix + name, patterns):
                before(parameter)
                gradient, parameter.grad = parameter.grad, None
                parameter.data = parameter.data.to(dtype)
                parameter.grad = _cast(gradient, dtype)
        for name in _buffers_to_cast(owner, prefix, patterns):
            owner._buffers[name] = _cast(owner._buffers[name], dtype)


def _buffers_to_cast(owner: nn.Module, prefix: str, patterns: Sequence[str]) -> list[str]:
    return [
        name
        for name, buffer in owner._buffers.items()
        if buffer is not None and name != "inv_freq" and not _is_kept_tensor(prefix + name, patterns)
    ]


def ruined_buffers(module: nn.Module, dtype: torch.dtype, patterns: Sequence[str] = ()) -> list[str]:
    """List buffers of whole numbers, some of which would become the same number in ``dtype``.

    Position indices are such buffers: ``torch.arange(1000.0)`` keeps 507 distinct values in bfloat16.

    Args:
        module: A module that has not been cast yet.
        dtype: The dtype it will be cast to.
        patterns: As in :func:`cast_module`.

    Returns:
        Names of the buffers.
    """
    found = []
    for owner, prefix in _owned(module, patterns):
        for name in _buffers_to_cast(owner, prefix, patterns):
            buffer = cast("Tensor", owner._buffers[name])
            if buffer.dtype in (torch.float32, torch.float64) and torch.equal(buffer, buffer.round()):
                distinct = torch.unique(buffer)
                if torch.unique(distinct.to(dtype)).numel() < distinct.numel():
                    found.append(prefix + name)
    return found
