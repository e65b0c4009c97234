"""The check that runs on a GPU, run dry."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check_cases import CASES


def test_every_kind_of_run_is_in_it():
    assert {case.precision for case in CASES} == {"32-true", "16-mixed", "bf16-mixed", "bf16-true"}
    assert len({case.name for case in CASES}) == len(CASES) >= 12
    assert sum(case.verdict for case in CASES) >= 3


def test_dry_run_compares_every_case(tmp_path, capsys):
    path = tmp_path / "check.json"
    gpu_check.main(["--dry-run", "--json", str(path)])
    printed = capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == [case.name for case in CASES]
    for row in rows:
        measured, predicted = row["measured"], row["predicted"]
        # The bound of the zoo for convolutions, the loosest of the families in it.
        assert predicted["allocated_bytes"] == pytest.approx(measured["allocated_bytes"], rel=0.02)
        assert predicted["product_types"] == measured["product_types"] != []
        assert row["name"] in printed
    assert "DIFFER" not in printed


def test_error_is_relative_to_what_was_measured():
    one, other = (gpu_check.Measured(size, None, None, ["float32"], []) for size in (110, 100))
    row = gpu_check.Row("case", one, other, True, False, 1.0)
    assert row.error("allocated") == pytest.approx(0.1)
    assert row.error("reserved") is None
    assert row.choices_agree
    assert "WRONG" in gpu_check._line(row)


@pytest.mark.skipif(gpu_check.torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_dry_run_is_named():
    with pytest.raises(SystemExit, match="--dry-run"):
        gpu_check.main([])
