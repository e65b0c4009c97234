"""A process group of many ranks in one process, for a trace: collectives have shapes but move nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memprec.memory.events import Ledger

__all__ = ["fake_world", "replace"]

# The user's own groups are numbered from 0, in a registry that all share.
_FIRST_GROUP = 1_000_000_000


@contextmanager
def fake_world(size: int, device_type: str, redirect: TorchFunctionMode, ledger: Ledger) -> Iterator[None]:
    """Let distributed code inside the block find itself on rank zero of a process group.

    The process group that the user may have is put aside and comes back.

    Args:
        size: Ranks of all nodes.
        device_type: Device that the trace stands for.
        redirect: Mode that sends the tensors of that device to ``meta``; autograd leaves it while it runs backward,
            where sharding allocates: there it is entered again.
        ledger: Told of storages that are given another size in place, as sharding does to release and gather weights.

    Example:
        >>> import torch.distributed as dist
        >>> with fake_world(8, "cpu", TorchFunctionMode(), Ledger()):
        ...     dist.get_world_size()
        8
    """
    with ExitStack() as stack:
        stack.enter_context(_process_group(size))
        for owner, name, replacement in _replacements(device_type, redirect, ledger):
            replace(stack, owner, name, replacement)
        yield


def replace(stack: ExitStack, owner: Any, name: str, replacement: Any) -> None:
    """Set an attribute until a stack is left.

    Args:
        stack: Restores it.
        owner: Module or class.
        name: The attribute.
        replacement: Its value meanwhile.
    """
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, replacement)


@contextmanager
def _process_group(size: int) -> Iterator[None]:
    # Importing this module also registers the backend "fake".
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    user_world = c10d._world
    saved = [(c10d, name, getattr(c10d, name)) for name in ("_world", "_backend", "_default_pg_init_method")]
    saved.append((sys, "excepthook", sys.excepthook))
    c10d._world = _own_world(c10d._World)
    try:
        c10d.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        yield
    finally:
        for group in list(c10d._world.pg_names.values()):
            torch._C._distributed_c10d._unregister_process_group(group)
        for owner, name, value in saved:
            setattr(owner, name, value)
        # Also tells C++ the rank again.
        c10d._update_default_pg(user_world.default_pg)


def _own_world(world: type) -> Any:
    """Return a world whose groups are its own; those of torch's class share one set of tables."""
    tables = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    own = type("_TraceWorld", (world,), {**{name: {} for name in tables}, "group_count": _FIRST_GROUP})
    return own()


class _Stream:
    """A stream or an event: what runs on it is traced in the order of the program."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _pass_on(self, *args: Any, **kwargs: Any) -> _Stream:
        return self

    wait_stream = wait_event = wait = synchronize = _do_nothing
    record_event = record = _pass_on

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


def _replacements(
    device_type: str, redirect: TorchFunctionMode, ledger: Ledger
) -> Iterator[tuple[Any, str, Any]]:
    """Yield ``(owner, attribute, replacement)`` of what distributed code asks of a device."""
    from torch.distributed import _functional_collectives

    # On ``meta`` torch returns a copy here, elsewhere a wrapper around what came.
    yield _functional_collectives, "_maybe_wrap_tensor", lambda tensor: tensor
    yield torch.autograd, "_engine_run_backward", _under(redirect, torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
    yield torch.UntypedStorage, "resize_", _counted(torch.UntypedStorage.resize_, ledger)
    yield Tensor, "record_stream", lambda tensor, stream: None
    if device_type != "cpu":
        for name in ("Stream", "Event"):
            yield torch.cuda, name, _Stream
        for name in ("current_stream", "default_stream"):
            yield torch.cuda, name, lambda *args, **kwargs: _Stream()
        yield torch.accelerator, "current_stream", lambda *args, **kwargs: _Stream()
        yield torch.accelerator, "device_index", lambda *args, **kwargs: nullcontext()
        yield torch.cuda, "stream", lambda stream: nullcontext()
        yield torch.cuda, "set_stream", lambda stream: None
        for name in ("is_available", "is_initialized"):
            yield torch.cuda, name, lambda: True
        yield torch.cuda, "device_count", lambda: 1
        # The optimizers of torch 2.11 ask this through the driver.
        yield torch.cuda, "is_current_stream_capturing", lambda: False


def _under(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return call


def _counted(resize: Callable[..., Any], ledger: Ledger) -> Callable[..., Any]:
    def call(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        if storage.device.type == "meta":
            ledger.register_storage(storage)
        return result

    return call
