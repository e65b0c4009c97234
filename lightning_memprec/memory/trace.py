"""Record the birth and death of every storage while a training step runs on meta tensors.

A ``TorchDispatchMode`` sees each operator below autograd; an output whose storage is new is a birth, a weak
reference on that storage tells its death. Nothing is computed, except what follows from the batch and from
constants alone (:mod:`~lightning_memprec.memory.known`).
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memprec._errors import DataDependentError, TraceError
from lightning_memprec.memory import _dynamic
from lightning_memprec.memory._location import user_location
from lightning_memprec.memory._replay import MetaKernelCache
from lightning_memprec.memory.known import KnownValues

__all__ = ["MemoryEvents", "Recorder", "StorageRecord"]

_META = torch.device("meta")
_MAX_KNOWN_NUMEL = 2**21
_NO_EVENT = -1


class StorageRecord:
    """One storage: its size, where it was made, when it lived.

    Attributes:
        size_bytes: Bytes asked for, not rounded.
        phase: Index into :attr:`MemoryEvents.phases` at birth.
        module: Index into :attr:`MemoryEvents.modules` at birth.
        grad_enabled: Whether autograd recorded at birth: tells recomputed activations from temporaries.
        birth: Event at which it was born.
        death: Event at which it died, or -1 while it lives.
        category: Set by :meth:`Recorder.mark`; ``None`` is resolved by age.
        owner: Name of the parameter it belongs to, for gradients and optimizer states.
    """

    __slots__ = ("birth", "category", "death", "grad_enabled", "module", "owner", "phase", "size_bytes")

    def __init__(self, size_bytes: int, phase: int, module: int, grad_enabled: bool, birth: int) -> None:
        self.size_bytes = size_bytes
        self.phase = phase
        self.module = module
        self.grad_enabled = grad_enabled
        self.birth = birth
        self.death = _NO_EVENT
        self.category: str | None = None
        self.owner: str | None = None


@dataclass
class MemoryEvents:
    """Everything a trace recorded.

    Attributes:
        storages: One record a storage, in order of birth.
        order: Storage numbers, ``k`` for a birth and ``~k`` for a death, in order of time.
        phases: ``(name, step, first event)`` of each phase, in order of time.
        modules: Names of the modules that made storages; entry 0 is the root.
    """

    storages: list[StorageRecord] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    phases: list[tuple[str, int, int]] = field(default_factory=list)
    modules: list[str] = field(default_factory=lambda: [""])


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """Weak reference that knows which record and address it stands for."""

    __slots__ = ("index", "key", "size_bytes")
    index: int
    key: int
    size_bytes: int


def _flat_tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                if isinstance(item, Tensor):
                    yield item


def _map_tensors(function: Callable[[Tensor], Any], args: Iterable[Any]) -> list[Any]:
    mapped: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            mapped.append(function(arg))
        elif isinstance(arg, (list, tuple)):
            mapped.append(type(arg)(_map_tensors(function, arg)))
        else:
            mapped.append(arg)
    return mapped


class _Operator:
    """What the recorder has to know of one operator overload; read from its schema once."""

    __slots__ = (
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
            and torch.Tag.inplace_view
            not in func.tags  # `squeeze_` and the like change the tensor's own shape.
            and not self.allocates
            and len(returns) <= 1
            and isinstance(schema.arguments[0].type, (torch.TensorType, torch.ListType))
        )
        self.uninitialised = "empty" in func._opname
        self.handler = _dynamic.HANDLERS.get(func._schema.name)


class Recorder(TorchDispatchMode):
    """Records every storage born on the traced device (``meta``) and its death.

    Args:
        kernel_allocations: Callable ``(func, args, kwargs) -> sizes`` for storages that the real kernel
            allocates and frees inside one operator; ``None`` knows none.
        on_unknown: Called with the operator that produced an unknown scalar when Python code asks for its
            value; returns the value to assume, or ``None`` to fail.

    Note:
        Tensors on other devices than ``meta`` are host tensors: they are computed for real and not counted.
    """

    def __init__(
        self,
        kernel_allocations: Callable[[OpOverload, Any, Any], Iterable[int]] | None = None,
        on_unknown: Callable[[Tensor], Any] | None = None,
    ) -> None:
        super().__init__()
        self.events = MemoryEvents()
        self.known = KnownValues()
        self.phase = 0
        self.module = 0
        self.on_unknown = on_unknown
        self._kernel_allocations = kernel_allocations
        self._live: dict[int, _StorageRef] = {}
        self._excluded: set[int] = set()
        self._meta_kernels = MetaKernelCache()
        self._operators: dict[OpOverload, _Operator] = {}
        self._sequence: tuple[list[int], list[int]] = ([-1], [0])
        self.events.phases.append(("setup", -1, 0))

    def restart(self) -> None:
        """Forget all births so far, but not the contents that are known: what came before was no training."""
        self.events = MemoryEvents()
        self._live.clear()
        self._sequence = ([-1], [0])
        self.phase = self.module = 0
        self.events.phases.append(("setup", -1, 0))

    # -- phases, modules, categories ------------------------------------------------------------------

    def enter_phase(self, name: str, step: int) -> None:
        """Start a phase; everything born from now on belongs to it."""
        self.phase = len(self.events.phases)
        self.events.phases.append((name, step, len(self.events.order)))

    def enter_module(self, module: int) -> None:
        """Make ``module`` the owner of what is born, and of the backward nodes made from now on."""
        self.module = module
        numbers, modules = self._sequence
        numbers.append(torch._C._autograd._get_sequence_nr())
        modules.append(module)

    def mark(self, tensor: Tensor | None, category: str, owner: str | None = None) -> None:
        """Say what a tensor is; registers it if it was not seen being born."""
        if tensor is None or isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):  # type: ignore[attr-defined]
            return
        for part in _strided_parts(tensor):
            if not part.is_meta:
                continue
            index = self.register(part)
            if index is not None:
                record = self.events.storages[index]
                record.category, record.owner = category, owner

    # -- births and deaths ----------------------------------------------------------------------------

    def register(self, tensor: Tensor) -> int | None:
        """Count the storage of a strided meta tensor, if it is new; return the number of its record."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        ref = self._live.get(key)
        size_bytes = storage.nbytes()
        if ref is not None:
            if ref.size_bytes == size_bytes:
                return ref.index
            self._on_death(ref)
        if size_bytes == 0 or key in self._excluded:
            return None
        index = self._birth(size_bytes)
        ref = _StorageRef(storage, self._on_death)
        ref.index, ref.key, ref.size_bytes = index, key, size_bytes
        self._live[key] = ref
        return index

    def _birth(self, size_bytes: int) -> int:
        events = self.events
        index = len(events.storages)
        module = self.module
        grad_enabled = torch.is_grad_enabled()
        if not grad_enabled:
            node = torch._C._current_autograd_node()
            if node is not None:
                numbers, modules = self._sequence
                module = modules[bisect_right(numbers, node._sequence_nr()) - 1]
        events.storages.append(StorageRecord(size_bytes, self.phase, module, grad_enabled, len(events.order)))
        events.order.append(index)
        return index

    def _on_death(self, ref: _StorageRef) -> None:
        events = self.events
        if self._live.get(ref.key) is not ref:
            return  # Born before a restart.
        del self._live[ref.key]
        events.storages[ref.index].death = len(events.order)
        events.order.append(~ref.index)

    def exclude(self, tensor: Tensor) -> Tensor:
        """Leave a meta tensor uncounted: it stands for a host copy of unknown contents."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._excluded.add(key)
        weakref.finalize(storage, self._excluded.discard, key)
        return tensor

    def transient(self, size_bytes: int) -> None:
        """Count a storage that lives only inside one operator."""
        if size_bytes > 0:
            index = self._birth(size_bytes)
            self.events.storages[index].death = len(self.events.order)
            self.events.order.append(~index)

    # -- dispatch -------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator on meta tensors and count what it allocates."""
        kwargs = kwargs or {}
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _Operator(func)
        on_meta, any_real, all_known = self._inspect(args, kwargs)
        if not on_meta:
            return func(*args, **kwargs)
        if any_real:
            args, kwargs = self._to_meta(func, args, kwargs)
        if operator.handler is not None:
            result = operator.handler(self, func, args, kwargs)
            if result is not NotImplemented:
                self._register_outputs(result)
                return result
        if self._kernel_allocations is not None:
            for size_bytes in self._kernel_allocations(func, args, kwargs):
                self.transient(size_bytes)
        out = self._run(operator, func, args, kwargs)
        if operator.allocates:
            self._register_outputs(out)
        if operator.written:
            self._after_write(operator, func, args, kwargs, all_known)
        elif all_known and operator.allocates and not operator.uninitialised:
            self._compute_known(func, args, kwargs, out)
        return out

    def _inspect(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool, bool]:
        """Return whether the operator runs on meta, has host tensors, and has only known tensors."""
        on_meta = any_real = False
        all_known = True
        twins = self.known._twins
        for tensor in _flat_tensors(args):
            if tensor.is_meta:
                on_meta = True
                if all_known and (
                    tensor.layout is not torch.strided or tensor.untyped_storage()._cdata not in twins
                ):
                    all_known = False
            else:
                any_real = True
        if kwargs:
            device = kwargs.get("device")
            if device is not None:
                # A copy to the host of an unknown tensor stays on meta, see `_dynamic`.
                on_meta = on_meta or torch.device(device).type == "meta"
            for tensor in _flat_tensors(kwargs.values()):
                on_meta = on_meta or tensor.is_meta
                any_real = any_real or not tensor.is_meta
                all_known = all_known and (not tensor.is_meta or tensor in self.known)
        return on_meta, any_real, all_known

    def _to_meta(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def convert(tensor: Tensor) -> Tensor:
            return tensor if tensor.is_meta else self.meta_twin(tensor)

        if func._opname in _dynamic.HOST_ARGUMENTS:
            return args, kwargs
        keys = list(kwargs)
        return tuple(_map_tensors(convert, args)), dict(
            zip(keys, _map_tensors(convert, [kwargs[k] for k in keys]), strict=True)
        )

    def meta_twin(self, real: Tensor) -> Tensor:
        """Return a meta tensor of the same layout whose contents are known, without counting it."""
        if real.layout is not torch.strided:
            return real.to(_META)
        meta = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=_META)
        if real.device.type == "cpu":
            self.known.remember(meta, real, borrow=True)
        return meta

    def _run(
        self, operator: _Operator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            if operator.only_allocates or operator.writes_first:
                return self._meta_kernels.run(func, args, kwargs, in_place=operator.writes_first)
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if not func._schema.returns:
                return None  # Writes in place only: nothing is born.
            location = user_location()
            raise TraceError(
                f"Operator `{func}` has no meta kernel, so the step cannot be traced"
                f"{f' (called from {location})' if location else ''}. "
                "Register one with `torch.library.register_fake`, or estimate with a probe or the closed form."
            ) from error

    def _register_outputs(self, out: Any) -> None:
        if isinstance(out, Tensor):
            self._register_any(out)
        elif isinstance(out, (list, tuple)):
            for item in out:
                if isinstance(item, Tensor):
                    self._register_any(item)

    def _register_any(self, tensor: Tensor) -> None:
        if tensor.is_meta:
            if tensor.layout is torch.strided:
                self.register(tensor)
            else:
                for part in _strided_parts(tensor):
                    self.register(part)

    # -- known values ---------------------------------------------------------------------------------

    def _compute_known(self, func: OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        outputs = [t for t in _flat_tensors([out])]
        if not outputs or any(t.numel() > _MAX_KNOWN_NUMEL for t in outputs):
            return
        if all(t in self.known for t in outputs):
            return  # A view of what is known already.
        real = self.run_real(func, args, kwargs)
        if real is None:
            return
        for meta_out, real_out in zip(outputs, _flat_tensors([real]), strict=True):
            is_new = meta_out.is_meta and meta_out.layout is torch.strided and meta_out not in self.known
            if is_new and meta_out.shape == real_out.shape:  # Batch norm's statistics differ by device.
                self.known.remember(meta_out, real_out)

    def run_real(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run an operator on the known contents of its arguments; ``None`` if one is unknown or it fails."""
        if any(t.is_meta and t not in self.known for t in _flat_tensors([*args, *kwargs.values()])):
            return None
        real_kwargs = dict(kwargs)
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = "cpu"
        keys = list(real_kwargs)
        values = _map_tensors(self.known.value, [real_kwargs[k] for k in keys])
        try:
            return func(*_map_tensors(self.known.value, args), **dict(zip(keys, values, strict=True)))
        except (RuntimeError, NotImplementedError):
            return None

    def _after_write(
        self,
        operator: _Operator,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        all_known: bool,
    ) -> None:
        targets = [
            t
            for i, name in operator.written
            for t in _flat_tensors([args[i] if i < len(args) else kwargs.get(name)])
            if t.is_meta and t.layout is torch.strided
        ]
        if operator.resizes:
            for target in targets:
                self.register(target)
        targets = [t for t in targets if t in self.known]
        if not targets:
            return
        if all_known:
            for target in targets:
                self.known.own(target)
            if self.run_real(func, args, kwargs) is not None or not func._schema.returns:
                return
        for target in targets:
            self.known.forget(target)

    def scalar(self, tensor: Tensor) -> Any:
        """Answer Python's question for the value of a one-element tensor.

        Raises:
            DataDependentError: If the value depends on weights or on data that is not known.
        """
        value = self.known.value(tensor)
        if value is not None:
            return value.item()
        if self.on_unknown is not None:
            assumed = self.on_unknown(tensor)
            if assumed is not None:
                return assumed
        location = user_location()
        raise DataDependentError(
            "The step asks for the value of a tensor that depends on weights or on data"
            f"{f', at {location}' if location else ''} (`.item()`, `if tensor:`, `float(tensor)` or the like). "
            "A trace has shapes but no values. Guard that line, or estimate with the closed form or a real probe.",
            location,
        )


def _strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors a tensor is made of."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    raise TraceError(
        f"A tensor of layout {tensor.layout} cannot be traced. Use dense or COO tensors, or a real probe."
    )
