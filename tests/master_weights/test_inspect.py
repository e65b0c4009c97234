"""Verdicts on checkpoints whose history is known, and counts against a look at the bits."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprec.master_weights.inspect import (
    CheckpointReport,
    count_half_values,
    inspect_checkpoint,
)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def inspect_state(tmp_path, state):
    torch.save(state, tmp_path / "x.pt")
    return inspect_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("state", "verdict"),
    [
        ({"w": normal(500), "norm": torch.ones(8)}, "Holds FP32 master weights."),
        ({"w": normal(500).double()}, "Holds FP32 master weights."),
        (
            {"w": normal(500).bfloat16().float(), "norm": torch.ones(8)},
            "FP32 in name only: every weight is a bfloat16 value.",
        ),
        ({"w": normal(500).half().float()}, "FP32 in name only: every weight is a float16 value."),
        (
            {"w": normal(900).bfloat16().float(), "adapter": normal(100)},
            "FP32 in part: 90.0% of the FP32 weights are bfloat16 values.",
        ),
        ({"w": normal(5).bfloat16()}, "Half-precision weights (bfloat16): mantissas were rounded."),
        (
            {"w": normal(5).bfloat16(), "v": normal(5).half()},
            "Half-precision weights (bfloat16 and float16): mantissas were rounded.",
        ),
        (
            {"w": normal(300).bfloat16(), "norm": normal(100)},
            "Mixed: 75.0% of the weights are bfloat16, whose mantissas were rounded. Holds FP32 master weights.",
        ),
        (
            {"w": torch.zeros(3)},
            "Cannot tell whether these are FP32 master weights: every value is zero or not finite.",
        ),
        ({"w": torch.arange(3)}, "No floating-point weights."),
    ],
    ids=[
        "masters",
        "fp64",
        "bf16 upcast",
        "fp16 upcast",
        "part",
        "bf16",
        "both",
        "mixed",
        "zeros",
        "integers",
    ],
)
def test_verdict(tmp_path, state, verdict):
    assert inspect_state(tmp_path, state).verdict == verdict


@pytest.mark.parametrize(
    "state",
    [
        {"0.weight": torch.ones(2, 8, dtype=torch.int8), "0.weight_scale": normal(2, 1)},
        {"0.weight_packed": torch.ones(2, 1, dtype=torch.int32), "0.weight_scale": normal(2, 1)},
        {"weight_ih_l0": torch.ones(2, 8, dtype=torch.int8), "weight_ih_l0_scale": normal(2, 1)},
        {"0.weight": torch.ones(2, 8, dtype=torch.int8), "0.SCB": normal(2)},
        {"0.weight": torch.ones(2, 8, dtype=torch.int8), "0.weight_scale": normal(2, 1).half()},
    ],
    ids=["int8", "packed", "recurrent", "bitsandbytes", "half-precision scales"],
)
def test_quantized_weights_are_no_masters_whatever_floats_are_beside_them(tmp_path, state):
    report = inspect_state(tmp_path, {**state, "norm.weight": normal(500), "steps": torch.tensor(7)})
    assert report.quantized == 1
    assert (
        report.verdict == "Quantized: 1 weight is stored as integers with scales, not as FP32 master weights."
    )


def test_float_weights_with_a_scale_are_not_quantized(tmp_path):
    state = {
        "logit": normal(500),
        "logit_scale": normal(1),
        "lookup": torch.arange(3),
        "weight_scale": normal(1),
    }
    report = inspect_state(tmp_path, state)
    assert (report.quantized, report.verdict) == (0, "Holds FP32 master weights.")


@given(st.lists(st.floats(width=32), max_size=40))
def test_half_values_have_zero_bits_at_the_end_of_the_mantissa(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    bits = tensor.view(torch.int32)
    telling = tensor.isfinite() & (tensor != 0)
    # float16 ends at 65504, and below 2^-14 its mantissa gets shorter, down to 2^-24.
    exponent = (bits >> 23 & 0xFF) - 127
    zero_bits = (13 + (-14 - exponent).clamp(0, 10)).to(torch.int64)
    ends_in_zeros = (bits.to(torch.int64) & ((1 << zero_bits) - 1)) == 0
    in_float16 = ends_in_zeros & (exponent >= -24) & (tensor.abs() <= 65504)
    assert count_half_values(tensor) == {
        "tested": int(telling.sum()),
        "bfloat16": int((telling & (bits & 0xFFFF == 0)).sum()),
        "float16": int((telling & in_float16).sum()),
    }


def test_totals_count_tied_weights_once_and_moments_without_step_counters(tmp_path):
    weight = normal(3, 4)
    optimizer = torch.optim.Adam([torch.nn.Parameter(weight.bfloat16())])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 4).bfloat16()
    optimizer.step()
    contents = {
        "state_dict": {"a": weight, "b": weight, "count": torch.tensor(3)},
        "optimizer_states": [optimizer.state_dict()],
        "epoch": 4,
        "global_step": 90,
        "pytorch-lightning_version": "2.6.6",
    }
    torch.save(contents, tmp_path / "x.ckpt")
    report = inspect_checkpoint(tmp_path / "x.ckpt")
    assert {n: (t.tensors, t.elements, t.size_bytes) for n, t in report.weights.items()} == {
        "float32": (1, 12, 48),
        "int64": (1, 1, 8),
    }
    assert (report.elements, report.size_bytes) == (13, 56)
    assert {n: (t.tensors, t.elements) for n, t in report.optimizer.items()} == {"bfloat16": (2, 24)}
    assert (report.kind, report.epoch, report.global_step) == ("lightning", 4, 90)
    assert report.lightning_version == "2.6.6"


def test_scaler_states_are_found_where_plugins_put_them(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    contents = {
        "state_dict": {"w": normal(3)},
        "MixedPrecision": scaler.state_dict(),
        "Plugin": {"scaler": {"scale": torch.tensor(8.0), "_growth_tracker": torch.tensor(5)}},
        "other": {"scale": "large", "_growth_tracker": None},
    }
    torch.save(contents, tmp_path / "x.ckpt")
    scalers = inspect_checkpoint(tmp_path / "x.ckpt").scalers
    assert scalers["MixedPrecision"] == scaler.state_dict()
    assert scalers["Plugin.scaler"] == {"scale": 8.0, "_growth_tracker": 5}
    assert set(scalers) == {"MixedPrecision", "Plugin.scaler"}


def test_average_and_current_weights_are_judged_apart(tmp_path):
    contents = {"state_dict": {"w": normal(99).bfloat16().float()}, "current_model_state": {"w": normal(99)}}
    torch.save(contents, tmp_path / "x.ckpt")
    average = inspect_checkpoint(tmp_path / "x.ckpt")
    current = inspect_checkpoint(tmp_path / "x.ckpt", source="current")
    assert (average.averaged, average.upcast_share) == (True, 1.0)
    assert (current.averaged, current.has_average) == (False, True)
    assert current.verdict == "Holds FP32 master weights."


def test_report_becomes_json(tmp_path):
    report = inspect_state(tmp_path, {"w": normal(500)})
    found = json.loads(json.dumps(report.to_dict()))
    assert found["weights"] == {"float32": {"tensors": 1, "elements": 500, "size_bytes": 2000}}
    assert found["verdict"] == report.verdict
    assert found["version"] == 1
    assert CheckpointReport.__dataclass_params__.frozen
