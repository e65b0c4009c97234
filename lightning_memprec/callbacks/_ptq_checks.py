"""What would spoil the export and can be known before the run: asked early, since a whole ``fit`` hangs on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_memprec.quantization.methods import resolve
from lightning_memprec.quantization.targets import find_targets

if TYPE_CHECKING:
    from torch import nn

    from lightning_memprec.callbacks.post_training_quantization import PostTrainingQuantization

__all__ = ["export_path", "first_problem", "mode_of", "path_problem"]

_FILES = (".safetensors", ".ckpt")  # Other names are folders.


def mode_of(trainer: Any, monitor: str) -> Literal["min", "max"] | None:
    """Return the mode in which a callback of the run monitors a metric, that of the checkpoints first.

    Args:
        trainer: The Trainer.
        monitor: Name of the metric.
    """
    for callback in (*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks):
        if getattr(callback, "monitor", None) == monitor:
            mode: Literal["min", "max"] = callback.mode
            return mode
    return None


def export_path(trainer: Any, dirpath: str | Path | None, filename: str) -> Path:
    """Return where the export goes.

    Args:
        trainer: The Trainer, from ``on_fit_start`` on; its checkpoint callback knows its folder by then.
        dirpath: The user's folder; by default that of the checkpoints, else the Trainer's root folder.
        filename: Name of the export.
    """
    if dirpath is None:
        dirpath = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
    return Path(dirpath) / filename


def first_problem(trainer: Any, module: nn.Module, options: PostTrainingQuantization) -> str:
    """Return why the path or the names of layers cannot be right, or nothing.

    Args:
        trainer: The Trainer in ``on_fit_start``.
        module: Its module, set up.
        options: The callback with the user's arguments.
    """
    problem = path_problem(export_path(trainer, options.dirpath, options.filename))
    return problem or _names_problem(module, options)


def path_problem(path: Path) -> str:
    """Return why an export cannot be written, or nothing; nothing is made or written.

    Args:
        path: A folder, or a file by its ending.

    Example:
        >>> path_problem(Path("/dev/null/int8"))
        "The export to '/dev/null/int8' cannot be written: '/dev/null' is a file. Choose another `dirpath`."
    """
    problem = ""
    if path.suffix in _FILES and path.is_dir():
        problem = f"{str(path)!r} is a folder"
    else:
        folder = path.parent if path.suffix in _FILES else path
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir():
            problem = f"{str(folder)!r} is a file"
        elif not os.access(folder, os.W_OK | os.X_OK):
            problem = f"{str(folder)!r} does not allow it"
    return problem and f"The export to {str(path)!r} cannot be written: {problem}. Choose another `dirpath`."


def _names_problem(module: nn.Module, options: PostTrainingQuantization) -> str:
    try:
        part = module.get_submodule(options.submodule or "")
    except AttributeError:
        children = ", ".join(name for name, _ in module.named_children())
        return f"`submodule={options.submodule!r}` is no part of the module. Its parts are: {children or 'none'}."
    try:
        find_targets(part, resolve(options.method, options.scheme).scheme, options.include, options.exclude)
    except ValueError as error:  # A name or pattern that matches nothing, or a part that is itself a layer.
        return f"`PostTrainingQuantization` finds other layers than it was told. {error}"
    return ""
