"""The published schema is that of the code, and says what the reader says."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest

from lightning_memprec._units import GIB
from lightning_memprec.report import judge, read_report
from lightning_memprec.report.file import report_as_dict
from lightning_memprec.report.schema import SCHEMA_FILE, report_schema

from .estimates import HOSTILE, REMEDIES, small_estimate

TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def accepts(schema, value):
    """Check a value against the part of JSON Schema that the file uses."""
    unknown = set(schema) - {
        "$schema", "title", "description", "type", "properties", "required", "items", "maxItems", "anyOf", "enum",
        "const", "minimum", "maximum",
    }  # fmt: skip
    assert not unknown
    if "anyOf" in schema:
        return any(accepts(choice, value) for choice in schema["anyOf"])
    if "const" in schema:
        return type(value) is type(schema["const"]) and value == schema["const"]
    if "enum" in schema:
        return isinstance(value, str) and value in schema["enum"]
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "number":
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        return type(value) in (int, float) and low <= value <= high
    if type(value) is not TYPES[kind]:
        return False
    if kind == "object":
        return all(name in value for name in schema["required"]) and all(
            accepts(part, value[name]) for name, part in schema["properties"].items() if name in value
        )
    if kind == "array":
        return len(value) <= schema["maxItems"] and all(accepts(schema["items"], item) for item in value)
    return True


@pytest.fixture(scope="module")
def report():
    estimate = small_estimate()
    few = {name: getattr(estimate, name)[:2] for name in ("timeline", "phases", "by_module", "assumptions")}
    estimate = replace(estimate, **few)  # Every value is tried below.
    verdict = judge(estimate.minimum_device_bytes, GIB, safety_margin=0.05)
    return json.loads(json.dumps(report_as_dict(estimate, verdict, REMEDIES, HOSTILE)))


def test_the_file_is_what_the_code_says():
    # After a change of a field: python -m lightning_memprec.report.schema
    assert json.loads(SCHEMA_FILE.read_text()) == report_schema()


@pytest.mark.parametrize("without", [None, "estimate"])
def test_reports_follow_the_schema(report, without):
    assert accepts(report_schema(), {**report, without: None} if without else report)


def paths(values, path=()):
    """List the paths to all values, of each list the first entry only."""
    yield path
    if isinstance(values, dict):
        for name, value in values.items():
            yield from paths(value, (*path, name))
    elif isinstance(values, list) and values:
        yield from paths(values[0], (*path, 0))


@pytest.mark.parametrize("wrong", [None, True, -(2**64), 1.5, "x", [], {}], ids=repr)
def test_schema_and_reader_agree_on_every_value(tmp_path, report, wrong):
    file = tmp_path / "report.json"
    schema = report_schema()
    verdicts = {True: 0, False: 0}
    for path in list(paths(report))[1:]:
        if path[-1] in ("headroom_bytes", "peak_device_bytes", "minimum_device_bytes"):
            continue  # Sums, which the reader makes itself.
        values = copy.deepcopy(report)
        at = values
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = wrong
        file.write_text(json.dumps(values))
        try:
            read_report(file)
            reads = True
        except ValueError:
            reads = False
        assert reads == accepts(schema, values), path
        verdicts[reads] += 1
    assert verdicts[False] > 20
