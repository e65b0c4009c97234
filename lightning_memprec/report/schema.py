"""The JSON Schema of a report, made from the types of its dataclasses.

``report.schema.json`` beside this file is what :func:`report_schema` returns; the module, run as a program,
writes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from lightning_memprec._plain import MOST_ITEMS, optional_of, plain_fields
from lightning_memprec.memory.result import SCHEMA_VERSION, MemoryEstimate, Remedy
from lightning_memprec.report.file import VERSION
from lightning_memprec.report.verdict import Verdict

__all__ = ["SCHEMA_FILE", "report_schema"]

SCHEMA_FILE = Path(__file__).with_name("report.schema.json")

_SCALARS = {str: {"type": "string"}, bool: {"type": "boolean"}, float: {"type": "number"}}
_LARGEST = 2**63 - 1


def report_schema() -> dict[str, Any]:
    """Return the schema (JSON Schema 2020-12) of what ``report_as_dict`` returns."""
    estimate = _object(MemoryEstimate, {"MemoryEvents": Any})
    del estimate["properties"]["events"]
    estimate["properties"] |= {
        "schema_version": {"const": SCHEMA_VERSION},
        "peak_device_bytes": _integer(0),
        "minimum_device_bytes": _integer(0),
    }
    estimate["required"].insert(0, "schema_version")
    verdict = _object(Verdict)
    verdict["properties"]["headroom_bytes"] = {"anyOf": [_integer(-(2**63)), {"type": "null"}]}
    properties = {
        "version": {"const": VERSION},
        "verdict": verdict,
        "estimate": {"anyOf": [estimate, {"type": "null"}]},
        "remedies": _type(tuple[Remedy, ...]),
        "notes": _type(tuple[str, ...]),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Memory report of lightning_memprec",
        "description": "Names that end in _bytes are sizes in bytes.",
        "type": "object",
        "properties": properties,
        "required": ["version", "verdict", "estimate"],
    }


def _object(cls: Any, names: dict[str, Any] | None = None) -> dict[str, Any]:
    found = plain_fields(cls, names)
    return {
        "type": "object",
        "properties": {f.name: _type(kind, f.metadata) for f, kind in found},
        "required": [f.name for f, _ in found if f.default is MISSING],
    }


def _type(kind: Any, bounds: Mapping[str, int] | None = None) -> dict[str, Any]:
    inner = optional_of(kind)
    if inner is not None:
        return {"anyOf": [_type(inner, bounds), {"type": "null"}]}
    if is_dataclass(kind):
        return _object(kind)
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _type(get_args(kind)[0]), "maxItems": MOST_ITEMS}
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    return {**(_integer(0) if kind is int else _SCALARS.get(kind, {})), **(bounds or {})}


def _integer(minimum: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": minimum, "maximum": _LARGEST}


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(report_schema(), indent=2) + "\n", encoding="utf-8")
