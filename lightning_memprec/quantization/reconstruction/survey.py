"""Tell which parts of a model data reaches, in which order, and how much a recording of them would take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memprec.quantization.measure import run_batches
from lightning_memprec.quantization.reconstruction.recording import first_tensor

__all__ = ["survey"]


def survey(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
) -> dict[str, int]:
    """Tell how many bytes a recording of modules takes, in the order in which the data first reaches them.

    Args:
        model: The model.
        modules: Some of its modules, by name.
        batches: What ``forward`` takes.
        forward: Runs one batch.

    Returns:
        Bytes of arguments and outputs by name; what no data reaches is not in it, nor what empty batches alone reach.
    """
    sizes: dict[str, int] = {}
    with ExitStack() as hooks:
        for name, module in modules.items():
            # Bound here, because hooks are only told of the module.
            def begin(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                sizes[name] = sizes.get(name, 0) + _bytes((args, kwargs))

            def end(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                sizes[name] += _bytes(first_tensor(output))

            hooks.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(end).remove)
        run_batches(model, batches, forward)
    return {name: size for name, size in sizes.items() if size}


def _bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
