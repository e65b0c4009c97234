"""The seam to Lightning: the one module that imports it, and the one that touches its private parts.

Lightning comes under two names, ``lightning.pytorch`` and ``pytorch_lightning``, whose classes are strangers
to each other: a LightningCLI refuses a callback built on the other name's base class. Our classes therefore
derive from the bases of every name *that the program has imported*.

Why not import both wherever both are installed? It would cost only about 0.2 s, but the second import
re-points the logger and the warning category that both share (``lightning_utilities.core.rank_zero``), so
that a user's ``logging.getLogger("lightning.pytorch").setLevel(...)`` would stop working. Importing this
package must not change another program's screen.

A name may be imported *after* us (import sorters put ``pytorch_lightning`` below ``lightning_memprec``). So
the bases are brought up to date at the two moments that precede any check of them: when one of our classes is
instantiated, and when a namespace's ``cli`` module is about to be imported.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from lightning.pytorch import Callback as _Callback
    from lightning.pytorch import LightningModule as LightningModule
    from lightning.pytorch import Trainer as Trainer

__all__ = [
    "TRANSFER_HOOKS",
    "CallbackBase",
    "adopt_namespaces",
    "end_run",
    "loaded_namespaces",
    "namespace_of",
    "overridden_data_hooks",
    "silent_logger",
    "train_loaders",
]

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

_NAMES = ("lightning.pytorch", "pytorch_lightning")
_CLI_NAMES = tuple(f"{name}.cli" for name in _NAMES)


def loaded_namespaces() -> list[ModuleType]:
    """Return the Lightning namespaces that the program uses.

    Returns:
        Those already imported; if there is none, the first that can be imported.

    Raises:
        ModuleNotFoundError: If Lightning is not installed.
    """
    # A namespace that is just being imported has no `Callback` yet.
    loaded = [sys.modules[name] for name in _NAMES if hasattr(sys.modules.get(name), "Callback")]
    if loaded:
        return loaded
    for name in _NAMES:
        try:
            return [importlib.import_module(name)]
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ModuleNotFoundError(
        "Callbacks need Lightning, which is not installed. Install it with: pip install lightning"
    )


if TYPE_CHECKING:
    CallbackBase = _Callback
else:

    class CallbackBase(*[namespace.Callback for namespace in loaded_namespaces()]):
        """A callback in every Lightning namespace that the program has imported."""

        def __new__(cls, *args: Any, **kwargs: Any) -> CallbackBase:
            """Take in a namespace that was imported since the class was made."""
            adopt_namespaces()
            return super().__new__(cls)


def adopt_namespaces() -> None:
    """Let :class:`CallbackBase` derive from every Lightning namespace imported by now."""
    bases = tuple(namespace.Callback for namespace in loaded_namespaces())
    if set(bases) - set(CallbackBase.__bases__):
        CallbackBase.__bases__ = bases


class _CLIWatch:
    """An import finder that finds nothing, but takes in a namespace before its LightningCLI is made."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in _CLI_NAMES:
            adopt_namespaces()


sys.meta_path.insert(0, _CLIWatch)  # type: ignore[arg-type]


def namespace_of(trainer: Any) -> ModuleType:
    """Return the Lightning namespace that a Trainer, or a subclass of one, comes from."""
    for namespace in loaded_namespaces():
        if isinstance(trainer, namespace.Trainer):
            return namespace
    raise TypeError(f"Expected a Lightning Trainer, got {type(trainer).__qualname__}.")


def train_loaders(trainer: Any) -> Any:
    """Return the train loader, or the tree of loaders, that ``trainer.fit`` will use.

    A loader that the Trainer has made already is returned as it is; otherwise the user's ``train_dataloader``
    hook is called, as ``reload_dataloaders_every_n_epochs`` would.

    Args:
        trainer: A Trainer inside ``fit``.
    """
    fit_loop = trainer.fit_loop
    if fit_loop._combined_loader is not None:
        return fit_loop._combined_loader
    return fit_loop._data_source.dataloader()


def overridden_data_hooks(datamodule: Any) -> list[str]:
    """List the batch transfer hooks that a data module brings along; Lightning prefers them to the module's.

    Args:
        datamodule: A LightningDataModule of either namespace, or ``None``.
    """
    for namespace in loaded_namespaces():
        base = namespace.LightningDataModule
        if isinstance(datamodule, base):
            kind = type(datamodule)
            return [name for name in TRANSFER_HOOKS if getattr(kind, name) is not getattr(base, name)]
    return []


def end_run(trainer: Any) -> Exception:
    """Return the exception that ends ``trainer.fit`` at once and in good order.

    It is the one with which Lightning's own tuners stop; the Trainer tears down and ``fit`` returns normally.
    """
    module = importlib.import_module(f"{namespace_of(trainer).__name__}.utilities.exceptions")
    error: Exception = module._TunerExitException()
    return error


def silent_logger(trainer: Any) -> Any:
    """Return a logger of the Trainer's namespace that drops everything."""
    module = importlib.import_module(f"{namespace_of(trainer).__name__}.loggers.logger")
    return module.DummyLogger()
