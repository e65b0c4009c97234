"""Exchange modules inside a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

__all__ = ["swap"]


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
