"""Read a LightningCLI configuration without making a Trainer.

The configuration is parsed by the user's own LightningCLI, or by a plain one, so that class paths, links and
defaults mean what they mean in the run. It is stopped before it instantiates anything: a run for eight GPUs
can be planned where there is none.
"""

from __future__ import annotations

import importlib
import io
import sys
import warnings
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from lightning_memprec._lightning import loaded_namespaces
from lightning_memprec._optional import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

__all__ = ["RunConfig", "UsageError", "read_run_config"]


class UsageError(Exception):
    """The command cannot be carried out as it was given; the message says why."""


class _Parsed(BaseException):
    """Carries a LightningCLI out of its constructor, past any ``except Exception`` of the user's program."""

    def __init__(self, cli: Any) -> None:
        super().__init__()
        self.cli = cli


@dataclass(frozen=True)
class RunConfig:
    """A parsed run.

    Args:
        trainer: Arguments of the Trainer as plain values; classes stay ``{"class_path", "init_args"}``.
        build_model: Builds the LightningModule, on the device that is the default when it is called.
        build_data: Builds the LightningDataModule, or returns ``None`` if the run has none.
        optimizer: Builds the optimizer where the configuration sets it, else ``None``.
    """

    trainer: dict[str, Any]
    build_model: Callable[[], nn.Module]
    build_data: Callable[[], Any]
    optimizer: Callable[[Any], Optimizer] | None


def read_run_config(
    path: Path, *, cli: str | None, model: str | None, data: str | None, overrides: Sequence[str]
) -> RunConfig:
    """Parse a LightningCLI configuration.

    Args:
        path: YAML file, with or without the subcommand ``fit`` around it.
        cli: ``"package.module:name"`` of a LightningCLI subclass, or of a function that makes one.
        model: Class path of the LightningModule, where the file does not name it.
        data: Class path of the LightningDataModule, where the file does not name it.
        overrides: Arguments for the LightningCLI, such as ``"--trainer.precision=bf16-mixed"``.

    Raises:
        UsageError: If the file, a class or a value is wrong.
        ModuleNotFoundError: If jsonargparse is not installed (extra ``cli``).
    """
    require("jsonargparse", extra="cli", purpose="reading LightningCLI configurations")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"Cannot read the configuration `{path}`: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"The configuration `{path}` holds no settings. Write it as LightningCLI prints it.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as for a program started in this folder
    if not isinstance(content.get("fit", {}), dict):
        raise UsageError(f"`fit` in `{path}` holds no settings. Write it as LightningCLI prints it.")
    settings = content.get("fit", content)
    if cli is None:
        _check_classes(path, settings, {"model": model, "data": data}, overrides)
    start = _choose_cli(settings, cli=cli, model=model, data=data)
    # A file with subcommands belongs before the subcommand, one without belongs to it.
    files = ["--config", str(path)]
    with_fit = [*files, "fit", *overrides] if "fit" in content else ["fit", *files, *overrides]
    printed = io.StringIO()
    try:
        with _stopped_after_parsing(with_fit, [*files, *overrides]), redirect_stderr(printed):
            start()
    except _Parsed as parsed:
        sys.stderr.write(printed.getvalue())
        return _from_cli(parsed.cli)
    except SystemExit as error:
        # Before the error stands the usage, with every option of the Trainer.
        reason = printed.getvalue().partition("error: ")[2].strip()
        raise UsageError(f"`{path}` does not fit this LightningCLI. {reason}".rstrip()) from error
    raise UsageError(f"`{cli}` made no LightningCLI. Name a subclass of it, or a function that makes one.")


def _check_classes(
    path: Path, settings: dict[str, Any], given: dict[str, str | None], overrides: Sequence[str]
) -> None:
    """Refuse a configuration that leaves the classes to the program it was written for."""
    for name, class_path in given.items():
        section = settings.get(name)
        named = isinstance(section, str) or (isinstance(section, dict) and "class_path" in section)
        overridden = any(text.startswith((f"--{name}=", f"--{name}.class_path")) for text in overrides)
        needed = name == "model" or section is not None
        if needed and not (named or class_path or overridden):
            raise UsageError(
                f"`{path}` does not name the class of `{name}`: it was written for your own LightningCLI.\n"
                "Add `--cli MODULE:FUNCTION`, or `--model CLASS --data CLASS`."
            )


def _choose_cli(
    content: dict[str, Any], *, cli: str | None, model: str | None, data: str | None
) -> Callable[[], Any]:
    if cli is not None:
        start: Callable[[], Any] = _import(cli.replace(":", "."), "--cli")
        return start
    # A class named in the file is imported first, so that its Lightning namespace is the one that parses.
    section = content.get("model")
    named = section.get("class_path") if isinstance(section, dict) else section
    model_class = _import(model, "--model") if model else None
    data_class = _import(data, "--data") if data else None
    known = model_class or (_import(named, "`model`") if isinstance(named, str) and "." in named else None)
    namespaces = loaded_namespaces()
    namespace = next(
        (n for n in namespaces if isinstance(known, type) and issubclass(known, n.LightningModule)),
        namespaces[0],
    )
    lightning_cli = importlib.import_module(f"{namespace.__name__}.cli").LightningCLI
    return lambda: lightning_cli(model_class, data_class)


def _import(path: str, where: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"Cannot import {path!r}, given by {where}: {error}.") from error


@contextmanager
def _stopped_after_parsing(with_fit: list[str], without_fit: list[str]) -> Iterator[None]:
    """Let every LightningCLI parse these arguments and then stop."""

    def parse_arguments(self: Any, parser: Any, args: Any) -> None:
        # A LightningCLI made with `run=False` has no subcommands.
        self.config = parser.parse_args(with_fit if hasattr(self, "_subcommand_parsers") else without_fit)

    def instantiate_classes(self: Any) -> None:
        raise _Parsed(self)

    replaced = {
        "parse_arguments": parse_arguments,
        "instantiate_classes": instantiate_classes,
        "_set_seed": lambda self: None,
    }
    classes = [importlib.import_module(f"{n.__name__}.cli").LightningCLI for n in loaded_namespaces()]
    saved = [(cls, name, getattr(cls, name)) for cls in classes for name in replaced]
    try:
        for cls, name, _ in saved:
            setattr(cls, name, replaced[name])
        yield
    finally:
        for cls, name, method in saved:
            setattr(cls, name, method)


def _from_cli(cli: Any) -> RunConfig:
    parser = cli._parser(cli.subcommand)
    config = cli.config.get(str(cli.subcommand), cli.config).clone()
    trainer = config.pop("trainer", None)

    def instantiate(*without: str) -> Any:
        part = config.clone()
        for name in without:
            part.pop(name, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations between jsonargparse and Lightning
            return parser.instantiate_classes(part)

    return RunConfig(
        trainer=trainer.as_dict() if trainer is not None else {},
        build_model=lambda: instantiate().get("model"),
        build_data=lambda: instantiate("model").get("data"),
        optimizer=_optimizer(cli, parser, config),
    )


def _optimizer(cli: Any, parser: Any, config: Any) -> Callable[[Any], Optimizer] | None:
    """Follow LightningCLI, which lets an optimizer in the configuration replace the module's own."""
    if not cli.auto_configure_optimizers:
        return None
    for key, (classes, target) in parser._optimizers.items():
        init = config.get(key)
        if target == "AUTOMATIC" and init:
            base = next(cls for cls in type(cli).__mro__ if cls.__name__ == "LightningCLI")
            module = importlib.import_module(base.__module__)
            if not isinstance(classes, tuple):
                init = module._global_add_class_path(classes, init)
            settings = init if isinstance(init, dict) else init.as_dict()
            return lambda parameters: module.instantiate_class(parameters, settings)
    return None
