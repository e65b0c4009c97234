from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_memprec._files.atomic import replacing, write_json


def test_a_file_appears_whole_at_the_end(tmp_path):
    path = tmp_path / "new" / "file"
    with replacing(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with replacing(path) as file:
        file.write(b"two")
        assert path.read_bytes() == b"one"
    assert path.read_bytes() == b"two"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write():
        with replacing(path) as file:
            file.write(b"half")
            raise error("broken")

    with pytest.raises(error):
        write()
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"a": [1, 2.5], "path": Path("x"), "ä": None})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1, 2.5], "path": "x", "ä": None}
    loop: dict = {}
    loop["self"] = loop
    with pytest.raises(ValueError, match="Circular"):
        write_json(path, loop)
    assert json.loads(path.read_text(encoding="utf-8"))["a"] == [1, 2.5]
