"""Memory and time of ``lightning-memprec quantize`` against quantizing the same checkpoint in memory.

Run as ``python -m benchmarks.int8_streaming [--layers 12] [--width 4096]``. The checkpoint is made up: its layers are
linear, FP32, all of one size. Each way runs in a process of its own, interleaved, and reports by how much its
resident memory grew at the peak (``VmHWM``, so Linux only), beside the size of the largest tensor.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from benchmarks._machine import describe_machine

MIB = 2**20

BOTH = """
import argparse, sys, time
import torch
from torch import nn
import lightning_memprec.cli.quantize as command
from lightning_memprec._files import checkpoint_files
from lightning_memprec.quantization.checkpoint import save_quantized
from lightning_memprec.quantization.convert import quantize_
from benchmarks.int8_streaming import Wide
source, out, layers, width, way = sys.argv[1:]
def memory():
    # Not `ru_maxrss`, which a child inherits from its parent.
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
before, start = memory(), time.perf_counter()
if way == "streamed":
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    arguments = ["quantize", source, "--model", "benchmarks.int8_streaming:Wide", "-o", out, "--overwrite"]
    arguments += ["--model-args", f'{{"layers": {layers}, "width": {width}}}']
    assert command.run(parser.parse_args(arguments)) == 0
else:
    with torch.device("meta"):
        model = Wide(int(layers), int(width))
    state = torch.load(source, weights_only=True, mmap=True)["state_dict"]
    model.load_state_dict(state, assign=True)
    quantize_(model)
    save_quantized(model, out)
print(memory() - before, time.perf_counter() - start)
"""


class Wide(nn.Module):
    """Linear layers of one size."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))


def run(way, source, out, layers, width):
    command = [sys.executable, "-W", "ignore", "-c", BOTH, source, out, str(layers), str(width), way]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, seconds = done.stdout.split()[-2:]
    return int(grown), float(seconds)


def main(layers: int, width: int, rounds: int) -> None:
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        source = f"{folder}/wide.ckpt"
        torch.save({"state_dict": Wide(layers, width).state_dict()}, source)
        largest = width * width * 4
        print(
            f"checkpoint {Path(source).stat().st_size / MIB:.0f} MiB, largest tensor {largest / MIB:.0f} MiB\n"
        )
        results = {"streamed": [], "in memory": []}
        for _ in range(rounds):
            for way, values in results.items():
                values.append(run(way, source, f"{folder}/{way}", layers, width))
        a, b = (Path(folder, way, "model.safetensors") for way in results)
        assert a.stat().st_size > 0
        from safetensors.torch import load_file

        ours, peer = load_file(a), load_file(b)
        assert all(torch.equal(ours[name], peer[name]) for name in peer)
    print(f"{'':<12}{'peak growth':>14}{'largest tensors':>17}{'seconds':>9}")
    for way, values in results.items():
        grown, seconds = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"{way:<12}{grown / MIB:>10.0f} MiB{grown / largest:>17.2f}{seconds:>9.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    main(options.layers, options.width, options.rounds)
