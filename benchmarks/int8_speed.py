"""One linear layer in int8 beside FP32 and its peers.

Run: ``python -m benchmarks.int8_speed``; with ``--compile``, the layer with a norm before it and an activation behind,
fused by ``torch.compile`` beside eager. Numbers are medians of the ratio to FP32 over interleaved rounds, each
the best of a few calls: more than 1 is faster.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._machine import describe_machine
from lightning_memprec import quantize_
from lightning_memprec.quantization.kernels import explain

_SHAPES = [(1, 4096, 4096), (16, 4096, 4096), (256, 1024, 4096), (2048, 1024, 1024), (128, 384, 1536)]
_METHODS: dict[str, dict[str, Any]] = {
    "weight_only": {},
    "weight_only, 4 bits": {"bits": 4},
    "weight_only, 4 bits, groups of 64": {"bits": 4, "group_size": 64},
    "vectorwise": {},
    "vectorwise, 4 bits": {"bits": 4},
    "llm_int8": {},
}
_ROUNDS, _CALLS = 11, 5


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Return int8 versions of a model, ours and others', by name."""
    found: dict[str, nn.Module] = {}
    for name, options in _METHODS.items():
        found[name] = copy.deepcopy(model)
        quantize_(found[name], name.partition(",")[0], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found["torch.ao quantize_dynamic"] = torch.ao.quantization.quantize_dynamic(
            copy.deepcopy(model), {nn.Linear}
        )
        for name, build in {"torchao": _torchao, "bitsandbytes": _bitsandbytes}.items():
            try:
                found.update(build(model))
            except ImportError as error:
                print(f"without {name}: {error}")
    return found


def _torchao(model: nn.Module) -> dict[str, nn.Module]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
    from torchao.quantization import quantize_ as torchao_quantize_

    found = {"torchao W8A16": copy.deepcopy(model), "torchao W8A8": copy.deepcopy(model)}
    torchao_quantize_(found["torchao W8A16"], Int8WeightOnlyConfig())
    torchao_quantize_(found["torchao W8A8"], Int8DynamicActivationInt8WeightConfig())
    return found


def _bitsandbytes(model: nn.Module) -> dict[str, nn.Module]:
    from bitsandbytes.nn import Linear8bitLt

    linear = model[0]
    layer = Linear8bitLt(linear.in_features, linear.out_features, has_fp16_weights=False, threshold=6.0)
    layer.load_state_dict(linear.state_dict())
    return {"bitsandbytes Linear8bitLt": nn.Sequential(layer.to("cpu"))}


def ratios(reference: nn.Module, others: dict[str, nn.Module], values: Tensor) -> dict[str, float]:
    """Return the median of how many times as fast each is as the reference timed right before it."""
    for net in (reference, *others.values()):
        net(values)
    rounds: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(_ROUNDS):
        for name, net in others.items():
            rounds[name].append(_seconds(reference, values) / _seconds(net, values))
    return {name: median(found) for name, found in rounds.items()}


def _seconds(net: nn.Module, values: Tensor) -> float:
    # The best of a few calls: other work on the machine only ever adds to a time.
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        net(values)
        times.append(time.perf_counter() - start)
    return min(times)


def _error(output: Tensor, exact: Tensor) -> float:
    return float((output - exact).norm() / exact.norm())


def layers() -> None:
    print(f"{'shape (tokens, in, out)':28s} {'':34s} {'speed':>7s} {'error':>8s}")
    for tokens, features, channels in _SHAPES:
        torch.manual_seed(0)
        model, values = nn.Sequential(nn.Linear(features, channels)), torch.randn(tokens, features)
        exact, found = model(values), candidates(model)
        speeds = ratios(model, found, values)
        for name, net in found.items():
            shape = f"({tokens}, {features}, {channels})"
            print(
                f"{shape:28s} {name:34s} {speeds[name]:6.2f}x {_error(net(values), exact):8.2%}", flush=True
            )
    print(f"kernel of vectorwise: {explain(found['vectorwise'][0])}")


def fused() -> None:
    print(f"{'shape (tokens, in, out)':28s} {'':28s} {'speed':>7s}  (to eager FP32)")
    for tokens, features, channels in _SHAPES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, channels), nn.GELU())
        values, rounded = torch.randn(tokens, features), copy.deepcopy(model)
        quantize_(rounded, "vectorwise")
        torch.compiler.reset()
        nets = {
            "FP32 compiled": torch.compile(model),
            "vectorwise eager": rounded,
            "vectorwise compiled": torch.compile(rounded),
        }
        speeds = ratios(model, nets, values)
        for name, speed in speeds.items():
            print(f"{f'({tokens}, {features}, {channels})':28s} {name:28s} {speed:6.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="measure fusion instead")
    arguments = parser.parse_args()
    print(f"{describe_machine()}, {torch.get_num_threads()} threads")
    warnings.simplefilter("ignore")
    with torch.no_grad():
        fused() if arguments.compile else layers()


if __name__ == "__main__":
    main()
