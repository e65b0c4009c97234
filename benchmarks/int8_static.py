"""What static activations cost, and what AdaQuant, batch norms and smoothing win back.

Run: ``python -m benchmarks.int8_static``, and for the language model with ``--smollm2 models``, the folder of
``benchmarks.int8_accuracy``.

The first model is a net of depth-wise and point-wise convolutions with batch norms, trained on scikit-learn's digits,
means over three trainings; the second SmolLM2-135M-Instruct. Calibration data and test data are those of
``benchmarks.reconstruction_models``.
"""

from __future__ import annotations

import argparse
import copy
import resource
import time
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from benchmarks._machine import describe_machine
from benchmarks.reconstruction_models import SUBJECTS, Subject, smollm2
from lightning_memprec import quantize_

_SEEDS = 3

_CASES: dict[str, dict[str, Any]] = {
    "W8 A8, one scale a tensor": {"method": "absmax", "activations": "static"},
    "the same, folded": {"method": "absmax", "activations": "static", "batch_norm": "fold"},
    "the same, re-tuned": {"method": "absmax", "activations": "static", "batch_norm": "retune"},
    "the same, adaquant": {"method": "adaquant", "weight_granularity": "tensor"},
    "W8 a channel, A8 static": {"method": "vectorwise", "activations": "static"},
    "the same, adaquant ": {"method": "adaquant"},
    "W4 a tensor, A8 static": {"method": "absmax", "activations": "static", "bits": 4},
    "the same, folded ": {"method": "absmax", "activations": "static", "bits": 4, "batch_norm": "fold"},
    "the same, re-tuned ": {"method": "absmax", "activations": "static", "bits": 4, "batch_norm": "retune"},
    "the same, adaquant  ": {"method": "adaquant", "weight_granularity": "tensor", "bits": 4},
    "adaquant, re-tuned": {
        "method": "adaquant", "weight_granularity": "tensor", "bits": 4, "batch_norm": "retune",
    },
    "W4 a channel, A8 static": {"method": "vectorwise", "activations": "static", "bits": 4},
    "the same, re-tuned  ": {"method": "vectorwise", "activations": "static", "bits": 4, "batch_norm": "retune"},
    "the same, adaquant   ": {"method": "adaquant", "bits": 4},
}  # fmt: skip


_FEW = {"iterations": 100, "batch_rows": 128, "sequential": False, "memory_mib": 2048.0}
_LANGUAGE_CASES: dict[str, dict[str, Any]] = {
    "absmax, measured at run time": {"method": "absmax"},
    "absmax, static": {"method": "absmax", "activations": "static"},
    "absmax, static, smoothed": {"method": "absmax", "activations": "static", "smoothing": 0.8},
    "W8 a channel, A8 static": {"method": "vectorwise", "activations": "static"},
    "W8 a channel, A8, smoothed 0.8": {"method": "vectorwise", "activations": "static", "smoothing": 0.8},
    "W8 a channel, A8, smoothed 0.5": {"method": "vectorwise", "activations": "static", "smoothing": 0.5},
    "W8 a channel, outliers apart": {
        "method": "vectorwise",
        "activations": "static",
        "outlier_threshold": 6.0,
    },
    "adaquant, 100 iterations": {"method": "adaquant", "method_options": _FEW},
    "the same, row_exponent 1": {"method": "adaquant", "method_options": {**_FEW, "row_exponent": 1.0}},
}


def one_case(subject: Subject, options: dict[str, Any] | None) -> tuple[float, float, float]:
    """Return the relative distance of the outputs to the float model's, the metric, and the CPU seconds it took."""
    rounded, start = copy.deepcopy(subject.net), time.process_time()
    if options is not None:
        quantize_(
            rounded,
            include=["Linear", "Conv2d"] if subject.metric_name == "accuracy" else ["Linear"],
            exclude=list(subject.exclude),
            calibration=subject.calibration,
            **options,
        )
    seconds = time.process_time() - start
    with torch.no_grad():
        exact, output = (_output(net, subject.test[0]) for net in (subject.net, rounded))
    return float((output - exact).norm() / exact.norm()), subject.metric(rounded), seconds


def _output(net: nn.Module, batch: Any) -> torch.Tensor:
    output = net(batch)
    return output if isinstance(output, torch.Tensor) else output.logits  # type: ignore[no-any-return]


def table(subjects: list[Subject], cases: dict[str, dict[str, Any]]) -> None:
    print(f"{'':30s} {'outputs':>8s} {subjects[0].metric_name:>10s} {'CPU s':>6s} {'peak MiB':>8s}")
    for name, options in {"floating point": None, **cases}.items():
        rows = [one_case(subject, options) for subject in subjects]
        distance, metric, seconds = (mean(column) for column in zip(*rows, strict=True))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{name:30s} {distance:8.2%} {metric:10.4f} {seconds:6.1f} {peak:8.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", type=Path, help="folder into which the wheels were unpacked")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose names begin with these")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(describe_machine())
    cases = _CASES if arguments.smollm2 is None else _LANGUAGE_CASES
    cases = {name: options for name, options in cases.items() if name.startswith(tuple(arguments.only))}
    if arguments.smollm2 is None:
        table([SUBJECTS["convnet"](seed) for seed in range(_SEEDS)], cases)
    else:
        table([smollm2(arguments.smollm2)], cases)


if __name__ == "__main__":
    main()
