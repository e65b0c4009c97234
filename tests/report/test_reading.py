"""Reports read again: the same values back, and nothing else gets in."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lightning_memprec import MemoryEstimate
from lightning_memprec._units import GIB
from lightning_memprec.memory.result import LargestBatch
from lightning_memprec.report import format_estimate, format_html, judge, read_report, save_report
from lightning_memprec.report.file import report_as_dict
from lightning_memprec.report.rich_table import render_estimate

from .estimates import HOSTILE, REMEDIES, hostile_estimate, small_estimate


@pytest.fixture(scope="module")
def estimate():
    return small_estimate()


def verdict_of(estimate):
    verdict = judge(estimate.minimum_device_bytes, GIB, safety_margin=0.05, when="setup", reason="why")
    return replace(verdict, largest_batch=LargestBatch(64, GIB // 2, 32, None, 3))


@pytest.mark.parametrize(
    "make", [small_estimate, lambda: small_estimate("cpu"), hostile_estimate], ids=["gpu", "cpu", "hostile"]
)
def test_a_report_comes_back_as_it_was(tmp_path, make):
    estimate = make()
    path = tmp_path / "report.json"
    save_report(path, estimate, verdict_of(estimate), REMEDIES, HOSTILE)
    report = read_report(path)
    assert report.estimate == estimate
    assert report.estimate.events is None
    assert (report.verdict, report.remedies, report.notes) == (verdict_of(estimate), REMEDIES, HOSTILE)


def test_an_estimate_alone_comes_back(tmp_path, estimate):
    path = tmp_path / "estimate.json"
    path.write_text(json.dumps(estimate.to_dict()))
    report = read_report(path)
    assert (report.estimate, report.verdict) == (estimate, None)


def test_a_report_without_an_estimate_comes_back(tmp_path):
    save_report(tmp_path / "r.json", None, judge(None, None, reason="No batch came to hand."))
    assert read_report(tmp_path / "r.json").verdict.reason == "No batch came to hand."


def changed(values, path, value):
    values = copy.deepcopy(values)
    at = values
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("estimate", "schema_version"), 2, "has `schema_version` 2, and this version of lightning-memprec reads 1"),
        (("estimate", "schema_version"), 0, "must have `schema_version` 1, got 0. Write it anew"),
        (("estimate", "schema_version"), True, "got True"),
        (("estimate", "schema_version"), "1", "got '1'"),
        (("version",), 2, "has version '2', and this version of lightning-memprec reads 1"),
        (("version",), True, "has version 'True'"),
        (("estimate",), [], "`estimate` must be an object, got list"),
        (("estimate", "steps"), "2", r"`estimate.steps` must be an integer from 0 to 2\^63 - 1, got '2'"),
        (("estimate", "steps"), 2.0, "got 2.0"),
        (("estimate", "steps"), True, "got True"),
        (("estimate", "total_parameters"), -1, "got -1"),
        (("estimate", "total_parameters"), 2**63, "`estimate.total_parameters` must be an integer"),
        (("estimate", "breakdown", "activations_bytes"), None, "`estimate.breakdown.activations_bytes` must be an int"),
        (("estimate", "breakdown"), None, "`estimate.breakdown` must be an object, got None"),
        (("estimate", "timeline"), {}, "`estimate.timeline` must be a list, got dict"),
        (("estimate", "timeline", 3, "step"), -2, r"`estimate.timeline\[3\].step` must be an integer from -1"),
        (("estimate", "timeline"), [{}] * 100_001, "must have at most 100000 entries, got 100001"),
        (("estimate", "phases", 0), {"name": "setup"}, r"`estimate.phases\[0\].step` is missing"),
        (("estimate", "device"), 3, "`estimate.device` must be text, got 3"),
        (("estimate", "device"), "x" * 3, None),
        (("estimate", "host"), None, None),
        (("estimate", "unknown"), "x", None),
        (("estimate", "events"), {"order": [1]}, None),
        (("verdict", "status"), "great", r"`verdict.status` must be one of \['fits', 'tight'"),
        (("verdict", "status"), ["fits"], "got list"),
        (("verdict", "safety_margin"), float("nan"), "must be a finite number from 0 to 1, got nan"),
        (("verdict", "safety_margin"), "0.1", "must be a finite number from 0 to 1, got '0.1'"),
        (("verdict", "safety_margin"), 10**400, "must be a finite number from 0 to 1, got 1000"),
        (("verdict", "safety_margin"), 1.5, "must be a finite number from 0 to 1, got 1.5"),
        (("remedies", 0, "fits"), 1, r"`remedies\[0\].fits` must be true or false, got 1"),
        (("remedies", 0, "saving_bytes"), -(2**63), None),
        (("notes",), "text", "`notes` must be a list, got 'text'"),
        (("notes",), ["x" * 100, 1], r"`notes\[1\]` must be text, got 1"),
    ],
)  # fmt: skip
def test_every_value_is_checked(tmp_path, estimate, path, value, message):
    values = changed(report_as_dict(estimate, verdict_of(estimate), REMEDIES, ["note"]), path, value)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(values))
    if message is None:
        read_report(file)
        return
    with pytest.raises(ValueError, match=message):
        read_report(file)


@pytest.mark.parametrize("field", ["breakdown", "timeline", "device", "peak_phase"])
def test_what_is_missing_is_named(estimate, field):
    values = estimate.to_dict()
    del values[field]
    with pytest.raises(ValueError, match=f"`estimate.{field}` is missing"):
        MemoryEstimate.from_dict(values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"a": 1' + b"0" * 10_000 + b"}", "is no JSON"),
        (b"[]", "holds no report"),
        (b"{}", "holds no report"),
        (b'{"verdict": 1, "version": 1}', "`verdict` must be an object"),
        (b"null", "holds no report"),
    ],
    ids=["empty", "binary", "deep", "long", "list", "object", "number", "null"],
)
def test_what_is_no_report_is_refused(tmp_path, content, message):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_report(path)


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "file.json"
    with path.open("wb") as file:
        file.truncate(64 * 1024**2 + 1)  # Holes take no disk.
    with pytest.raises(ValueError, match="is larger than 67108864 bytes"):
        read_report(path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no such device")
def test_a_file_without_an_end_is_not_read_to_it():
    with pytest.raises(ValueError, match="is larger than 67108864 bytes"):
        read_report("/dev/zero")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_what_a_shell_of_windows_wrote_is_read(tmp_path, estimate, encoding):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(estimate.to_dict()), encoding=encoding)
    assert read_report(path).estimate == estimate


def numbers(values, path=()):
    """List the paths to all numbers, of each list the first entry only."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from numbers(value, (*path, name))
    elif isinstance(values, list):
        yield from numbers(values[0], (*path, 0)) if values else ()
    elif type(values) in (int, float):
        yield path


@pytest.mark.parametrize(
    "extreme", [-(2**63), 2**63 - 1, 10**400, 1e308, -1e308, 5e-324], ids=lambda number: str(number)[:6]
)
def test_extreme_numbers_are_refused_or_shown(tmp_path, estimate, extreme):
    few = {name: getattr(estimate, name)[:2] for name in ("timeline", "phases", "by_module", "assumptions")}
    estimate = replace(estimate, **few)
    values = json.loads(json.dumps(report_as_dict(estimate, verdict_of(estimate), REMEDIES)))
    path = tmp_path / "r.json"
    for number in numbers(values):
        path.write_text(json.dumps(changed(values, number, extreme)))
        try:
            report = read_report(path)
        except ValueError:
            continue
        content = report.estimate, report.verdict, report.remedies
        with (tmp_path / "rich.txt").open("w", encoding="utf-8") as file:
            Console(file=file).print(render_estimate(*content))
        assert len(format_estimate(*content)) < 10_000
        assert "</html>" in format_html(*content)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("r.html", b"<!DOCTYPE html>"),
        ("r.HTML", b"<!DOCTYPE"),
        ("r.htm", b"<!DOCTYPE"),
        ("r.pickle", b"\x80\x04"),
        ("r.txt", b"{\n"),
    ],
)
def test_the_ending_names_the_form(tmp_path, estimate, name, start):
    path = tmp_path / "new" / name
    save_report(path, estimate, verdict_of(estimate))
    assert path.read_bytes().startswith(start)
    assert list(path.parent.iterdir()) == [path]


def test_no_snapshot_where_there_is_no_estimate(tmp_path):
    save_report(tmp_path / "r.pickle", None, judge(None, None))
    assert not list(tmp_path.iterdir())
