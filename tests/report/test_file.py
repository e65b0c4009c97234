from __future__ import annotations

import json

import pytest

from lightning_memprec.report.file import report_as_dict, write_report
from lightning_memprec.report.verdict import judge


def test_report_replaces_an_older_one_whole(tmp_path):
    path = tmp_path / "new" / "report.json"
    for capacity in (50, 200):
        write_report(path, report_as_dict(None, judge(100, capacity)))
    report = json.loads(path.read_text())
    assert report["verdict"]["headroom_bytes"] == 100
    assert report["version"] == 1
    assert list(path.parent.iterdir()) == [path]


def test_failed_write_leaves_the_old_report(tmp_path):
    path = tmp_path / "report.json"
    write_report(path, {"version": 1})
    with pytest.raises(TypeError):
        write_report(path, {"version": object()})
    assert json.loads(path.read_text()) == {"version": 1}
    assert list(tmp_path.iterdir()) == [path]
