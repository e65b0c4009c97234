"""Modules of other packages, unchanged, with every callback of this one."""

from __future__ import annotations

import importlib.util

import pytest

from tests.others import forecasting, graphs, text, vision
from tests.others.runs import examine

pytestmark = pytest.mark.extended

CASES = [*forecasting.CASES, *vision.CASES, *text.CASES, *graphs.CASES]


def _params(cases):
    return [pytest.param(case, id=case.name) for case in cases]


def _need(case):
    missing = [name for name in case.packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'lightning-memprec[others]'")


@pytest.mark.parametrize("case", _params(CASES))
def test_the_run_is_the_same_its_peak_is_predicted_and_it_is_exported(case, tmp_path):
    _need(case)
    outcome = examine(case, tmp_path / "runs")
    assert outcome.differences == []
    assert outcome.resumed_differences == []
    assert outcome.when == "setup"
    assert abs(outcome.error) <= case.tolerance, f"{outcome.predicted_bytes} of {outcome.real_bytes}"
    assert (outcome.path is not None) == case.exported


@pytest.mark.parametrize("case", _params(case for case in CASES if case.masters))
def test_half_weights_with_masters_are_trained_and_watched(case, tmp_path):
    _need(case)
    outcome = examine(case, tmp_path / "runs", masters=True)
    assert outcome.differences == []
    assert outcome.resumed_differences == []
