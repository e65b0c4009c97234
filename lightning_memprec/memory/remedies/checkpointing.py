"""Activation checkpointing: by the model's own switch, of its blocks, and of as few blocks as are enough."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memprec._errors import MemPrecError
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.remedies.change import Change, Need, need_of, prepared
from lightning_memprec.memory.remedies.snippet import Code

__all__ = ["checkpointing", "fewer_blocks"]

_TOPIC = frozenset({"checkpointing"})


@dataclass(frozen=True)
class _Blocks:
    """Children of one type that follow each other, such as the layers of a transformer."""

    name: str
    count: int


def checkpointing(model: nn.Module | None) -> Iterator[Change]:
    """Yield checkpointing of everything that offers it, else of the model's blocks."""
    switches = [] if model is None else [call for call, _ in _switches(model)]
    if switches or model is None:
        yield Change(
            "activation_checkpointing",
            "activation checkpointing",
            switches[0] if switches else "the model's `gradient_checkpointing_enable()`",
            "",
            lambda p: prepared(p, _switch_on),
            exact=True,
            topics=_TOPIC,
            code=Code(
                statements=tuple(f"model.{call.partition('.')[2]}" for call in switches),
                remarks=() if switches else ("The model's `gradient_checkpointing_enable()`.",),
            ),
        )
    elif (blocks := _find_blocks(model)) is not None:
        yield _of_blocks(blocks, blocks.count)


def fewer_blocks(
    plan: TrainingPlan, model: nn.Module | None, before: Need, budget_bytes: int
) -> Change | None:
    """Find how few blocks are enough, given that all are: between two traces, need is nearly a straight line."""
    blocks = None if model is None else _find_blocks(model)
    if blocks is None or blocks.count < 3:
        return None
    too_few, enough = 0, blocks.count
    need_bytes = {0: before.device_bytes}

    def try_out(count: int) -> bool:
        need = need_of(_of_blocks(blocks, count).apply(plan))
        need_bytes[count] = need.device_bytes if need is not None else before.device_bytes
        return need_bytes[count] <= budget_bytes

    if not try_out(blocks.count):
        return None
    while enough - too_few > 1:
        slope = (need_bytes[enough] - need_bytes[too_few]) / (enough - too_few)
        guess = too_few - int((need_bytes[too_few] - budget_bytes) / slope) + 1 if slope < 0 else 0
        count = min(max(guess, too_few + 1), enough - 1)
        too_few, enough = (too_few, count) if try_out(count) else (count, enough)
    return None if enough == blocks.count else _of_blocks(blocks, enough)


def _of_blocks(blocks: _Blocks, count: int) -> Change:
    some = count < blocks.count
    which = f"self.{blocks.name}[:{count}]" if some else f"self.{blocks.name}"
    return Change(
        "partial_checkpointing" if some else "activation_checkpointing",
        f"activation checkpointing of {count} of {blocks.count} blocks, from the first on"
        if some
        else f"activation checkpointing of the {count} blocks",
        f"for b in {which}: b.forward = functools.partial(torch.utils.checkpoint.checkpoint, b.forward, "
        "use_reentrant=False)",
        "",
        lambda p: prepared(p, functools.partial(_wrap, blocks=blocks, count=count)),
        exact=True,
        topics=_TOPIC,
        code=Code(
            statements=(
                f"for block in model.{which.removeprefix('self.')}:",
                "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)",
            ),
            imports=("import functools", "from torch.utils.checkpoint import checkpoint"),
        ),
    )


def _find_blocks(module: nn.Module) -> _Blocks | None:
    """Return the list of same-typed children that holds most parameters."""
    best: tuple[int, _Blocks] | None = None
    for name, container in module.named_modules():
        if not name or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(container)
        # A block has layers of its own: checkpointing a single layer keeps what it saves.
        if len(children) < 2 or len({type(child) for child in children}) > 1:
            continue
        if not any(True for _ in children[0].children()):
            continue
        size = sum(parameter.numel() for parameter in container.parameters())
        if best is None or size > best[0]:
            best = size, _Blocks(name, len(children))
    return None if best is None else best[1]


def _wrap(module: nn.Module, blocks: _Blocks, count: int) -> None:
    container: Any = module.get_submodule(blocks.name)
    for block in list(container)[:count]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _switches(module: nn.Module) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the call, as text and as a callable, that switches on each submodule's own checkpointing."""
    for name, child in module.named_modules():
        # transformers' models, then timm's.
        for switch in ("gradient_checkpointing_enable", "set_grad_checkpointing"):
            enable = getattr(child, switch, None)
            if callable(enable) and getattr(child, "supports_gradient_checkpointing", True):
                yield f"self.{name}.{switch}()" if name else f"model.{switch}()", enable
                break


def _switch_on(module: nn.Module) -> None:
    switches = list(_switches(module))
    for _, enable in switches:
        enable()
    if not switches:
        raise MemPrecError("The module offers no activation checkpointing.")
