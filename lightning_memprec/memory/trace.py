"""Record the birth and death of every storage while a training step runs on meta tensors.

A ``TorchDispatchMode`` sees each operator below autograd; an output whose storage is new is a birth, a weak
reference on that storage tells its death. Nothing is computed, except what follows from the batch and from
constants alone (:mod:`~lightning_memprec.memory.known`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memprec._errors import DataDependentError, TraceError
from lightning_memprec.memory._dynamic import HOST_ARGUMENTS
from lightning_memprec.memory._location import user_location
from lightning_memprec.memory._operator import Operator, flat_tensors, map_arguments
from lightning_memprec.memory._replay import MetaKernelCache
from lightning_memprec.memory.events import Ledger, strided_parts
from lightning_memprec.memory.known import MAX_KNOWN_NUMEL, KnownValues
from lightning_memprec.memory.losses import KEEPS_WHOLE_STORAGE, with_whole_storage
from lightning_memprec.memory.originals import Originals

__all__ = ["Recorder"]

_META = torch.device("meta")


class Recorder(TorchDispatchMode, Ledger):  # type: ignore[no-untyped-call]
    """Records every storage born on the traced device (``meta``) and its death.

    Args:
        kernel_allocations: Callable ``(func, args, kwargs) -> sizes`` for storages that the real kernel
            allocates and frees inside one operator.
        on_unknown: Called with the operator that produced an unknown scalar when Python code asks for its
            value; returns the value to assume, or ``None`` to fail.

    Note:
        Tensors on other devices than ``meta`` are host tensors: they are computed for real and not counted.
    """

    def __init__(
        self,
        kernel_allocations: Callable[[OpOverload, Any, Any], Iterable[int]] = lambda func, args, kwargs: (),
        on_unknown: Callable[[Tensor], Any] | None = None,
    ) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        Ledger.__init__(self)
        self.known = KnownValues()
        self.originals = Originals()
        self.on_unknown = on_unknown
        self._kernel_allocations = kernel_allocations
        self._meta_kernels = MetaKernelCache()
        self._operators: dict[OpOverload, Operator] = {}

    # -- dispatch -------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator on meta tensors and count what it allocates."""
        if types and any(kind.__module__.startswith("torch.distributed") for kind in types):
            return NotImplemented  # A `DTensor` runs its operators on the tensor inside: those are recorded.
        # Called out of C++, modes that send new tensors to `meta` would be active here.
        with torch._C.DisableTorchFunction():
            return self._record(func, args, kwargs or {})

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = self._operator(func)
        on_meta, any_real, all_known = self._inspect(args, kwargs)
        if not on_meta:
            self.originals.save(operator.targets(args, kwargs))
            return func(*args, **kwargs)
        if any_real:
            args, kwargs = self._to_meta(func, args, kwargs)
        if operator.handler is not None:
            result = operator.handler(self, func, args, kwargs)
            if result is not NotImplemented:
                self._register_outputs(result)
                return result
        for size_bytes in self._kernel_allocations(func, args, kwargs):
            self.transient(size_bytes)
        out = self._run(operator, func, args, kwargs)
        if func in KEEPS_WHOLE_STORAGE:
            out = with_whole_storage(out, args)
        if operator.allocates:
            self._register_outputs(out)
        self.events.flops += operator.flops(args, kwargs, out)
        self.finish_operator(func, args, kwargs)
        if operator.written:
            self._after_write(operator, func, args, kwargs, all_known)
        elif all_known and operator.allocates and not operator.uninitialised:
            self._compute_known(func, args, kwargs, out)
        return out

    def _operator(self, func: OpOverload) -> Operator:
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = Operator(func)
        return operator

    def finish_operator(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        """Called when an operator has run on meta and its outputs are counted; for subclasses."""

    def _inspect(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool, bool]:
        """Return whether the operator runs on meta, has host tensors, and has only known tensors."""
        on_meta = any_real = False
        all_known = True
        twins = self.known._twins
        for tensor in flat_tensors(args):
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
            for tensor in flat_tensors(kwargs.values()):
                on_meta = on_meta or tensor.is_meta
                any_real = any_real or not tensor.is_meta
                all_known = all_known and (not tensor.is_meta or tensor in self.known)
        return on_meta, any_real, all_known

    def _to_meta(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def convert(tensor: Tensor) -> Tensor:
            return tensor if tensor.is_meta else self.meta_twin(tensor)

        if func._opname in HOST_ARGUMENTS:
            return args, kwargs
        keys = list(kwargs)
        return tuple(map_arguments(convert, args)), dict(
            zip(keys, map_arguments(convert, [kwargs[k] for k in keys]), strict=True)
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
        self, operator: Operator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
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
                for part in strided_parts(tensor):
                    self.register(part)

    # -- known values ---------------------------------------------------------------------------------

    def _compute_known(self, func: OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        outputs = list(flat_tensors([out]))
        if not outputs or any(t.numel() > MAX_KNOWN_NUMEL for t in outputs):
            return
        if all(t in self.known for t in outputs):
            return  # A view of what is known already.
        real = self.run_real(func, args, kwargs)
        if real is None:
            return
        for meta_out, real_out in zip(outputs, flat_tensors([real]), strict=True):
            is_new = meta_out.is_meta and meta_out.layout is torch.strided and meta_out not in self.known
            if is_new and meta_out.shape == real_out.shape:  # Batch norm's statistics differ by device.
                self.known.remember(meta_out, real_out)

    def run_real(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run an operator on the known contents of its arguments; ``None`` if one is unknown or it fails."""
        if any(t.is_meta and t not in self.known for t in flat_tensors([*args, *kwargs.values()])):
            return None
        real_kwargs = dict(kwargs)
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = "cpu"
        keys = list(real_kwargs)
        values = map_arguments(self.known.value, [real_kwargs[k] for k in keys])
        try:
            return func(*map_arguments(self.known.value, args), **dict(zip(keys, values, strict=True)))
        except (RuntimeError, NotImplementedError):
            return None

    def _after_write(
        self,
        operator: Operator,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        all_known: bool,
    ) -> None:
        targets = [t for t in operator.targets(args, kwargs) if t.is_meta and t.layout is torch.strided]
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
            "A trace has shapes but no values. Guard that line, or measure a few real steps (`probe_memory`, or "
            "`MemoryPreflight(probe=True)`).",
            location,
        )
