"""Let user code believe that it runs on the estimated device while its tensors lie on ``meta``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

from lightning_memprec._errors import DataDependentError
from lightning_memprec.memory._location import user_location
from lightning_memprec.memory.known import KnownValues
from lightning_memprec.memory.unknown_values import UnknownNumber, ValueAnswers

__all__ = ["DeviceRedirect", "checkpoints_on_any_device", "modules_moved_back", "no_device_calls"]

_META = torch.device("meta")


# Calls that steer a device and return nothing of weight: they have nothing to steer in a trace, and raise on a
# machine without a driver.
_DEVICE_CALLS: dict[str, Callable[..., Any]] = {
    "synchronize": lambda *args, **kwargs: None,
    "empty_cache": lambda *args, **kwargs: None,
    "set_device": lambda *args, **kwargs: None,
    "reset_peak_memory_stats": lambda *args, **kwargs: None,
    "current_device": lambda: 0,
    "device": lambda *args, **kwargs: nullcontext(),
    "device_of": lambda *args, **kwargs: nullcontext(),
    # Seeding queues itself for the day the device is started, and a checkpoint saves the device's generator.
    "manual_seed": lambda *args, **kwargs: None,
    "manual_seed_all": lambda *args, **kwargs: None,
    "seed": lambda *args, **kwargs: None,
    "seed_all": lambda *args, **kwargs: None,
    "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    "set_rng_state": lambda *args, **kwargs: None,
}


@contextmanager
def no_device_calls(compute_capability: tuple[int, int]) -> Iterator[None]:
    """Keep user code inside a trace from reaching a real device through ``torch.cuda`` or Triton.

    A Triton kernel writes to tensors that Python code made for it and allocates none: not launching it changes
    no birth and no death.

    Args:
        compute_capability: What ``torch.cuda.get_device_capability`` and ``is_bf16_supported`` answer inside.
    """
    patches: list[tuple[Any, str, Any]] = [(torch.cuda, name, call) for name, call in _DEVICE_CALLS.items()]
    # As in torch, emulation counts unless it is asked not to.
    supports_bf16 = lambda including_emulation=True: including_emulation or compute_capability >= (8, 0)  # noqa: E731
    patches.append((torch.cuda, "is_bf16_supported", supports_bf16))
    patches.append((torch.cuda, "get_device_capability", lambda device=None: compute_capability))
    triton = sys.modules.get("triton.runtime.jit")
    if triton is not None:
        patches.append(
            (triton.KernelInterface, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: None)
        )
    saved = [(target, name, getattr(target, name)) for target, name, _ in patches]
    for target, name, stand_in in patches:
        setattr(target, name, stand_in)
    try:
        yield
    finally:
        for target, name, original in saved:
            setattr(target, name, original)


@contextmanager
def checkpoints_on_any_device() -> Iterator[None]:
    """Let activation checkpointing compare what it recomputes by shape and dtype only.

    Hooks of saved tensors run inside or outside of a :class:`DeviceRedirect`, and are told another device each time.
    """
    checks: dict[str, Any] = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    saved = checks["default"]
    checks["default"] = lambda tensor: {"shape": tensor.shape, "dtype": tensor.dtype}
    try:
        yield
    finally:
        checks["default"] = saved


@contextmanager
def modules_moved_back() -> Iterator[None]:
    """Undo what ``module.to(device)`` does, in a trace, to modules with real tensors outside the traced copy.

    A step may use a module that it finds in a global or a closure, and move it to the device first: inside the
    trace that would put the user's own weights on ``meta``.
    """
    apply = nn.Module._apply
    restore: list[Callable[[], None]] = []

    def saving_apply(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if any(
            t is not None and not t.is_meta for t in (*module._parameters.values(), *module._buffers.values())
        ):
            restore.append(_put_back(module))
        return apply(module, *args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]

    nn.Module._apply = saving_apply  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]
        for undo in reversed(restore):
            undo()


def _put_back(module: nn.Module) -> Callable[[], None]:
    """Return what gives a module its present tensors again; the module is not kept alive."""
    reference = weakref.ref(module)
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    contents = [(p, p.data, p.grad) for p in parameters.values() if p is not None]

    def undo() -> None:
        alive = reference()
        if alive is not None:
            for parameter, data, grad in contents:
                parameter.grad = None
                parameter.data, parameter.grad = data, grad
            alive._parameters.update(parameters)
            alive._buffers.update(buffers)

    weakref.finalize(module, contents.clear)
    weakref.finalize(module, parameters.clear)
    return undo


class DeviceRedirect(TorchFunctionMode):
    """Sends tensors meant for one device type to ``meta``, and answers ``tensor.device`` with that device.

    Args:
        device_type: Device type to stand in for: ``"cuda"`` or ``"cpu"``. For ``"cpu"`` factories without a
            device make meta tensors too, since that is where a CPU run would put them.
        known: Contents known to the trace, for ``tolist`` and ``numpy``.
    """

    def __init__(self, device_type: str, known: KnownValues) -> None:
        super().__init__()
        self.device = torch.device(device_type, 0) if device_type != "cpu" else torch.device("cpu")
        self._known = known
        self.answers = ValueAnswers(known)
        self._default = torch.get_default_device().type == device_type
        self._factories = _device_constructors()
        self._handlers: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
            Tensor.device.__get__: self._get_device,  # type: ignore[attr-defined]
            Tensor.is_cuda.__get__: self._is_cuda,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: self._is_cpu,  # type: ignore[attr-defined]
            Tensor.to: self._to,
            Tensor.cuda: self._cuda,
            Tensor.cpu: self._cpu,
            Tensor.get_device: self._get_index,
            Tensor.__format__: self._format,
            Tensor.pin_memory: lambda func, args, kwargs: args[0],
            Tensor.tolist: self._read,
            Tensor.numpy: self._read,
            Tensor.__array__: self._read,
            Tensor.new: self._new,
            Tensor.new_tensor: self._new_tensor,
            torch.tensor: self._from_data,
            torch.as_tensor: self._from_data,
            torch.asarray: self._from_data,
            torch.from_numpy: self._from_data,
            **self.answers.handlers,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Translate devices, then call the function."""
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._translate(kwargs["device"])}
            if kwargs["device"] is None and not self._default:
                del kwargs["device"]
        if self._default and func in self._factories and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": _META}
        return func(*args, **kwargs)

    def _translate(self, device: Any) -> Any:
        if device is None or isinstance(device, torch.device):
            kind = None if device is None else device.type
        elif isinstance(device, str):
            kind = device.partition(":")[0]
        elif isinstance(device, int):
            kind = "cuda"  # A bare index means an accelerator.
        else:
            return device
        if kind == self.device.type:
            return _META
        return device

    def _from_data(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        # These fill memory behind the dispatcher's back: make the tensor for real, then move it.
        device = self._translate(kwargs.get("device")) if kwargs.get("device") is not None else None
        to_meta = device == _META or (device is None and self._default)
        real: Tensor = func(*args, **{k: v for k, v in kwargs.items() if k != "device" or not to_meta})
        if any(isinstance(leaf, UnknownNumber) for leaf in tree_leaves(args[:1])):
            return torch.empty_like(real, device=_META)  # Its contents are as unknown.
        return real.to(_META) if to_meta and not real.is_meta else real

    def _new(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if args[0].layout is torch.sparse_coo and args[0].is_meta:
            # `torch.optim.SparseAdam` builds sparse tensors so; the old constructor knows no `meta`.
            return torch.sparse_coo_tensor(*args[1:], device=_META, check_invariants=False)
        return func(*args, **kwargs)  # type: ignore[no-any-return]

    def _new_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        like, *args = args  # type: ignore[assignment]
        options = {
            "dtype": like.dtype,
            "device": like.device,
            **{k: v for k, v in kwargs.items() if v is not None},
        }
        return self._from_data(torch.tensor, tuple(args), options)

    def _get_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        device: torch.device = func(*args)
        return self.device if device.type == "meta" else device

    def _get_index(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        device = self._get_device(Tensor.device.__get__, args, kwargs)  # type: ignore[attr-defined]
        return -1 if device.index is None else device.index

    def _format(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        # Text steers nothing: a number that is not known is written as not-a-number.
        tensor, spec = args
        if tensor.is_meta and tensor.ndim == 0:
            known = self._known.value(tensor)
            return format(float("nan") if known is None else known.item(), spec)
        return func(*args, **kwargs)  # type: ignore[no-any-return]

    def _is_cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._get_device(Tensor.device.__get__, args, kwargs).type == "cuda"  # type: ignore[attr-defined]

    def _is_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._get_device(Tensor.device.__get__, args, kwargs).type == "cpu"  # type: ignore[attr-defined]

    def _to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._translate(kwargs["device"])}
        if len(args) > 1 and isinstance(args[1], (str, torch.device, int)):
            args = (args[0], self._translate(args[1]), *args[2:])
        return func(*args, **kwargs)  # type: ignore[no-any-return]

    def _cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return args[0].to(_META) if self.device.type == "cuda" else func(*args, **kwargs)  # type: ignore[no-any-return]

    def _cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return args[0] if self.device.type == "cpu" else func(*args, **kwargs)  # type: ignore[no-any-return]

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = self._known.value(args[0])
        if value is None:
            location = user_location()
            raise DataDependentError(
                f"The step reads a tensor's contents with `.{func.__name__}()`{f' at {location}' if location else ''}, "
                "but they depend on weights or on data. A trace has shapes but no values. "
                "Guard that line, or measure a few real steps (`probe_memory`, or `MemoryPreflight(probe=True)`).",
                location,
            )
        return func(value, *args[1:], **kwargs)
