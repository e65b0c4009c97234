"""What an earlier run measured: kept, found again, bounded, and applied."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
from torch import nn

from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.observe.residual import (
    Residual,
    RunKey,
    applied_ratio,
    calibrated,
    is_plausible,
    read_residual,
    shapes_digest,
    write_residual,
)

RUN = RunKey("net.Net", "0123", "bf16-mixed", 4096, "DDPStrategy", 2, "A100-80GB", "2.14.1")


@cache
def estimate():
    return estimate_memory(
        lambda: nn.Linear(32, 8), torch.empty(64, 32), optimizer=torch.optim.Adam, device="A100-80GB"
    )


def test_what_was_written_is_found(tmp_path):
    path = tmp_path / "folder" / "file.json"
    write_residual(path, Residual(RUN, 1.04, ("AdamW",)))
    assert read_residual(path, RUN) == Residual(RUN, 1.04, ("AdamW",))


@pytest.mark.parametrize("name", [*RunKey.__dataclass_fields__])
def test_another_run_is_not_found(tmp_path, name):
    write_residual(tmp_path / "file.json", Residual(RUN, 1.04))
    value = getattr(RUN, name)
    other = replace(RUN, **{name: value + 1 if isinstance(value, int) else value + "x"})
    assert read_residual(tmp_path / "file.json", other) is None


def test_the_last_measurement_counts_and_others_stay(tmp_path):
    path, other = tmp_path / "file.json", replace(RUN, model="other")
    for residual in (Residual(RUN, 1.1), Residual(other, 1.3), Residual(RUN, 1.2)):
        write_residual(path, residual)
    assert read_residual(path, RUN).ratio == 1.2
    assert read_residual(path, other).ratio == 1.3
    assert len(json.loads(path.read_text())["runs"]) == 2


def test_the_file_stays_small(tmp_path):
    path = tmp_path / "file.json"
    for index in range(70):
        write_residual(path, Residual(replace(RUN, model=f"net{index}"), 1.0))
    assert len(json.loads(path.read_text())["runs"]) == 64
    assert read_residual(path, replace(RUN, model="net5")) is None
    assert read_residual(path, replace(RUN, model="net69")) is not None


def entry(**changes):
    return {"version": 1, "runs": [{**asdict(Residual(RUN, 1.04)), **changes}]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"null",
        json.dumps({**entry(), "version": 2}).encode(),
        json.dumps({"version": 1, "runs": {"a": 1}}).encode(),
        json.dumps({"version": 1, "runs": [7, None, {}]}).encode(),
        json.dumps(entry(ratio="1.04")).encode(),
        json.dumps(entry(ratio=True)).encode(),
        json.dumps(entry(ratio=float("nan"))).encode(),
        json.dumps(entry(ratio=1e9)).encode(),
        json.dumps(entry(ratio=0.0)).encode(),
        json.dumps(entry(ratio=10**400)).encode(),
        json.dumps(entry(run={name: value for name, value in asdict(RUN).items() if name != "device"})).encode(),
        json.dumps(entry(run={**asdict(RUN), "optimizer": "4096"})).encode(),
        json.dumps(entry(run={**asdict(RUN), "num_devices": True})).encode(),
        json.dumps({**entry(), "more": "x" * 2**20}).encode(),
    ],
    ids=[
        "empty", "no_text", "deep", "list", "null", "later_version", "runs_no_list", "entries_no_runs", "ratio_text",
        "ratio_bool", "ratio_nan", "ratio_large", "ratio_zero", "ratio_huge", "run_incomplete", "run_of_other_type",
        "run_bool", "too_large",
    ],
)  # fmt: skip
def test_spoilt_files_say_nothing_and_are_replaced(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    assert read_residual(path, RUN) is None
    write_residual(path, Residual(RUN, 1.1))
    assert read_residual(path, RUN).ratio == 1.1


def test_no_file_says_nothing(tmp_path):
    assert read_residual(tmp_path / "none.json", RUN) is None
    assert read_residual(tmp_path, RUN) is None


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1.0, True), (0.5, True), (2.0, True), (0.49, False), (2.1, False), (float("inf"), False)]
)  # fmt: skip
def test_plausible_ratios(ratio, expected):
    assert is_plausible(ratio) is expected


@pytest.mark.parametrize("ratio", [0.8, 1.04, 1.9])
def test_need_and_peaks_are_scaled_and_the_rest_is_as_traced(ratio):
    before, after = estimate(), calibrated(estimate(), ratio)
    assert after.peak_allocated_bytes == round(before.peak_allocated_bytes * ratio)
    assert after.peak_reserved_bytes == round(before.peak_reserved_bytes * ratio)
    need = before.minimum_reserved_bytes * ratio + before.outside_allocator_bytes
    assert after.minimum_device_bytes == pytest.approx(need, abs=1)
    assert (after.breakdown, after.phases) == (before.breakdown, before.phases)
    assert applied_ratio(after) == pytest.approx(ratio, rel=1e-6)
    assert f"{ratio - 1:+.1%}" in after.assumptions[-1].text


def test_what_prints_as_nothing_is_not_told():
    assert calibrated(estimate(), 1.0004) is estimate()
    assert applied_ratio(estimate()) == 1.0


def test_shapes_names_and_frozen_parameters_tell_modules_apart():
    modules = [nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(4, 4, bias=False), nn.LazyLinear(4)]
    modules += [nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4).requires_grad_(False)]
    assert len({shapes_digest(module) for module in modules}) == len(modules)
    assert shapes_digest(nn.Linear(4, 4).bfloat16()) == shapes_digest(nn.Linear(4, 4))
