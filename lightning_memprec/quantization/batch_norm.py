r"""Batch norm of a network that is quantized: folded into the convolution before it, or measured anew.

**Folding.** In evaluation :math:`\gamma (y - \mu)/\sigma + \beta` scales each channel of the convolution's output
:math:`y`, which the convolution's weights can do as well. Then steps of a grid that channels share, and errors that are
summed over channels, count what leaves the batch norm instead of what enters it. Only the factor moves: the batch norm
stays and adds a constant, so that the network and its files keep their structure.

**Re-tuning.** Rounding shifts the mean and the variance of what layers give. Statistics that are shifted as well take
that out ("batch-norm tuning" of arXiv 2006.10518).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lightning_memprec.quantization.measure import call, run_batches
from lightning_memprec.quantization.targets import Skipped

__all__ = [
    "BatchNorm",
    "Moments",
    "batch_norm_moments",
    "check_batch_norm",
    "folded_batch_norm",
    "retune_batch_norm_",
]

BatchNorm = Literal["keep", "fold", "retune"]

_UNPROVEN = "batch norm that is not folded: it could not be shown to follow one convolution alone"
_NO_STATISTICS = "batch norm that is not folded: it has no running statistics"


def check_batch_norm(choice: str, batches: Sequence[Any] | None) -> None:
    """Refuse a choice that does not exist, or re-tuning without data."""
    if choice not in get_args(BatchNorm):
        raise ValueError(
            f"`batch_norm` must be 'keep', 'fold' or 'retune', got {choice!r}. 'keep' leaves it alone."
        )
    if choice == "retune" and not batches:
        raise ValueError("Batch norms are measured again on data. Give batches with `calibration`.")


@contextmanager
def folded_batch_norm(model: nn.Module) -> Iterator[list[Skipped]]:
    """Let convolutions take over the factors of the batch norms behind them, in place; undone if the block fails.

    A batch norm is folded if a symbolic trace of the model, or its place in an ``nn.Sequential`` where there is no
    trace, shows that it alone uses the output of one convolution.

    Args:
        model: The float model. In evaluation it computes the same, up to rounding.

    Yields:
        Batch norms that are not folded, and why.
    """
    norms = {name: part for name, part in model.named_modules() if _is_batch_norm(part)}
    pairs = _pairs(model)
    left = [
        Skipped(name, part, _UNPROVEN if _has_statistics(part) else _NO_STATISTICS)
        for name, part in norms.items()
        if name not in pairs
    ]
    chosen = [(model.get_submodule(pairs[name]), norms[name]) for name in pairs]
    tensors = [tensor for pair in chosen for part in pair for tensor in (*part.parameters(), *part.buffers())]
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        with torch.no_grad():
            for convolution, norm in chosen:
                _fold(cast("_ConvNd", convolution), cast("_BatchNorm", norm))
        yield left
    except BaseException:
        with torch.no_grad():
            for tensor, values in before:
                tensor.copy_(values)
        raise


def _is_batch_norm(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) and not isinstance(part, nn.modules.lazy.LazyModuleMixin)


def _has_statistics(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) and part.running_mean is not None and part.running_var is not None


def _fold(convolution: _ConvNd, norm: _BatchNorm) -> None:
    mean, variance = cast("Tensor", norm.running_mean), cast("Tensor", norm.running_var)
    factor = torch.rsqrt(variance.double() + norm.eps)
    if norm.weight is not None:
        factor = factor * norm.weight.double()
        norm.weight.fill_(1)
    weight = convolution.weight
    if isinstance(convolution, _ConvTransposeNd):
        # [in, out / groups, *kernel]: channels of a group lie along the second axis.
        grouped = weight.double().reshape(convolution.groups, -1, *weight.shape[1:])
        scaled = (
            grouped * factor.view(convolution.groups, 1, -1, *[1] * len(convolution.kernel_size))
        ).flatten(0, 1)
    else:
        scaled = weight.double() * factor.view(-1, *[1] * (weight.dim() - 1))
    weight.copy_(scaled)
    if convolution.bias is not None:
        convolution.bias.mul_(factor)
    mean.mul_(factor)
    variance.fill_(1 - norm.eps)


def _pairs(model: nn.Module) -> dict[str, str]:
    """Return the convolution that each batch norm follows, by their names."""
    pairs = _traced_pairs(model)
    if pairs is None:
        pairs = _sequential_pairs(model)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found = {}
    for norm, convolution in pairs.items():
        parts = [model.get_submodule(norm), model.get_submodule(convolution)]
        own = [parameter for part in parts for parameter in part.parameters()]
        if _fits(*parts) and all(uses[id(parameter)] == 1 for parameter in own):
            found[norm] = convolution
    return found


def _fits(norm: nn.Module, convolution: nn.Module) -> bool:
    # A weight that is computed anew at each call (parametrized, pruned) would take no factor.
    return (
        _is_batch_norm(norm)
        and _has_statistics(norm)
        and isinstance(convolution, _ConvNd)
        and "weight" in convolution._parameters
        and not convolution._forward_pre_hooks
        and not convolution._forward_hooks
    )


def _traced_pairs(model: nn.Module) -> dict[str, str] | None:
    """Follow a symbolic trace; ``None`` if the model has none."""
    try:
        graph = fx.Tracer().trace(model)
    except Exception:  # Whatever the model's own code raises when it meets symbols.
        return None
    called = Counter(node.target for node in graph.nodes if node.op == "call_module")
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    pairs = {}
    for node in graph.nodes:
        before = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        names = {str(node.target), str(before.target)}
        if all(called[name] == 1 for name in names) and not names & read:
            pairs[str(node.target)] = str(before.target)
    return pairs


def _sequential_pairs(model: nn.Module) -> dict[str, str]:
    """Find neighbours in ``nn.Sequential`` that hang nowhere else."""
    places = Counter(id(part) for _, part in model.named_modules(remove_duplicate=False))
    pairs = {}
    for name, part in model.named_modules():
        if not isinstance(part, nn.Sequential) or type(part).forward is not nn.Sequential.forward:
            continue
        children = list(part.named_children())
        for (first, convolution), (second, norm) in itertools.pairwise(children):
            if places[id(convolution)] == places[id(norm)] == 1:
                prefix = f"{name}." if name else ""
                pairs[f"{prefix}{second}"] = f"{prefix}{first}"
    return pairs


class Moments(NamedTuple):
    """Mean and variance of each channel, FP64 ``[C]``."""

    mean: Tensor
    variance: Tensor


def batch_norm_moments(
    model: nn.Module, batches: Sequence[Any], forward: Callable[[nn.Module, Any], Any] = call
) -> dict[str, list[Moments]]:
    """Return the moments of what enters each batch norm, over all data up to each of its calls.

    Args:
        model: The float model.
        batches: What ``forward`` takes.
        forward: Runs one batch.

    Raises:
        ValueError: If there are no batches, or one gives a batch norm a NaN or an infinity.
    """
    moments: dict[str, list[Moments]] = {}
    _listen(model, batches, forward, lambda name, norm, found: moments.setdefault(name, []).append(found))
    return moments


def retune_batch_norm_(
    model: nn.Module,
    exact: Mapping[str, list[Moments]],
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any] = call,
) -> None:
    """Change the running statistics of batch norms as quantization changed what enters them, in place.

    Means move by the difference to the float model, and variances by the quotient: the statistics need not be those of
    the calibration data. If it fails, they are as before.

    Args:
        model: The quantized model. Each batch norm is changed before it computes, so that those behind it see that.
        exact: What :func:`batch_norm_moments` returned for the float model, with the same batches.
        batches: What ``forward`` takes.
        forward: Runs one batch.

    Raises:
        ValueError: If there are no batches, or one gives a batch norm a NaN or an infinity.
    """
    norms = {name: part for name, part in _with_statistics(model).items() if name in exact}
    before = [(buffer, buffer.clone()) for part in norms.values() for buffer in part.buffers()]
    first = {name: _running(part) for name, part in norms.items()}
    calls: Counter[str] = Counter()

    def move(name: str, norm: _BatchNorm, found: Moments) -> None:
        # The quantized model may call it more often, if it routes by what it computes.
        wanted = exact[name][min(calls[name], len(exact[name]) - 1)]
        calls[name] += 1
        # A constant channel has no quotient.
        quotient = torch.where(wanted.variance > 0, found.variance / wanted.variance, 1.0)
        cast("Tensor", norm.running_mean).copy_(first[name].mean + (found.mean - wanted.mean))
        cast("Tensor", norm.running_var).copy_(first[name].variance * quotient)

    try:
        _listen(
            model,
            batches,
            forward,
            lambda name, norm, found: move(name, norm, found) if name in norms else None,
        )
    except BaseException:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)
        raise


def _with_statistics(model: nn.Module) -> dict[str, _BatchNorm]:
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, _BatchNorm) and _has_statistics(part)
    }


def _running(norm: _BatchNorm) -> Moments:
    return Moments(cast("Tensor", norm.running_mean).double(), cast("Tensor", norm.running_var).double())


def _listen(
    model: nn.Module,
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
    tell: Callable[[str, _BatchNorm, Moments], object],
) -> None:
    """Run a model in evaluation mode and tell the moments of what enters its batch norms, before they compute."""
    sums: dict[str, tuple[int, Tensor, Tensor]] = {}

    def measure(name: str, norm: _BatchNorm, values: Tensor) -> None:
        channels = values.detach().transpose(0, 1).flatten(1).double()
        count, total, squares = sums.get(name, (0, 0, 0))
        count += channels.shape[1]
        total, squares = total + channels.sum(1), squares + channels.square().sum(1)
        sums[name] = count, total, squares
        mean = total / count
        if not bool(squares.isfinite().all()):
            raise ValueError(
                f"A calibration batch gives `{name}` an input with NaN or infinite values. Take such batches out."
            )
        tell(name, norm, Moments(mean, (squares / count - mean.square()).clamp(min=0)))

    with ExitStack() as hooks:
        for name, norm in _with_statistics(model).items():
            # Bound here, because hooks are only told of the module.
            def hook(module: nn.Module, args: Any, name: str = name) -> None:
                measure(name, cast("_BatchNorm", module), args[0])

            hooks.callback(norm.register_forward_pre_hook(hook).remove)
        run_batches(model, batches, forward)
