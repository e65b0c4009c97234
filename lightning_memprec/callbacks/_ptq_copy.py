"""A float copy of a run's module on the host, with the best, the last or the averaged weights in FP32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lightning_memprec._errors import TraceError
from lightning_memprec._files.checkpoint_files import open_checkpoint
from lightning_memprec._lightning import namespace_of
from lightning_memprec._prepare import prepare_copy
from lightning_memprec.memory.meta_copy import meta_copy

if TYPE_CHECKING:
    from lightning_memprec._lightning import LightningModule, Trainer

__all__ = [
    "Source",
    "Weights",
    "averaging_callback",
    "choose_weights",
    "copy_with",
    "off_limits",
    "reset_metrics",
]

Source = Literal["best", "last", "averaged"]
Weights = Mapping[str, Callable[[], Tensor]]

# What a run has done already, and must not be done to a quantized copy: `setup` may build float layers anew.
_DONE = ("prepare_data", "setup", "configure_model", "configure_callbacks", "teardown")
_HALVES = (torch.float16, torch.bfloat16)
_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")


def averaging_callback(trainer: Trainer) -> Any:
    """Return Lightning's callback that averages the weights of a run, or ``None``."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(base.__name__ in _AVERAGING for base in type(callback).__mro__):
            return callback
    return None


def choose_weights(trainer: Trainer, module: LightningModule, source: Source) -> tuple[Weights, str]:
    """Return readers of the weights to quantize, and in words which they are.

    Args:
        trainer: The Trainer at the end of ``fit``.
        module: Its module.
        source: ``"best"`` falls back to the last weights where no checkpoint was saved.

    Raises:
        ValueError: If weights are not averaged (yet).
        CheckpointError: If the best checkpoint cannot be read.
    """
    if source == "averaged":
        average = getattr(averaging_callback(trainer), "_average_model", None)
        if average is None:
            raise ValueError(
                "there are no averaged weights: averaging has not begun. Choose `source='best'` or 'last'"
            )
        # WeightAveraging wraps its copy in an AveragedModel, StochasticWeightAveraging does not.
        return _readers(getattr(average, "module", average).state_dict()), "averaged weights"
    checkpoint = trainer.checkpoint_callback
    path = getattr(checkpoint, "best_model_path", "") if source == "best" else ""
    if path and Path(path).exists():
        stored = open_checkpoint(path).weights
        monitor = getattr(checkpoint, "monitor", None)
        words = (
            "last saved weights (no metric is monitored)"
            if monitor is None
            else f"best checkpoint by {monitor}"
        )
        return {name: tensor.read for name, tensor in stored.items()}, f"{words}, {path}"
    missing = " (no best checkpoint was saved)" if source == "best" else ""
    return _readers(module.state_dict()), f"last weights{missing}"


def _readers(state: Mapping[str, Any]) -> Weights:
    return {name: value.detach for name, value in state.items() if isinstance(value, Tensor)}


def copy_with(module: LightningModule, weights: Weights, trainer: Trainer) -> LightningModule:
    """Copy a module to the host with other weights; halves become FP32.

    What the copy of the estimate keeps (ties, hooks, functions that close over modules, locks that are shared) this
    one keeps as well; the values follow.

    Args:
        module: The run's module; it is not touched.
        weights: A reader for each of its parameters and persistent buffers. Frozen parameters may be missing.
        trainer: Its Trainer, which the copy must not drag along.

    Raises:
        ValueError: If the module cannot be copied, or a weight is missing or has another shape.
    """
    try:
        # Typed as a plain module there.
        copied: LightningModule = meta_copy(module, Tensor.clone, (trainer,))  # type: ignore[assignment]
    except TraceError as error:
        raise ValueError(
            f"the module cannot be copied ({error.__cause__}). Make that attribute in the hook that uses it, or"
            " quantize a checkpoint with `lightning-memprec quantize`"
        ) from error
    _fill(copied, module, weights)
    if any(parameter.dtype in _HALVES for parameter in module.parameters()):
        copied = copied.float()
    prepare_copy(copied, trainer=trainer, datamodule=trainer.datamodule, set_up=True)  # type: ignore[attr-defined]
    base = namespace_of(trainer).LightningModule
    for name in _DONE:
        vars(copied)[name] = getattr(base, name).__get__(copied)
    vars(copied)["_metric_attributes"] = (
        None  # Lightning's names of metrics, by the identity of the originals.
    )
    reset_metrics(copied)  # They may be in the middle of an epoch of the run.
    return copied


def _fill(copied: nn.Module, module: nn.Module, weights: Weights) -> None:
    """Give the tensors of a copy their values; the tensors stay the same, since others may refer to them."""
    own = dict(module.named_parameters())
    recurrent = [part for part in copied.modules() if isinstance(part, nn.RNNBase)]
    for part in recurrent:
        part._flat_weight_refs = []  # Tensors with weak references cannot be swapped.
    for name, parameter in copied.named_parameters():
        value = _read(name, own[name], weights)
        needs_grad = parameter.requires_grad and value.is_floating_point()
        torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=needs_grad))  # type: ignore[no-untyped-call]
    for name, buffer in module.named_buffers():
        value = _read(name, buffer, weights) if name in weights else _host(buffer)
        torch.utils.swap_tensors(copied.get_buffer(name), value)  # type: ignore[no-untyped-call]
    for part in recurrent:
        part._init_flat_weights()


@contextmanager
def off_limits(module: nn.Module) -> Iterator[None]:
    """Refuse any call of the run's own layers: a copy that computes with them would be measured wrongly.

    Args:
        module: The run's module.
    """

    def refuse(layer: nn.Module, inputs: Any) -> None:
        raise ValueError(
            f"`validation_step` of the copy calls a `{type(layer).__name__}` of the run's own module, which it finds"
            " outside the module. Call layers through `self`, or quantize a checkpoint with `lightning-memprec"
            " quantize`"
        )

    handles = [part.register_forward_pre_hook(refuse) for part in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def reset_metrics(module: nn.Module) -> None:
    """Reset the torchmetrics inside a module."""
    parts: Iterable[Any] = module.modules()
    for part in parts:
        if hasattr(part, "_update_count") and callable(getattr(part, "reset", None)):
            part.reset()


def _read(name: str, own: Tensor, weights: Weights) -> Tensor:
    if isinstance(own, nn.parameter.UninitializedTensorMixin):  # type: ignore[attr-defined]
        raise ValueError(f"{name!r} has no shape: its lazy layer never ran. Remove it")
    frozen = isinstance(own, nn.Parameter) and not own.requires_grad
    if name not in weights and not frozen:
        raise ValueError(
            f"the weights to quantize lack {name!r}: a hook of the module may save others. Choose `source='last'`"
        )
    value = weights[name]() if name in weights else own
    if value.shape != own.shape:
        raise ValueError(
            f"{name!r} has the shape {list(value.shape)} in the weights to quantize, but {list(own.shape)} in the"
            " module. Choose `source='last'`"
        )
    return _host(value)


def _host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float32 if value.dtype in _HALVES else value.dtype, copy=True)
