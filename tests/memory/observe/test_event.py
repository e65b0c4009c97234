"""Events in words."""

from __future__ import annotations

import string
from dataclasses import asdict

import pytest

from lightning_memprec.memory.observe.event import _WORDS, event_from_dict, make_event


@pytest.mark.parametrize("kind", sorted(_WORDS))
def test_each_kind_says_its_figures_with_their_units(kind):
    names = [name for _, name, _, _ in string.Formatter().parse(_WORDS[kind][1]) if name]
    figures = {name: 3 * 2**20 if name.endswith("_bytes") else 0.5 for name in names}
    event = make_event(kind, 7, figures)
    assert (event.kind, event.step, event.figures) == (kind, 7, figures)
    assert ("3.00 MiB" in event.message) is any(name.endswith("_bytes") for name in names)
    assert "{" not in event.message
    assert event_from_dict(asdict(event)) == event


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"severity": "fatal"}, ValueError),
        ({"figures": [1]}, ValueError),
        ({"step": "soon"}, ValueError),
        ({"step": None}, TypeError),
    ],
    ids=["severity", "figures", "step_text", "step_none"],
)
def test_spoilt_events_are_refused(change, error):
    values = asdict(make_event("no_peak", 0, {"device": "CPU"}))
    with pytest.raises(error):
        event_from_dict({**values, **change})
