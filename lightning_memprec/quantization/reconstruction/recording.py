"""Record what a part of a model is called with and what it answers, and call it again by itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from lightning_memprec.quantization.measure import run_batches
from lightning_memprec.quantization.padding import MaskedForward

__all__ = [
    "Call",
    "Stored",
    "TensorStore",
    "first_tensor",
    "record",
    "replay",
    "replays",
    "temporary_store",
]


@dataclass(frozen=True)
class Stored:
    """A tensor that was put away: on the CPU, or in a file.

    Attributes:
        place: The tensor, or the file that holds it.
        device: Where it came from.
        shape: Its shape.
    """

    place: Tensor | Path
    device: torch.device
    shape: torch.Size

    def load(self) -> Tensor:
        """Return a new tensor, which may be changed."""
        tensor = (
            self.place.clone()
            if isinstance(self.place, Tensor)
            else torch.load(self.place, weights_only=True)
        )
        return cast("Tensor", tensor).to(self.device)


class TensorStore:
    """Puts tensors away, in memory up to a budget and in files beyond it.

    The files lie in a temporary folder, which is made for the first of them; :func:`temporary_store` removes it.

    Args:
        budget: Bytes of memory.
    """

    def __init__(self, budget: int) -> None:
        self._left = budget
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = 0

    def put(self, tensor: Tensor) -> Stored:
        """Copy a tensor."""
        # Out of inference mode, because a tensor made in it could not be used in training.
        with torch.inference_mode(False), torch.no_grad():
            copy = tensor.detach().to("cpu", copy=True).contiguous()
        size = copy.numel() * copy.element_size()
        if size <= self._left:
            self._left -= size
            return Stored(copy, tensor.device, copy.shape)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="lightning_memprec_")
        path = Path(self._folder.name) / f"{self._files}.pt"
        self._files += 1
        torch.save(copy, path)
        return Stored(path, tensor.device, copy.shape)

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            self._folder.cleanup()


@contextmanager
def temporary_store(budget: int) -> Iterator[TensorStore]:
    """Open a store whose files vanish at the end."""
    with closing(TensorStore(budget)) as store:
        yield store


@dataclass
class Call:
    """One call of a module.

    Attributes:
        args: Positional arguments, tensors put away.
        kwargs: Keyword arguments, tensors put away.
        output: The first tensor of what it answered.
        gradient: Derivative of a loss with respect to that tensor, if one was asked for.
        gradient_of: What stood for the loss.
        mask: bool ``[batch, tokens]``, which tokens of the output are no padding, if some may be.
        autocast: Device type and dtype of autocast, if it was on.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Stored
    gradient: Stored | None = None
    gradient_of: str | None = None
    mask: Tensor | None = None
    autocast: tuple[str, torch.dtype] | None = None

    def without_padding(self, values: Tensor) -> Tensor:
        """Return what counts of the output, or of a tensor of its shape."""
        return values if self.mask is None else values[self.mask.to(values.device)]


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in an output."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return next(tensors, None)


class _Recorder:
    """Hooks of one pass over the data.

    Args:
        store: Where tensors go.
        forward: What runs the batches; it may know their padding.
        differentiate: Whether gradients with respect to outputs are wanted.
    """

    def __init__(self, store: TensorStore, forward: Any, differentiate: bool) -> None:
        self._forward = forward
        self.calls: dict[str, list[Call]] = {}
        self._store = store
        self._differentiate = differentiate
        self._batch = 0
        self._begun: list[tuple[Any, Any]] = []
        self._outputs: list[tuple[Call, Tensor]] = []
        self._known: dict[tuple[int, int], tuple[Tensor, Stored]] = {}

    def attach(self, name: str, module: nn.Module) -> Iterator[Any]:
        """Hook a module; yields handles that remove the hooks."""
        self.calls[name] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._begun.append(tree_map_only(Tensor, self._put, (args, kwargs)))

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            begun = self._begun.pop()
            exact = first_tensor(output)
            if exact is None or not exact.numel():
                return None
            mask = _mask(self._forward, exact)
            if not bool((exact if mask is None else exact[mask.to(exact.device)]).isfinite().all()):
                raise ValueError(
                    f"Calibration batch {self._batch} makes `{name}` give NaN or infinite values."
                    " Take such batches out."
                )
            call = Call(*begun, output=self._put(exact), autocast=_autocast(exact.device.type))
            call.mask = mask
            self.calls[name].append(call)
            return self._followed(call, exact, output) if self._differentiate else None

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    def _put(self, tensor: Tensor) -> Stored:
        """Put a tensor away, once if several modules see it; it is known again by its version."""
        if tensor.is_inference():
            return self._store.put(tensor)
        key = id(tensor), tensor._version
        if key not in self._known:
            # Kept with it, so that no other tensor gets its id.
            self._known[key] = tensor, self._store.put(tensor)
        return self._known[key][1]

    def _followed(self, call: Call, exact: Tensor, output: Any) -> Any:
        """Return the output with a first tensor that derivatives can be taken to."""
        leaf = exact if exact.requires_grad else exact.detach().requires_grad_()
        self._outputs.append((call, leaf))
        # A copy goes on, because what follows may work in place.
        onwards = leaf.clone()
        self._known[id(onwards), onwards._version] = onwards, call.output
        return tree_map(lambda part: onwards if part is exact else part, output)

    def finish(self, loss: tuple[str | None, Tensor] | None) -> None:
        """End a batch."""
        if loss is not None and loss[1].requires_grad and self._outputs:
            calls, tensors = zip(*self._outputs, strict=True)
            gradients = torch.autograd.grad(loss[1], tensors, allow_unused=True)
            for call, gradient in zip(calls, gradients, strict=True):
                call.gradient_of = loss[0]
                call.gradient = None if gradient is None else self._store.put(gradient)
        self._batch += 1
        self._outputs.clear()
        self._known.clear()


def record(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
    store: TensorStore,
    loss: Callable[[Any], tuple[str | None, Tensor] | None] | None = None,
) -> dict[str, list[Call]]:
    """Run batches through a model in evaluation mode and record the calls of some of its modules.

    Caches of keys and values that models of ``transformers`` keep are off meanwhile. Modes and random generators are
    left as they were.

    Args:
        model: The model.
        modules: What to record, by name.
        batches: What ``forward`` takes.
        forward: Runs one batch.
        store: Where tensors go.
        loss: Makes a scalar of what ``forward`` returns, and says what stands for it; then gradients with respect to
            outputs are recorded, too.

    Returns:
        Calls of each module in order.

    Raises:
        ValueError: If there are no batches, or one makes a module answer with a NaN or an infinity.
    """
    recorder = _Recorder(store, forward, differentiate=loss is not None)

    def run(module: nn.Module, batch: Any) -> None:
        with torch.enable_grad() if loss is not None else nullcontext():
            result = forward(module, batch)
            recorder.finish(None if loss is None else loss(result))

    with ExitStack() as hooks, _without_caches(model):
        for name, module in modules.items():
            for handle in recorder.attach(name, module):
                hooks.callback(handle.remove)
        run_batches(model, batches, run)
    return recorder.calls


def replay(module: nn.Module, call: Call, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Call a module again.

    Args:
        module: The module.
        call: What it was called with.
        weights: What takes the place of its parameters, by name.

    Returns:
        The first tensor of its output.
    """
    args, kwargs = tree_map_only(Stored, Stored.load, (call.args, call.kwargs))
    with ExitStack() as contexts:
        if call.autocast is not None:
            device, dtype = call.autocast
            # Its cache would keep weights that are about to change.
            contexts.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        output = functional_call(module, dict(weights or {}), args, kwargs)
    return cast("Tensor", first_tensor(output))


def replays(module: nn.Module, calls: Sequence[Call]) -> bool:
    """Tell whether a module that is called again gives what it gave, up to the order in which kernels sum.

    What it gives may differ by the rounding of its dtype, in FP32 by half of the digits, relative to its size: rounding
    weights to 8 bits moves an output by about ten times as much.

    Args:
        module: The module.
        calls: What it was called with and gave.
    """
    for call in calls:
        exact = call.output.load()
        try:
            again = replay(module, call)
        except Exception:  # A part of a model may fail in any way when it is called out of turn.
            return False
        if again.shape != exact.shape:
            return False
        precision = torch.finfo(exact.dtype).eps
        tolerance = max(precision, torch.finfo(torch.float32).eps ** 0.5)
        if torch.linalg.vector_norm(again.float() - exact.float()) > tolerance * torch.linalg.vector_norm(
            exact.float()
        ):
            return False
    return True


def _mask(forward: Any, output: Tensor) -> Tensor | None:
    mask = forward.current if isinstance(forward, MaskedForward) else None
    return mask if mask is not None and output.dim() > 2 and output.shape[:2] == mask.shape else None


def _autocast(device: str) -> tuple[str, torch.dtype] | None:
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


@contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Switch off the caches that models of ``transformers`` fill, which would grow when a layer is called again."""
    found = (getattr(part, "config", None) for part in model.modules())
    configs: dict[int, Any] = {id(config): config for config in found if hasattr(config, "use_cache")}
    before = [(config, config.use_cache) for config in configs.values()]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, used in before:
            config.use_cache = used
