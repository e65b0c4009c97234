"""Find where the factors of smoothing can go: into the layer before, if it can be shown that the model stays the same.

Dividing channel ``j`` of a producer's output by ``s_j`` and multiplying column ``j`` of the linear layers behind it by
``s_j`` changes nothing if every channel passes from one to the other by itself and in proportion: a norm and the
projections that read it, the value and the output projection of an attention, two layers with a ReLU or a gate between.
Not so with a GELU, or if something else reads the producer as well. No list of architectures decides: the smallest part
of the model that holds both is run again with random powers of two for ``s``, for which floating point is exact, and
must answer with the same bits.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memprec.quantization.measure import run_batches

__all__ = ["Pair", "fold", "parameters_of", "proven_pairs", "restore"]

_SEED = 0
_LARGEST = 2  # Probes scale by 2^-2 to 2^2: far from what overflows.

Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Pair:
    """A layer that can take factors, and those behind it.

    Attributes:
        producer: Name of a norm or a linear layer.
        readers: Names of the linear layers that read it.
    """

    producer: str
    readers: tuple[str, ...]


def fold(model: nn.Module, pair: Pair, factors: Tensor) -> None:
    """Divide the producer's channels and multiply the readers' columns, in place.

    Args:
        model: The float model.
        pair: The layers.
        factors: Larger than 0, ``[channels]``.
    """
    producer = model.get_submodule(pair.producer)
    for parameter in producer._parameters.values():
        if parameter is not None:
            parameter.div_(factors.view(-1, *[1] * (parameter.dim() - 1)))
    for name in pair.readers:
        model.get_submodule(name).weight.mul_(factors)  # type: ignore[operator, union-attr]


def parameters_of(model: nn.Module, pairs: Sequence[Pair]) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters of pairs with copies of their values, for :func:`restore`."""
    names = {name for pair in pairs for name in (pair.producer, *pair.readers)}
    return [(p, p.detach().clone()) for name in sorted(names) for p in model.get_submodule(name).parameters()]


def restore(before: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give parameters the values they had."""
    with torch.no_grad():
        for parameter, values in before:
            parameter.copy_(values)


def proven_pairs(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Sequence[Any], forward: Forward
) -> list[Pair]:
    """Return pairs for which the model stays the same, each reader once.

    Args:
        model: The float model; it is as before when this returns.
        layers: Layers whose inputs are to be smoothed, by name. Linear ones are looked at.
        batches: Calibration batches; the first proves.
        forward: Runs one batch.
    """
    linear = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
    first = list(batches[:1])
    candidates = [
        pair for pair in _candidates(model, linear, first, forward) if _owns_its_weights(model, pair)
    ]
    proven: list[Pair] = []
    for pair in _Prober(model, candidates).run(first, forward):
        # Several linear layers in a row could all take the factors of the last.
        if not any(set(pair.readers) & set(other.readers) for other in proven):
            proven.append(pair)
    return proven


def _candidates(
    model: nn.Module, linear: Mapping[str, nn.Module], batches: Sequence[Any], forward: Forward
) -> list[Pair]:
    """Pair what gave a tensor with all layers that were given it, else with linear layers beside them."""
    names = {module: name for name, module in model.named_modules()}
    calls: Counter[str] = Counter()
    given: dict[int, tuple[Any, str]] = {}
    groups: list[tuple[Any, list[str], list[str]]] = []

    def note_output(module: nn.Module, args: Any, output: Any) -> None:
        calls[names[module]] += 1
        if isinstance(output, Tensor):
            given[id(output)] = ref(output), names[module]

    def note_input(module: nn.Module, args: Any, kwargs: Any) -> None:
        values = args[0] if args else next(iter(kwargs.values()))
        if groups and groups[-1][0]() is values:
            groups[-1][2].append(names[module])
            return
        found = given.get(id(values))
        gave = [found[1]] if found is not None and found[0]() is values else None
        groups.append((ref(values), gave or _beside(model, names[module], calls), [names[module]]))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if _channels(module) is not None:
                hooks.callback(module.register_forward_hook(note_output).remove)
            if name in linear:
                hooks.callback(module.register_forward_pre_hook(note_input, with_kwargs=True).remove)
        run_batches(model, batches, forward)
    pairs = [Pair(name, tuple(readers)) for _, producers, readers in groups for name in producers]
    return [pair for pair in pairs if _fits(model, pair, calls)]


def _fits(model: nn.Module, pair: Pair, calls: Counter[str]) -> bool:
    width = _channels(model.get_submodule(pair.producer))
    if width != model.get_submodule(pair.readers[0]).in_features:
        return False
    if any(calls[part] != 1 for part in (pair.producer, *pair.readers)):
        return False
    # A layer that this batch does not reach could read the producer with other data.
    around = model.get_submodule(_around(model, pair))
    unreached = (
        part for name, part in model.named_modules() if isinstance(part, nn.Linear) and not calls[name]
    )
    inside = set(around.modules())
    return not any(part.in_features == width and part in inside for part in unreached)


def _channels(module: nn.Module) -> int | None:
    """Return the channels of a norm's or a linear layer's output; ``None`` for others."""
    weight = module._parameters.get("weight")
    if weight is None or not weight.is_floating_point():
        return None
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if weight.dim() != 1 and not isinstance(module, nn.Linear):
        return None
    return weight.shape[0] if all(parameter.shape[:1] == weight.shape[:1] for parameter in own) else None


def _beside(model: nn.Module, reader: str, calls: Counter[str]) -> list[str]:
    """Name the linear layers of the same module that have been called."""
    parent = reader.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    children = model.get_submodule(parent).named_children()
    return [
        f"{prefix}{name}" for name, child in children if isinstance(child, nn.Linear) and calls[prefix + name]
    ]


def _owns_its_weights(model: nn.Module, pair: Pair) -> bool:
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    parts = [model.get_submodule(name) for name in (pair.producer, *pair.readers)]
    return all(
        "weight" in part._parameters and all(uses[id(parameter)] == 1 for parameter in part.parameters())
        for part in parts
    )


def _around(model: nn.Module, pair: Pair) -> str:
    """Return the name of the smallest module that holds a pair and can be called."""
    paths = [name.split(".")[:-1] for name in (pair.producer, *pair.readers)]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    while shared and isinstance(model.get_submodule(".".join(shared)), (nn.ModuleList, nn.ModuleDict)):
        shared.pop()
    return ".".join(shared)


class _Prober:
    """Runs parts of a model again, right after they ran, with factors folded in."""

    def __init__(self, model: nn.Module, pairs: Sequence[Pair]) -> None:
        self._model = model
        self._pairs = pairs
        self._around: dict[str, list[Pair]] = {}
        for pair in pairs:
            self._around.setdefault(_around(model, pair), []).append(pair)
        self._replaying = False
        self._arguments: dict[str, Any] = {}
        self._inputs: dict[str, Tensor] = {}
        self._same: dict[Pair, bool] = {}

    def run(self, batches: Sequence[Any], forward: Forward) -> list[Pair]:
        """Return the pairs that changed nothing, in their order."""
        readers = {pair.readers[0] for pair in self._pairs}
        with ExitStack() as hooks:
            # Bound here, because hooks are only told of the module.
            for name in readers:

                def note(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    self._inputs[name] = args[0] if args else next(iter(kwargs.values()))

                hooks.callback(
                    self._model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True).remove
                )
            for name in self._around:

                def begin(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    if not self._replaying:
                        self._keep(name, args, kwargs)

                def end(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                    if not self._replaying:
                        self._replay(name, module, output)

                part = self._model.get_submodule(name)
                hooks.callback(part.register_forward_pre_hook(begin, with_kwargs=True).remove)
                hooks.callback(part.register_forward_hook(end, with_kwargs=True).remove)
            run_batches(self._model, batches, forward)
        return [pair for pair in self._pairs if self._same.get(pair)]

    def _keep(self, name: str, args: Any, kwargs: Any) -> None:
        try:
            # A copy, because a call may change what it is given, such as a cache of keys and values.
            self._arguments[name] = copy.deepcopy((args, kwargs))
        except Exception:  # What cannot be copied is not run again, so nothing is proven.
            self._arguments.pop(name, None)

    def _replay(self, name: str, module: nn.Module, output: Any) -> None:
        kept = self._arguments.pop(name, None)
        self._replaying = True
        try:
            for pair in self._around[name] if kept is not None else ():
                self._same[pair] = self._same.get(pair, True) and self._unchanged(pair, module, kept, output)
        finally:
            self._replaying = False
        for pair in self._around[name]:
            self._inputs.pop(pair.readers[0], None)

    def _unchanged(self, pair: Pair, module: nn.Module, kept: Any, output: Any) -> bool:
        before = self._inputs.get(pair.readers[0])
        if before is None or not bool(before.any()):
            return False
        generator = torch.Generator().manual_seed(_SEED)
        powers = torch.randint(-_LARGEST, _LARGEST + 1, before.shape[-1:], generator=generator)
        factors = torch.exp2(powers.float()).to(before)
        parameters, inputs = parameters_of(self._model, [pair]), dict(self._inputs)
        try:
            fold(self._model, pair, factors)
            args, kwargs = copy.deepcopy(kept)
            again = module(*args, **kwargs)
        except Exception:  # Whatever a model raises when it is called a second time.
            return False
        finally:
            restore(parameters)
            after, self._inputs = self._inputs[pair.readers[0]], inputs
        return torch.equal(after, before / factors) and _equal(again, output)


def _equal(first: Any, second: Any) -> bool:
    ones, others = (
        [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)] for part in (first, second)
    )
    return 0 < len(ones) == len(others) and all(map(torch.equal, ones, others))
