from __future__ import annotations

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "report.py"


def test_the_example_writes_every_form(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("report_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(layers=1, folder=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.json", "run.pickle"]
    assert "needed on A100-40GB" in capsys.readouterr().out
