"""What is kept of a run."""

from __future__ import annotations

import pytest

from lightning_memprec.memory.observe.reading import Reading
from lightning_memprec.memory.observe.record import MemoryRecord

GIB = 2**30


def test_history_keeps_its_first_and_its_last_reading():
    record = MemoryRecord()
    for step in range(20_000):
        record.keep(step, Reading(host_rss_bytes=step))
    steps = [step for step, _ in record.history]
    assert 2048 <= len(steps) <= 4096
    assert (steps[0], steps[-1]) == (0, 19_999)
    assert steps == sorted(steps)


def test_summary_says_what_is_known_and_what_was_told():
    record = MemoryRecord()
    assert record.summary() == "No optimizer step was observed."
    record.keep(
        3, Reading(peak_allocated_bytes=2 * GIB, device_used_bytes=5 * GIB, other_processes_bytes=GIB)
    )
    figures = "Peak of live tensors 2.00 GiB, in use on the device 5.00 GiB, by other processes 1.00 GiB. "
    assert record.summary() == figures + "Nothing to warn about."
    record.tell("no_peak", 0, {"device": "CPU"})
    lost = {"allocated_bytes": 1, "reserved_bytes": 2, "lost_bytes": 1, "free_bytes": 0, "remedy": "Mend it."}
    for step in (1, 2):
        record.tell("fragmentation", step, lost)
    assert record.summary() == figures + "Warnings: fragmentation."


def test_events_are_restored():
    record, other = MemoryRecord(), MemoryRecord()
    record.tell("no_peak", 0, {"device": "CPU"})
    other.load_state_dict(record.state_dict())
    assert other.events == record.events


@pytest.mark.parametrize("state", [{}, {"events": 3}, {"events": [3]}, {"events": [{}]}], ids=str)
def test_a_spoilt_state_is_refused(state):
    with pytest.raises((KeyError, TypeError, ValueError)):
        MemoryRecord().load_state_dict(state)
