"""A change as something to paste: lines of Python, and the overlay of a LightningCLI configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Code", "instance", "setting"]

_WIDTH = 88
# The namespace that the expressions below are written for; replaced where the program uses the other one alone.
_LIGHTNING = "lightning.pytorch"


@dataclass(frozen=True)
class Code:
    """What to write for a change.

    Args:
        trainer: Arguments of the Trainer by name, each as a Python expression and as a value of the configuration.
        statements: Python that acts on ``model``, before the Trainer is made; a configuration has no place for it.
        imports: What the expressions and statements need.
        remarks: What is to be changed elsewhere, in words.
    """

    trainer: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    statements: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def __or__(self, other: Code) -> Code:
        return Code(
            {**self.trainer, **other.trainer},
            self.statements + other.statements,
            self.imports + other.imports,
            self.remarks + other.remarks,
        )

    def python(self) -> str:
        """Write it as lines of Python.

        Example:
            >>> print(setting("accumulate_grad_batches", 4).python())
            from lightning.pytorch import Trainer
            <BLANKLINE>
            trainer = Trainer(accumulate_grad_batches=4)  # and your other arguments
        """
        body = [f"# {remark}" for remark in self.remarks] + list(self.statements)
        imports = set(self.imports)
        if self.trainer:
            imports.add(f"from {_LIGHTNING} import Trainer")
            body += _call([f"{name}={expression}" for name, (expression, _) in self.trainer.items()])
        return _in_namespace("\n".join([*sorted(imports, key=_import_order), *[""] * bool(imports), *body]))

    def yaml(self) -> str:
        """Write it as YAML that a LightningCLI lays over its configuration; what has no place in it as comments.

        Example:
            >>> print(setting("accumulate_grad_batches", 4).yaml())
            trainer:
              accumulate_grad_batches: 4
        """
        lines = [f"# {remark}" for remark in self.remarks]
        lines += [f"# In Python: {line}" for line in self.statements]
        if self.trainer:
            lines += _yaml({"trainer": {name: value for name, (_, value) in self.trainer.items()}}, "")
        return _in_namespace("\n".join(lines))


def setting(name: str, value: str | int) -> Code:
    """Return a plain argument of the Trainer."""
    return Code({name: (json.dumps(value), value)})


def instance(
    name: str, class_path: str, arguments: Mapping[str, tuple[str, Any]], imports: tuple[str, ...] = ()
) -> Code:
    """Return an argument of the Trainer that is an instance of a class.

    Args:
        name: The argument.
        class_path: Where the class is imported from.
        arguments: Arguments of the class by name, each as a Python expression and as a value of the configuration.
        imports: What the expressions need beside the class.
    """
    module, _, class_name = class_path.rpartition(".")
    call = f"{class_name}({', '.join(f'{key}={expression}' for key, (expression, _) in arguments.items())})"
    values = {"class_path": class_path, "init_args": {key: value for key, (_, value) in arguments.items()}}
    return Code({name: (call, values)}, imports=(f"from {module} import {class_name}", *imports))


def _call(arguments: list[str]) -> list[str]:
    line = f"trainer = Trainer({', '.join(arguments)})  # and your other arguments"
    if len(line) <= _WIDTH:
        return [line]
    return [
        "trainer = Trainer(",
        *[f"    {argument}," for argument in arguments],
        "    # and your other arguments",
        ")",
    ]


def _import_order(line: str) -> tuple[bool, str]:
    return not line.startswith("import "), line


def _yaml(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"{indent}{key}:"
            for item in value:
                first, *rest = _yaml(item, indent + "    ")
                yield f"{indent}  - {first.strip()}"
                yield from rest
        else:
            # JSON is YAML, and its quotes keep "16-mixed" and "null" apart from numbers and nothing.
            yield f"{indent}{key}: {json.dumps(value)}"


def _in_namespace(text: str) -> str:
    """Name the Lightning that the program imported."""
    if "pytorch_lightning" in sys.modules and _LIGHTNING not in sys.modules:
        return text.replace(_LIGHTNING, "pytorch_lightning")
    return text
