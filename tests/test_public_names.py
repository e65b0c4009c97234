"""Names and parameters that users depend on. A change here is a change of the public interface."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import lightning_memprec as lm

NAMES = {
    "Capabilities",
    "CheckpointError",
    "DataDependentError",
    "GradScalerMonitor",
    "MasterWeightPrecision",
    "MemPrecError",
    "MemoryEstimate",
    "MemoryMonitor",
    "MemoryOverflowError",
    "MemoryPreflight",
    "OutOfMemoryReport",
    "PostTrainingQuantization",
    "PrecisionChoice",
    "PrecisionComparison",
    "QuantizationReport",
    "QuantizedFileError",
    "Remedy",
    "ScalerCollapseError",
    "StagnationMonitor",
    "TraceError",
    "choose_precision",
    "compare_precisions",
    "estimate_memory",
    "export_weights",
    "inspect_checkpoint",
    "load_quantized",
    "probe_memory",
    "quantize_",
    "restore_int8_layers",
    "save_quantized",
    "__version__",
}

PARAMETERS = {
    "estimate_memory": {
        "module": inspect.Parameter.empty,
        "batch": inspect.Parameter.empty,
        "optimizer": None,
        "loss": None,
        "precision": "32-true",
        "device": "cuda",
        "strategy": "auto",
        "num_devices": 1,
        "num_nodes": 1,
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
        "gradient_clip_algorithm": "norm",
        "steps": 2,
        "validation_batch": None,
    },
    "MemoryPreflight": {
        "device": None,
        "device_memory": None,
        "safety_margin": 0.05,
        "on_overflow": "raise",
        "on_error": "warn",
        "remedies": True,
        "batch_spec": None,
        "stop_after": False,
        "report_path": None,
        "sample_batches": 8,
        "probe": False,
        "calibrate": True,
    },
    "MemoryOverflowError": {
        "message": inspect.Parameter.empty,
        "estimate": None,
        "capacity_bytes": None,
        "remedies": (),
    },
    "DataDependentError": {"message": inspect.Parameter.empty, "location": None},
}

ESTIMATE_FIELDS = {
    "peak_allocated_bytes", "peak_reserved_bytes",
    "minimum_reserved_bytes", "outside_allocator_bytes", "breakdown", "peak_phase", "phases",
    "by_module", "timeline", "assumptions", "device", "precision", "steps", "trainable_parameters",
    "total_parameters", "events", "host",
}  # fmt: skip
ESTIMATE_MEMBERS = {
    "peak_device_bytes", "minimum_device_bytes", "fits", "to_dict", "from_dict", "plot", "save_snapshot"
}  # fmt: skip
BREAKDOWN_FIELDS = {
    "parameters_bytes", "buffers_bytes", "gradients_bytes", "optimizer_states_bytes", "activations_bytes",
    "temporaries_bytes", "inputs_bytes", "workspaces_bytes",
}  # fmt: skip
REMEDY_FIELDS = {
    "name", "description", "how", "need_bytes", "saving_bytes", "fits", "basis", "cost", "exact", "snippet", "config"
}  # fmt: skip


def test_public_names():
    assert set(lm.__all__) == NAMES
    assert set(dir(lm)) == NAMES
    for name in NAMES:
        assert getattr(lm, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'estimate_memmory'"):
        lm.estimate_memmory  # noqa: B018


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_their_defaults(name):
    parameters = inspect.signature(getattr(lm, name)).parameters
    assert {p.name: p.default for p in parameters.values()} == PARAMETERS[name]


def test_all_but_module_and_batch_are_keywords():
    kinds = {p.name: p.kind for p in inspect.signature(lm.estimate_memory).parameters.values()}
    assert {name for name, kind in kinds.items() if kind is not inspect.Parameter.KEYWORD_ONLY} == {
        "module",
        "batch",
    }


def test_fields_of_the_results():
    from lightning_memprec.memory.result import Breakdown

    assert {f.name for f in dataclasses.fields(lm.MemoryEstimate)} == ESTIMATE_FIELDS
    assert set(dir(lm.MemoryEstimate)) >= ESTIMATE_MEMBERS
    assert {f.name for f in dataclasses.fields(Breakdown)} == BREAKDOWN_FIELDS
    assert {f.name for f in dataclasses.fields(lm.Remedy)} == REMEDY_FIELDS
    for result in (lm.MemoryEstimate, Breakdown, lm.Remedy):
        assert result.__dataclass_params__.frozen


def test_version():
    assert re.match(r"\d+\.\d+\.\d+", lm.__version__)
