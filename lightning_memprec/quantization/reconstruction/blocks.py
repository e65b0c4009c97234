"""The blocks of a model: the parts that repeat, such as transformer layers or residual blocks, and what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from lightning_memprec.quantization.targets import Target

__all__ = ["Block", "as_parameter", "find_blocks", "reason_not_to_learn", "single_layers"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Block:
    """A part of a model whose layers are quantized together.

    Attributes:
        name: Its name in the model.
        module: The part.
        targets: The layers in it that are quantized, in the order of the model.
    """

    name: str
    module: nn.Module
    targets: tuple[Target, ...]

    def parameter_name(self, target: Target, weight: str) -> str:
        """Return the name of a target's weight as a parameter of the block."""
        inside = target.name[len(self.name) :].lstrip(".") if target.module is not self.module else ""
        return f"{inside}.{weight}" if inside else weight


def find_blocks(model: nn.Module, targets: Sequence[Target]) -> list[Block]:
    """Find the blocks of a model, outermost first.

    Modules of one class that stand beside each other in an ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict``
    are blocks, and so is a module that is alone in one. A layer outside of all of these is a block of its own.

    Args:
        model: The model.
        targets: What is quantized.

    Returns:
        Blocks in the order of the model; each target is in exactly one.

    Example:
        >>> from lightning_memprec.quantization.modules.base import Scheme
        >>> from lightning_memprec.quantization.targets import find_targets
        >>> def layer():
        ...     return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(layer(), layer()), nn.Linear(8, 2))
        >>> targets, _ = find_targets(model, Scheme())
        >>> [(block.name, len(block.targets)) for block in find_blocks(model, targets)]
        [('0', 1), ('1.0', 3), ('1.1', 3), ('2', 1)]
    """
    return list(_visit("", model, {id(target.module): target for target in targets}, set()))


def _visit(name: str, module: nn.Module, targets: dict[int, Target], seen: set[int]) -> Iterator[Block]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if id(module) in targets:
        yield Block(name, module, (targets[id(module)],))
        return
    kinds = _repeated(module, targets)
    for key, child in module.named_children():
        inside = _targets_in(child, targets)
        path = f"{name}.{key}" if name else key
        if inside and type(child) in kinds and id(child) not in targets:
            if id(child) not in seen:
                seen.update(id(part) for part in child.modules())
                yield Block(path, child, inside)
        elif inside:
            yield from _visit(path, child, targets, seen)


def _targets_in(module: nn.Module, targets: dict[int, Target]) -> tuple[Target, ...]:
    return tuple(targets[id(part)] for part in module.modules() if id(part) in targets)


def _repeated(module: nn.Module, targets: dict[int, Target]) -> set[type[nn.Module]]:
    """Return the classes of which the children of a container are blocks."""
    if not isinstance(module, _CONTAINERS):
        return set()
    children = list(module.children())
    kinds = Counter(
        type(child) for child in children if not isinstance(child, _CONTAINERS) and id(child) not in targets
    )
    return {kind for kind, count in kinds.items() if count > 1 or len(children) == 1}


def single_layers(block: Block) -> list[Block]:
    """Take a block apart into its layers."""
    return [Block(target.name, target.module, (target,)) for target in block.targets]


def reason_not_to_learn(targets: Sequence[Target]) -> dict[str, str]:
    """Say why some targets cannot learn inside a block.

    A block is run with other weights in the place of its parameters. That reaches linear layers, convolutions and
    attention; recurrent layers keep a list of their weights, and embeddings only look rows up.

    Args:
        targets: What is quantized.

    Returns:
        Reasons by the name of the target; targets that learn are not in it.
    """
    uses = Counter(id(parameter) for target in targets for parameter in target.module.parameters())
    reasons = {}
    for target in targets:
        parameters = dict(target.module.named_parameters())
        if not target.weights or isinstance(
            target.module, (nn.Embedding, nn.RNNBase, nn.RNNCellBase, _ConvTransposeNd)
        ):
            reasons[target.name] = "only linear layers, convolutions and attention learn"
        elif not target.weights.keys() <= parameters.keys():
            reasons[target.name] = "its weight is parametrized"
        elif any(uses[id(parameters[key])] > 1 for key in target.weights):
            reasons[target.name] = "its weight is tied to another layer's"
    return reasons


def as_parameter(target: Target, key: str, matrix: Tensor) -> Tensor:
    """Lay a matrix ``[channels, features]`` out as the parameter it came from.

    Args:
        target: The layer.
        key: Name of the weight.
        matrix: Values in the layout of ``target.weights[key]()``, any floating dtype.

    Returns:
        The same values in the shape and dtype of the parameter.
    """
    parameter = dict(target.module.named_parameters())[key]
    if parameter.dim() == 2 and target.weights[key]().stride() != parameter.stride():
        matrix = matrix.t()  # GPT-2's Conv1D keeps it transposed.
    return matrix.reshape(parameter.shape).to(parameter.dtype)
