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
    from collections.abc import Callable
    from types import ModuleType

    from lightning.pytorch import Callback as _Callback
    from lightning.pytorch import LightningModule as LightningModule
    from lightning.pytorch import Trainer as Trainer
    from lightning.pytorch.plugins import HalfPrecision as _HalfPrecision

__all__ = [
    "TRANSFER_HOOKS",
    "CallbackBase",
    "PrecisionBase",
    "adopt_namespaces",
    "clips_with_torch",
    "end_run",
    "hold_step_schedulers",
    "loaded_namespaces",
    "logged_step",
    "misconfiguration",
    "namespace_of",
    "overridden_data_hooks",
    "overrides_clipping",
    "precision_class",
    "raw_optimizer",
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


def _half_precision(namespace: ModuleType) -> type:
    # Why `HalfPrecision`: `isinstance` checks of Lightning, such as ThroughputMonitor's, then know our dtype.
    kind: type = importlib.import_module(f"{namespace.__name__}.plugins").HalfPrecision
    return kind


if TYPE_CHECKING:
    PrecisionBase = _HalfPrecision
else:

    class PrecisionBase(*[_half_precision(namespace) for namespace in loaded_namespaces()]):
        """A half-precision plugin in every Lightning namespace that the program has imported.

        Methods of Lightning that look at a module or a Trainer only know those of their own namespace: call
        them through :func:`precision_class`, not through ``super()``.
        """

        def __new__(cls, *args: Any, **kwargs: Any) -> PrecisionBase:
            """Take in a namespace that was imported since the class was made."""
            adopt_namespaces()
            return super().__new__(cls)


def adopt_namespaces() -> None:
    """Let our base classes derive from every Lightning namespace imported by now."""
    namespaces = loaded_namespaces()
    for base, kinds in (
        (CallbackBase, [namespace.Callback for namespace in namespaces]),
        (PrecisionBase, [_half_precision(namespace) for namespace in namespaces]),
    ):
        if set(kinds) - set(base.__bases__):
            base.__bases__ = tuple(kinds)


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


def precision_class(module: Any) -> Any:
    """Return Lightning's HalfPrecision class of the namespace that a LightningModule comes from."""
    for namespace in loaded_namespaces():
        if isinstance(module, namespace.LightningModule):
            return _half_precision(namespace)
    raise TypeError(f"Expected a LightningModule, got {type(module).__qualname__}.")


def raw_optimizer(optimizer: Any) -> Any:
    """Return the user's optimizer inside the wrapper that ``self.optimizers()`` gives."""
    for namespace in loaded_namespaces():
        wrapper = importlib.import_module(f"{namespace.__name__}.core.optimizer").LightningOptimizer
        if isinstance(optimizer, wrapper):
            return optimizer.optimizer
    return optimizer


def misconfiguration(trainer: Any, message: str) -> Exception:
    """Return the MisconfigurationException of a Trainer's namespace."""
    module = importlib.import_module(f"{namespace_of(trainer).__name__}.utilities.exceptions")
    error: Exception = module.MisconfigurationException(message)
    return error


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


def clips_with_torch(plugin: Any) -> bool:
    """Tell whether a precision plugin clips by norm as Lightning's base class does, with torch's function."""
    bases = [
        importlib.import_module(f"{namespace.__name__}.plugins.precision").Precision
        for namespace in loaded_namespaces()
    ]
    return any(type(plugin).clip_grad_by_norm is base.clip_grad_by_norm for base in bases)


def overrides_clipping(module: Any) -> bool:
    """Tell whether a LightningModule clips its gradients in its own way."""
    return not any(
        type(module).configure_gradient_clipping is namespace.LightningModule.configure_gradient_clipping
        for namespace in loaded_namespaces()
    )


def logged_step(trainer: Any) -> int:
    """Return the step under which Lightning's own metrics are logged at this moment of ``fit``."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def hold_step_schedulers(trainer: Any, held: Callable[[], bool]) -> Callable[[], None]:
    """Keep schedulers that Lightning steps with the optimizer where they are while ``held`` says so.

    Args:
        trainer: A Trainer inside ``fit``.
        held: Called before each update of the schedulers.

    Returns:
        A function that undoes this.
    """
    loop = trainer.fit_loop.epoch_loop
    update = loop.update_lr_schedulers

    def update_unless_held(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step" or not held():
            update(interval, update_plateau_schedulers=update_plateau_schedulers)

    def undo() -> None:
        vars(loop).pop("update_lr_schedulers", None)

    loop.update_lr_schedulers = update_unless_held
    return undo


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
