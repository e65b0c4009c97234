"""The notebooks are those of their scripts, and the scripts run and show what their text says."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.name != "make_notebooks.py")


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_notebooks", FOLDER / "make_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cells_of_a_script(maker):
    script = "# %% [markdown]\n# # Title\n#\n# A line.\n\n# %%\nx = 1  # %% no marker\n\n\n# %%\nprint(x)\n"
    assert maker.cells(script) == [
        ("markdown", "# Title\n\nA line."),
        ("code", "x = 1  # %% no marker"),
        ("code", "print(x)"),
    ]


def test_text_before_the_first_cell_is_refused(maker):
    with pytest.raises(ValueError, match=r"begins with 'import torch'. Put `# %%` before it"):
        maker.cells("import torch\n# %%\n")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebook_is_that_of_its_script(script, maker):
    stored = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))
    assert stored == maker.notebook(script.read_text(encoding="utf-8")), (
        "run `python examples/notebooks/make_notebooks.py`"
    )


def test_every_notebook_has_a_script():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {path.stem for path in SCRIPTS}


# The scripts assert what their text says; here is what a reader sees of it.
SHOWN = {
    "count_the_bytes": ["The peak is in backward, step 1.", "by hand      59.02 MiB"],
    "loss_scale_collapse": ["step 74, collapse (warning)", "120 steps, last loss"],
    "fp16_to_int8": ["Holds FP32 master weights.", "weight_only: 3 layers quantized, 0 left"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    for text in SHOWN[script.stem]:
        assert text in out
