"""Plain values out of files, read into frozen dataclasses. Every value is checked: a file may hold anything."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["MOST_ITEMS", "check_version", "optional_of", "plain_fields", "read_json", "read_plain"]

# Sizes are 64-bit in every allocator, and other programs read JSON's integers as such.
_LIMIT = 2**63
# More than any estimate has: a timeline is thinned to some hundred points, a model of 10,000 modules is large.
MOST_ITEMS = 100_000


def read_json(path: Path, most_bytes: int) -> Any:
    """Read a JSON file in UTF-8, UTF-16 or UTF-32, with or without a byte order mark.

    Args:
        path: The file.
        most_bytes: The largest size that is read; devices and pipes, which have none, are read so far only.

    Raises:
        ValueError: If the file is larger, or is no JSON.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(
            f"{str(path)!r} is larger than {most_bytes} bytes, so it is no report. Check the path."
        )
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is no JSON: {error}. Check the path.") from error


def check_version(values: Any, version: int, where: str) -> None:
    """Refuse values of another version than the one that is known.

    Args:
        values: What was read.
        version: The version that can be read.
        where: What the values are, for messages.

    Raises:
        ValueError: If the values are no mapping or name another version, or none.

    Example:
        >>> check_version({"schema_version": 2}, 1, "estimate")
        Traceback (most recent call last):
        ValueError: `estimate` has `schema_version` 2, and this version of lightning-memprec reads 1. Update it.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"`{where}` must be an object, got {_shown(values)}.")
    found = values.get("schema_version")
    if type(found) is int and found > version:
        raise ValueError(
            f"`{where}` has `schema_version` {found}, and this version of lightning-memprec reads {version}. Update it."
        )
    if type(found) is not int or found != version:
        raise ValueError(
            f"`{where}` must have `schema_version` {version}, got {_shown(found)}. Write it anew with this version."
        )


def plain_fields(cls: type, names: Mapping[str, Any] | None = None) -> list[tuple[Field[Any], Any]]:
    """List the fields of a dataclass with their types.

    Args:
        cls: The dataclass.
        names: Types that its module imports for type checkers only.
    """
    hints = get_type_hints(cls, localns=dict(names or {}))
    return [(f, hints[f.name]) for f in fields(cls)]


def optional_of(kind: Any) -> Any:
    """Return ``T`` of ``T | None``; ``None`` of any other type.

    Example:
        >>> optional_of(int | None), optional_of(int)
        (<class 'int'>, None)
    """
    if get_origin(kind) not in (Union, types.UnionType):
        return None
    (inner,) = (part for part in get_args(kind) if part is not type(None))
    return inner


def read_plain(
    kind: Any,
    value: Any,
    where: str,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    names: Mapping[str, Any] | None = None,
) -> Any:
    """Turn plain values into what a type says, or say where they do not.

    Args:
        kind: A dataclass, ``tuple[T, ...]``, ``T | None``, ``Literal``, ``int``, ``float``, ``bool`` or ``str``.
        value: What was read. Of a mapping, keys that are no fields are passed over.
        where: Path to the value, for messages.
        minimum: Smallest number; by default 0 for an integer. A dataclass sets one for a field by
            ``metadata={"minimum": …}``.
        maximum: Largest number; by default 2^63 - 1 for an integer. Set likewise.
        names: As for :func:`plain_fields`.

    Raises:
        ValueError: If a value is missing, of another type or out of bounds; the message names its path.

    Example:
        >>> read_plain(tuple[int, ...], [1, -2], "sizes")
        Traceback (most recent call last):
        ValueError: `sizes[1]` must be an integer from 0 to 2^63 - 1, got -2.
    """
    inner = optional_of(kind)
    if inner is not None:
        return None if value is None else read_plain(inner, value, where, minimum=minimum, maximum=maximum)
    if is_dataclass(kind):
        return _read_dataclass(kind, value, where, names)
    if get_origin(kind) is tuple:
        return _read_tuple(get_args(kind)[0], value, where)
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise ValueError(f"`{where}` must be one of {list(get_args(kind))}, got {_shown(value)}.")
        return value
    return _read_scalar(kind, value, where, minimum, maximum)


def _read_dataclass(cls: Any, value: Any, where: str, names: Mapping[str, Any] | None) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"`{where}` must be an object, got {_shown(value)}.")
    found = {}
    for field, kind in plain_fields(cls, names):
        path = f"{where}.{field.name}"
        if field.name in value:
            bounds = {name: field.metadata.get(name) for name in ("minimum", "maximum")}
            found[field.name] = read_plain(kind, value[field.name], path, **bounds)
        elif field.default is MISSING:
            raise ValueError(f"`{path}` is missing.")
    return cls(**found)


def _read_tuple(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"`{where}` must be a list, got {_shown(value)}.")
    if len(value) > MOST_ITEMS:
        raise ValueError(f"`{where}` must have at most {MOST_ITEMS} entries, got {len(value)}.")
    return tuple(read_plain(kind, item, f"{where}[{i}]") for i, item in enumerate(value))


def _read_scalar(kind: Any, value: Any, where: str, minimum: int | None, maximum: int | None) -> Any:
    if kind is int:
        return _read_integer(value, where, minimum or 0, _LIMIT - 1 if maximum is None else maximum)
    if kind is float:
        return _read_number(value, where, minimum, maximum)
    if type(value) is not kind:
        words = {str: "text", bool: "true or false"}
        raise ValueError(f"`{where}` must be {words[kind]}, got {_shown(value)}.")
    return value


def _read_integer(value: Any, where: str, minimum: int, maximum: int) -> int:
    if type(value) is not int or not minimum <= value <= maximum:
        words = {-_LIMIT: "-2^63", _LIMIT - 1: "2^63 - 1"}
        low, high = words.get(minimum, minimum), words.get(maximum, maximum)
        raise ValueError(f"`{where}` must be an integer from {low} to {high}, got {_shown(value)}.")
    return value


def _read_number(value: Any, where: str, minimum: int | None, maximum: int | None) -> float:
    low = -sys.float_info.max if minimum is None else minimum
    high = sys.float_info.max if maximum is None else maximum
    # JSON's integers have any length: one beyond the largest float cannot be made one.
    if type(value) not in (int, float) or not low <= value <= high:
        bounds = "" if minimum is None or maximum is None else f" from {minimum} to {maximum}"
        raise ValueError(f"`{where}` must be a finite number{bounds}, got {_shown(value)}.")
    return float(value)


def _shown(value: Any) -> str:
    """Write a value short enough for a message."""
    text = repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
