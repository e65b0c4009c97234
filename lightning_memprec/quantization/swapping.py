"""Build int8 modules and put them into a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_memprec.quantization.affine import Quantized
from lightning_memprec.quantization.modules.base import SharedBuffers
from lightning_memprec.quantization.targets import Target

__all__ = ["build_layers", "swap"]


def build_layers(
    targets: list[Target], weights: Mapping[str, Mapping[str, Quantized]]
) -> dict[str, nn.Module]:
    """Build the replacements of targets; weights that are one tensor stay one tensor where they are packed.

    Args:
        targets: What to replace.
        weights: Quantized matrices by target and weight name.

    Returns:
        Modules by target.
    """
    layers: dict[str, nn.Module] = {}
    first: dict[int, Tensor] = {}
    for target in targets:
        layers[target.name] = target.build(dict(weights[target.name]))
        for key, quantized in weights[target.name].items():
            owner, _, name = key.rpartition(".")
            part = layers[target.name].get_submodule(owner)
            if isinstance(part, SharedBuffers) and f"{name}_packed" in part._buffers:
                part._buffers[f"{name}_packed"] = first.setdefault(id(quantized.values), part.stored(name))
    return layers


def swap(root: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Put replacements at every place where a module hangs, with its mode and the hooks that users put on it.

    Args:
        root: The model, changed in place.
        replacements: New modules, by the ``id`` of those they replace.
    """
    for parent in list(root.modules()):
        replaced = False
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in replacements:
                replacement = replacements[id(child)]
                _take_hooks(child, replacement)
                parent._modules[name] = replacement
                replaced = True
        if replaced:
            _leave_fast_path(parent)
    for part in root.modules():
        if isinstance(part, nn.TransformerEncoder) and not all(
            getattr(layer, "activation_relu_or_gelu", 1) for layer in part.layers
        ):
            part.use_nested_tensor = False


def _take_hooks(module: nn.Module, replacement: nn.Module) -> None:
    replacement.training = module.training
    for name in vars(nn.Module()):
        if "_hook" in name and "state_dict" not in name:
            replacement.__dict__[name] = module.__dict__[name]


def _leave_fast_path(parent: nn.Module) -> None:
    # These read `linear1.weight` and the like of their children, which are int8 now.
    if isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0
