"""Give the layers of one block after another the inputs of a quantized prefix without running that prefix again.

A pass over the data for each layer costs as many runs of the model as it has layers. A block that is finished answers
from memory instead, and the layers of a block learn from its recorded calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_memprec.quantization.measure import run_batches
from lightning_memprec.quantization.padding import MaskedForward
from lightning_memprec.quantization.reconstruction.blocks import Block
from lightning_memprec.quantization.reconstruction.recording import (
    Stored,
    TensorStore,
    record,
    replay,
    replays,
    temporary_store,
)

__all__ = ["Batches", "Prefix", "Source", "calls_of"]


class Batches(list[Any]):
    """Batches, and which of them is running.

    Attributes:
        running: Position of the batch that was handed out last.
    """

    running = 0

    def __iter__(self) -> Iterator[Any]:
        for self.running, batch in enumerate(super().__iter__()):
            yield batch


class Source(NamedTuple):
    """What gives layers their inputs: the first arguments of :func:`~lightning_memprec.quantization.calibration.feed`.

    Attributes:
        module: The model, or a block of it.
        batches: The calibration batches, or the block's calls.
        forward: Runs one of them.
    """

    module: nn.Module
    batches: Batches
    forward: Callable[[nn.Module, Any], Any]


@contextmanager
def calls_of(blocks: list[Block], data: Batches) -> Iterator[dict[str, list[int]]]:
    """Note in which batches each block is called, by its name, while the context is open.

    A layer of it that is called from outside counts as a call of the block, too: calls of the block alone do not tell
    all that such a layer sees.
    """
    calls: dict[str, list[int]] = {block.name: [] for block in blocks}
    inside: list[str] = []
    with ExitStack() as hooks:
        for block in blocks:
            # Bound here, because hooks are only told of the module.
            def enter(module: nn.Module, args: Any, name: str = block.name) -> None:
                calls[name].append(data.running)
                inside.append(name)

            def leave(module: nn.Module, args: Any, output: Any, name: str = block.name) -> None:
                inside.remove(name)

            def check(module: nn.Module, args: Any, name: str = block.name) -> None:
                if name not in inside:
                    calls[name].append(data.running)

            hooks.callback(block.module.register_forward_pre_hook(enter).remove)
            hooks.callback(block.module.register_forward_hook(leave).remove)
            for target in block.targets:
                hooks.callback(target.module.register_forward_pre_hook(check).remove)
        yield calls


class _Enough(BaseException):
    """Ends a batch; not an ``Exception``, which the user's own code might catch."""


class Prefix(ExitStack):
    """A model in evaluation mode whose blocks are quantized from front to back; it is as before when the context ends.

    Args:
        whole: The model and its data; hooks on the model let quantized layers stand in for float ones.
        memory_bytes: Answers that are kept in memory; the rest goes to files.
    """

    def __init__(self, whole: Source, memory_bytes: int) -> None:
        super().__init__()
        self._whole = whole
        self._store = self.enter_context(temporary_store(memory_bytes))
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let finished blocks run, rather than answer from memory, while the context is open."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def calls(self, block: Block, store: TensorStore) -> Source | None:
        """Record the calls of a block in the model that is quantized up to it.

        Args:
            block: A block that every batch calls once.
            store: Where tensors go.

        Returns:
            The block and its calls, or ``None`` if it cannot be run by itself.
        """
        model, batches, forward = self._whole
        masks: list[Tensor | None] = []
        differentiated: list[bool] = []

        def enough(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():  # The model differentiates itself, which stored answers would break.
                differentiated.append(True)
            masks.append(forward.current if isinstance(forward, MaskedForward) else None)
            raise _Enough

        def until_block(model: nn.Module, batch: Any) -> None:
            # Registered here, after the hooks that record.
            with block.module.register_forward_hook(enough), suppress(_Enough):
                forward(model, batch)

        calls = Batches(record(model, {block.name: block.module}, batches, until_block, store)[block.name])
        if differentiated or len(calls) != len(batches) or not replays(block.module, calls):
            return None
        return Source(block.module, calls, MaskedForward(replay, lambda call: masks[calls.running]))

    def finish(self, source: Source) -> None:
        """Let a block, all of whose layers are quantized, answer from memory from now on."""
        block, calls, _ = source
        answers: list[Any] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            answers.append(tree_map_only(Tensor, self._store.put, output))

        with block.register_forward_hook(keep):
            run_batches(block, calls, replay)

        run = block.forward

        def answer(*args: Any, **kwargs: Any) -> Any:
            if self._paused:
                return run(*args, **kwargs)
            return tree_map_only(Stored, Stored.load, answers[self._whole.batches.running])

        before = block.__dict__.get("forward")
        block.forward = answer
        self.callback(_restore, block, before)


def _restore(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del module.forward
    else:
        module.forward = forward
