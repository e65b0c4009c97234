"""The example of quantization after ``fit`` does what its page says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_the_example_exports_and_loads(tmp_path, capsys):
    path = Path(__file__).parents[1] / "examples" / "int8_after_fit.py"
    spec = importlib.util.spec_from_file_location("int8_after_fit", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    callback = module.main(tmp_path, epochs=2)
    out = capsys.readouterr().out
    assert f"{callback.metrics_after['val_acc']:.4f} of the images right" in out
    assert callback.report.bytes_before > 3.9 * callback.report.bytes_after
