"""What methods that learn from data gain over rounding to nearest in the same scheme, beside torchao and auto-round.

Run: ``python -m benchmarks.reconstruction`` (all small models), or for example
``python -m benchmarks.reconstruction --models mlp transformer --methods gptq layer_wise --bits 4``.

The models are a perceptron and a convolutional net with depth-wise stages and batch norm, trained on scikit-learn's
digits; a small transformer trained on Python's built-in help, once, in some minutes, and kept in
``~/.cache/lightning_memprec``; and with ``--smollm2 FOLDER`` SmolLM2-135M-Instruct, unpacked as
``benchmarks.int8_accuracy`` says. ``--auto-round PYTHON`` names the interpreter of an environment with auto-round.

Errors are those of outputs on test data, relative to rounding to nearest in the same scheme. That of a layer is
measured fed with the float model's inputs, and in place, inside the quantized model. Beside them stands what the method
makes small: the error of a layer, or of a block for methods that look at blocks, on the inputs it was made for, which
for methods that learn from a quantized prefix are those that this prefix gives. Rounding to nearest then gets the same
inputs. Rows that methods choose by are the last fifth of their calibration batches; neither they nor the others are
test data.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import torch
from torch import nn

from benchmarks import reconstruction_peers as peers
from benchmarks._machine import describe_machine
from benchmarks.reconstruction_errors import Aim, aimed_errors, errors_in_place, layer_errors
from benchmarks.reconstruction_models import SUBJECTS, Subject, smollm2
from lightning_memprec import quantize_
from lightning_memprec.quantization.methods import method_names, resolve
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.adaquant import AdaQuant
from lightning_memprec.quantization.reconstruction.block_wise import BlockWise
from lightning_memprec.quantization.reconstruction.blocks import find_blocks
from lightning_memprec.quantization.reconstruction.solving import Reconstruction
from lightning_memprec.quantization.targets import find_targets

__all__ = ["Row", "main", "measure", "table"]

_MIB = 2**20
_SHOWN = 8  # Layers that got worse, of each method.
_COMMON = Scheme()  # One symmetric scale a channel, activations in floating point: what all methods can do.
_MODELS = ("mlp", "convnet", "transformer", "smollm2")

# Options that make a difference worth a row, by the name of the row; the method is what stands before the comma.
_OPTIONS: dict[str, dict[str, Any]] = {
    "gptq, act_order": {"act_order": True},
    "gptq, parallel": {"sequential": False},
    "adaquant, parallel": {"sequential": False},
    "brecq, teacher": {"inputs": "teacher"},
    "zeroquant, student": {"inputs": "student"},
}


def learning_methods() -> list[str]:
    """Return the names of the methods that have a solver, each followed by its variants."""
    names = [name for name in method_names() if resolve(name, {}).solver is not None]
    return [row for name in names for row in (name, *(other for other in _OPTIONS if _method(other) == name))]


def _method(row: str) -> str:
    return row.partition(",")[0]


@dataclass
class Row:
    """What one method did to a model, or to the same model of several trainings.

    Attributes:
        ratios: Test error of each layer, fed with the float model's inputs, relative to rounding to nearest, by name
            and training.
        aimed: What the method makes small, relative to rounding to nearest, by name of the layer or block and training.
        in_place: The same inside the quantized model, where inputs carry the errors of the layers before.
        outputs: ``‖Y - Ŷ‖ / ‖Y‖`` of the model's output on test data.
        metrics: The task's.
        seconds: CPU time to quantize, for each million weights.
        mebibytes: Memory at the peak while quantizing beyond that before, the result included.
    """

    ratios: dict[str, float] = field(default_factory=dict)
    aimed: dict[str, float] = field(default_factory=dict)
    in_place: dict[str, float] = field(default_factory=dict)
    outputs: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    mebibytes: list[float] = field(default_factory=list)


def _quantize(subject: Subject, method: str, scheme: Scheme) -> peers.Peer:
    """Return a quantized copy, CPU seconds and bytes."""
    rounded = copy.deepcopy(subject.net)
    settings = {key: value for key, value in vars(scheme).items() if value is not None}
    # What was freed before must not serve as memory for this.
    ctypes.CDLL(None).malloc_trim(0)
    before, start = peers.forget_peak(), time.process_time()
    quantize_(
        rounded, _method(method), include=list(subject.layers()), calibration=subject.calibration,
        method_options=_OPTIONS.get(method), **settings,
    )  # fmt: skip
    return rounded, time.process_time() - start, peers.memory("VmHWM") - before


def aim(subject: Subject, row: str) -> Aim | None:
    """Return what the method of a row makes small; ``None`` for rounding to nearest."""
    solver = resolve(_method(row), {}, _OPTIONS.get(row)).solver
    layers = tuple(subject.layers())
    if isinstance(solver, BlockWise):
        targets = [target for target in find_targets(subject.net, _COMMON)[0] if target.name in layers]
        blocks = find_blocks(subject.net, targets)
        return Aim(tuple(block.name for block in blocks), solver.inputs == "student", same_inputs=False)
    if isinstance(solver, AdaQuant):
        return Aim(layers, solver.sequential, same_inputs=False)
    return Aim(layers, solver.sequential, same_inputs=True) if isinstance(solver, Reconstruction) else None


def schemes(method: str, bits: int) -> dict[str, Scheme]:
    """Return the schemes to measure a method in: the one that all can do, and its own if that is another."""
    common = replace(_COMMON, bits=bits)
    own = replace(resolve(_method(method), {}).scheme, bits=bits)
    return {method: common} if own == common else {method: common, f"{method}, as it comes": own}


def measure(
    rows: dict[tuple[str, str], Row], subject: Subject, seed: int, methods: Sequence[str], bits: int,
    auto_round: Path | None = None,
) -> None:  # fmt: skip
    """Quantize a model with all methods.

    Args:
        rows: Gets or extends a row for each scheme and method.
        subject: The model.
        seed: Names its training.
        methods: Names of methods.
        bits: Width of the weights.
        auto_round: Interpreter of an environment with auto-round.
    """
    baselines: dict[Scheme, tuple[nn.Module, dict[str, float], dict[str, float]]] = {}

    def judge(scheme: Scheme, name: str, peer: peers.Peer, aim: Aim | None = None) -> None:
        rounded, seconds, memory = peer
        errors = layer_errors(subject, rounded)
        in_place, distance = errors_in_place(subject, rounded)
        nearest, *base = baselines.setdefault(scheme, (rounded, errors, in_place))
        row = rows.setdefault((str(scheme), name), Row())
        row.ratios |= {f"{layer}, {seed}": errors[layer] / base[0][layer] for layer in errors}
        if aim is not None:
            found = aimed_errors(subject, rounded, nearest, aim)
            row.aimed |= {f"{part}, {seed}": ratio for part, ratio in found.items()}
        row.in_place |= {f"{layer}, {seed}": in_place[layer] / base[1][layer] for layer in errors}
        row.outputs.append(distance)
        row.metrics.append(subject.metric(rounded))
        print(f"{name} ({scheme}): output {distance:.2%}", file=sys.stderr, flush=True)
        row.seconds.append(seconds / subject.weights * 1e6)
        if memory is not None:
            row.mebibytes.append(memory / _MIB)

    common = replace(_COMMON, bits=bits)
    exact = rows.setdefault((str(common), "floating point"), Row())
    exact.metrics.append(subject.metric(subject.net))
    wanted = {name: (method, scheme) for method in methods for name, scheme in schemes(method, bits).items()}
    for scheme in dict.fromkeys([common, *(scheme for _, scheme in wanted.values())]):
        judge(scheme, "rounding to nearest", _quantize(subject, "weight_only", scheme))
    for name, peer in _peers(subject, bits, auto_round):
        judge(common, name, peer)
    for name, (method, scheme) in wanted.items():
        judge(scheme, name, _quantize(subject, method, scheme), aim(subject, method))


def _peers(subject: Subject, bits: int, auto_round: Path | None) -> Iterator[tuple[str, peers.Peer]]:
    peer, own = peers.torchao(subject.net, subject.layers(), bits)
    if len(own) == len(subject.layers()):
        yield "torchao (peer)", peer
    if auto_round is not None and hasattr(subject.net, "config"):
        try:
            yield (
                "auto-round (peer)",
                peers.auto_round(subject.net, torch.cat(subject.calibration), bits, auto_round),
            )
        except subprocess.CalledProcessError as error:
            print(f"auto-round failed: {error.stderr}")


def table(rows: dict[tuple[str, str], Row], metric: str) -> Iterator[str]:
    """Yield the lines of a table for each scheme, in Markdown."""
    for scheme in dict.fromkeys(scheme for scheme, _ in rows):
        yield f"\n{scheme}\n"
        yield (
            "| | layer error | worst | better | on its own inputs | worst | better | in place | worst | better |"
            f" output | {metric} | CPU s/M | MiB |"
        )
        yield "|---" * 14 + "|"
        own = {name: row for (other, name), row in rows.items() if other == scheme}
        for name, row in own.items():
            cells = [name, *_errors(row.ratios), *_errors(row.aimed), *_errors(row.in_place)]
            cells += [_mean(row.outputs, "{:.2%}")]
            cells += [_mean(row.metrics, "{:.2%}" if metric == "accuracy" else "{:.3f}")]
            cells += [_mean(row.seconds, "{:.1f}"), _mean(row.mebibytes, "{:.0f}")]
            yield f"| {' | '.join(cells)} |"
        for name, row in own.items():
            for inputs, ratios in (("the float model's", row.ratios), ("its own", row.aimed)):
                worse = sorted(((ratio, layer) for layer, ratio in ratios.items() if ratio > 1), reverse=True)
                if worse and not name.endswith("(peer)"):
                    found = ", ".join(f"{layer}: {ratio:.3f}" for ratio, layer in worse[:_SHOWN])
                    yield (
                        f"\n{name}, on {inputs} inputs, errs more than rounding to nearest on {len(worse)}"
                        f" (layer, training): {found}"
                    )


def _errors(relative: dict[str, float]) -> list[str]:
    if not relative:
        return ["", "", ""]
    ratios = list(relative.values())
    better = sum(ratio < 1 for ratio in ratios)
    return [f"{geometric_mean(ratios):.3f}", f"{max(ratios):.3f}", f"{better} of {len(ratios)}"]


def _mean(values: list[float], form: str) -> str:
    return form.format(fmean(values)) if values else ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=list(SUBJECTS))
    parser.add_argument(
        "--methods", nargs="+", default=None, help="names of methods that learn; all by default"
    )
    parser.add_argument("--bits", nargs="+", type=int, default=[8, 4])
    parser.add_argument("--seeds", type=int, default=3, help="trainings of the nets on digits")
    parser.add_argument("--smollm2", type=Path, help="folder into which its wheels were unpacked")
    parser.add_argument("--auto-round", type=Path, help="interpreter of an environment with auto-round")
    options = parser.parse_args(arguments)
    if "smollm2" in options.models and options.smollm2 is None:
        parser.error("--models smollm2 needs its files: --smollm2 FOLDER")
    warnings.simplefilter("ignore")
    print(describe_machine() + f", {torch.get_num_threads()} threads")
    builders: dict[str, Callable[[int], Subject]] = {
        **SUBJECTS,
        "smollm2": lambda seed: smollm2(options.smollm2),
    }
    for model in options.models:
        subjects = [
            builders[model](seed) for seed in range(options.seeds if model in ("mlp", "convnet") else 1)
        ]
        for bits in options.bits:
            rows: dict[tuple[str, str], Row] = {}
            for seed, subject in enumerate(subjects):
                measure(rows, subject, seed, options.methods or learning_methods(), bits, options.auto_round)
            print(
                f"\n## {model}, {bits} bits, {subjects[0].weights:,} weights in {len(subjects[0].layers())} layers,"
                f" {len(subjects)} trainings"
            )
            for line in table(rows, subjects[0].metric_name):
                print(line, flush=True)


if __name__ == "__main__":
    main()
