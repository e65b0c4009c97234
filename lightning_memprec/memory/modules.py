"""Tell the recorder which module is running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_memprec.memory.trace import Recorder

__all__ = ["track_modules"]


@contextmanager
def track_modules(root: nn.Module, recorder: Recorder) -> Iterator[list[str]]:
    """Attribute what is born inside a module's forward pass to that module.

    Args:
        root: Module whose submodules are tracked, tied ones under their first name.
        recorder: Recorder to tell.

    Yields:
        Names of the modules, the index of each being its number in the record.
    """
    names = [name for name, _ in root.named_modules()]
    numbers = {id(child): number for number, (_, child) in enumerate(root.named_modules())}
    stack: list[int] = []

    def enter(module: nn.Module, args: Any) -> None:
        number = numbers.get(id(module))
        if number is not None:
            stack.append(recorder.module)
            recorder.enter_module(number)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in numbers and stack:
            recorder.enter_module(stack.pop())

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()
