"""Which modules of a model are sharded on their own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["chosen_modules", "repeated_blocks"]


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, such as the layers of a transformer or the stages of a ResNet.

    A block is an element of a ``ModuleList`` or ``Sequential`` that holds at least two modules of one class, if it has
    parameters and modules of its own. Blocks inside a block do not count.

    Args:
        module: The model.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
        >>> len(repeated_blocks(nn.Sequential(nn.Embedding(4, 8), nn.TransformerEncoder(layer, 3))))
        3
    """
    return list(_blocks(module))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    for child in children:
        alike = sum(type(other) is type(child) for other in children)
        if is_list and alike > 1 and any(True for _ in child.children()) and _has_parameters(child):
            yield child
        else:
            yield from _blocks(child)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def chosen_modules(module: nn.Module, class_names: tuple[str, ...] | None) -> list[nn.Module]:
    """Return the modules of the named classes, inner ones first; the repeated blocks if none is named.

    Args:
        module: The model; it is never chosen itself.
        class_names: Names of classes, or ``None``.

    Raises:
        ValueError: If no module is of one of the classes.
    """
    if class_names is None:
        return repeated_blocks(module)
    children = [child for child in module.modules() if child is not module]
    for name in class_names:
        if not any(type(child).__name__ == name for child in children):
            known = sorted({type(child).__name__ for child in children})
            raise ValueError(f"`wrap` names {name!r}, but the model has only: {', '.join(known)}.")
    return [child for child in reversed(children) if type(child).__name__ in class_names]
