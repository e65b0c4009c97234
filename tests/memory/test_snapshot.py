"""The snapshot of a predicted run, read by PyTorch's own readers and counted once more."""

from __future__ import annotations

import copy
import pickle
import pickletools
import re

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as viz

from lightning_memprec import MemoryEstimate, estimate_memory
from lightning_memprec.memory.steady import with_more_steps

# What torch/utils/viz/MemoryViz.js knows (`unpickle`); it stops at any other.
OPCODES = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET",
    "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT",
    "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "SETITEM",
}  # fmt: skip


@pytest.fixture(scope="module", params=["cpu", "T4-16GB"])
def estimate(request):
    def build():
        return nn.Sequential(nn.Linear(600, 900), nn.ReLU(), nn.Sequential(nn.Linear(900, 600)))

    return estimate_memory(build, torch.empty(700, 600), optimizer=torch.optim.AdamW, device=request.param)


@pytest.fixture
def snapshot(estimate, tmp_path):
    path = tmp_path / "new" / "run.pickle"
    estimate.save_snapshot(path)
    assert list(path.parent.iterdir()) == [path]
    return pickle.loads(path.read_bytes())


def replayed(snapshot):
    """Follow the entries as a reader would; return all live sizes and all reserved sizes over time."""
    live, segments, allocated, reserved, time = {}, {}, [0], [0], 0
    for entry in snapshot["device_traces"][0]:
        assert entry["time_us"] >= time
        time = entry["time_us"]
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action in ("segment_alloc", "segment_map"):
            assert all(address + size <= a or a + s <= address for a, s in segments.items())
            segments[address] = size
        elif action == "segment_free":
            assert segments.pop(address) == size
        elif action == "alloc":
            assert address not in live
            assert size > 0
            live[address] = size
        elif action == "free_completed":
            assert live.pop(address) == size
        else:
            assert action in ("free_requested", "snapshot")
        allocated.append(sum(live.values()))
        reserved.append(sum(segments.values()))
    return live, segments, allocated, reserved


def requested_peak(events):
    total = peak = 0
    for k in events.order:
        total += events.storages[k].size_bytes if k >= 0 else -events.storages[~k].size_bytes
        peak = max(peak, total)
    return peak


def test_entries_add_up_to_the_estimate(estimate, snapshot):
    live, segments, allocated, reserved = replayed(snapshot)
    on_cpu = estimate.device == "cpu"
    events = estimate.events if on_cpu else with_more_steps(estimate.events)
    assert max(allocated) == requested_peak(events)
    assert max(reserved) == estimate.peak_reserved_bytes
    assert live
    # Viewer and reader find every live block, and only these, in the segments at the end.
    blocks = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    assert {b["address"]: b["requested_size"] for b in blocks} == live
    assert sum(s["total_size"] for s in snapshot["segments"]) == sum(segments.values())


def test_blocks_fill_their_segments(snapshot):
    for segment in snapshot["segments"]:
        end = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == end
            assert block["requested_size"] <= block["size"]
            end += block["size"]
        assert end == segment["address"] + segment["total_size"]
        used = [b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"]
        assert segment["allocated_size"] == segment["active_size"] == sum(used)


def test_every_live_address_lies_in_a_segment_that_is_there(snapshot):
    segments = {}
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "segment_alloc":
            segments[entry["addr"]] = entry["addr"] + entry["size"]
        elif entry["action"] == "segment_free":
            del segments[entry["addr"]]
        elif entry["action"] in ("alloc", "free_completed"):
            start, end = entry["addr"], entry["addr"] + entry["size"]
            assert any(a <= start and end <= b for a, b in segments.items())


@pytest.mark.parametrize(
    "read", ["segsum", "trace", "trace_plot", "segment_plot", "memory", "segments", "filtered", "cached"]
)
def test_pytorchs_readers_take_it(snapshot, read):
    before = copy.deepcopy(snapshot)
    if read in ("memory", "segments"):
        assert getattr(viz, read)(snapshot, lambda lines: lines).count("active_allocated") > 0
    elif read == "filtered":
        assert viz.trace_plot(snapshot, filter_freed=True)
        return
    elif read == "cached":
        assert viz.trace_plot(snapshot, plot_segments=True)
    else:
        assert len(getattr(viz, read)(snapshot)) > 200
    assert snapshot == before


def test_the_browsers_reader_knows_every_opcode(estimate, tmp_path):
    estimate.save_snapshot(tmp_path / "s.pickle")
    opcodes = [
        (code.name, value) for code, value, _ in pickletools.genops((tmp_path / "s.pickle").read_bytes())
    ]
    assert {name for name, _ in opcodes} <= OPCODES
    assert ("PROTO", 4) in opcodes
    # Numbers of a browser are exact up to 2**53.
    assert all(-(2**53) < value < 2**53 for name, value in opcodes if name == "LONG1")
    # It colors by category if one of them is "unknown".
    assert ("SHORT_BINUNICODE", "unknown") in opcodes


def test_frames_name_part_module_and_phase(snapshot):
    allocations = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    assert {e["category"] for e in allocations} >= {
        "parameters",
        "gradients",
        "optimizer states",
        "activations",
    }
    frames = {tuple((f["filename"], f["name"]) for f in e["frames"]) for e in allocations}
    root = ("(root)", "module")
    assert (
        ("2.0.weight", "parameters"), ("2.0", "module"), ("2", "module"), root, ("outside the steps", "setup"),
    ) in frames  # fmt: skip
    assert (("1", "activations"), ("1", "module"), root, ("step 1", "forward")) in frames
    assert (("0.weight", "optimizer states"), ("0", "module"), root, ("step 1", "optimizer step")) in frames


def test_growing_segments_are_mapped_page_by_page(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    estimate = estimate_memory(
        lambda: nn.Sequential(nn.Linear(2000, 1500), nn.Linear(1500, 10)), torch.empty(300, 2000),
        optimizer=torch.optim.AdamW, device="T4-16GB",
    )  # fmt: skip
    estimate.save_snapshot(tmp_path / "s.pickle")
    snapshot = pickle.loads((tmp_path / "s.pickle").read_bytes())
    assert {e["action"] for e in snapshot["device_traces"][0]} >= {"segment_map", "alloc", "free_completed"}
    _, _, _, reserved = replayed(snapshot)
    assert max(reserved) == estimate.peak_reserved_bytes
    # One segment for small and one for large blocks.
    assert sorted(s["segment_type"] for s in snapshot["segments"]) == ["large", "small"]
    assert snapshot["allocator_settings"]["expandable_segments"] is True
    test_blocks_fill_their_segments(snapshot)
    assert re.search(r"total_reserved: [\d.]+MiB", viz.segsum(snapshot))


def test_what_has_no_events_or_no_peak_is_refused(monkeypatch, tmp_path):
    estimate = estimate_memory(nn.Linear(4, 4), torch.ones(2, 4), device="T4-16GB")
    with pytest.raises(ValueError, match="needs the events of the trace"):
        MemoryEstimate.from_dict(estimate.to_dict()).save_snapshot(tmp_path / "s.pickle")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    with pytest.raises(ValueError, match="Only the allocator backend 'native' is simulated"):
        estimate.save_snapshot(tmp_path / "s.pickle")
    assert not list(tmp_path.iterdir())
