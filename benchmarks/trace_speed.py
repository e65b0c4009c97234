"""Speed and memory of the estimate beside torch's own MemTracker, on one training step of an 8B Llama.

Run: ``python -m benchmarks.trace_speed`` (a minute or two), or with ``--layers 4`` for a smaller model.
Both trace two steps, forward, backward and AdamW, of the same bfloat16 model without storage, each in a process
of its own. Time is that of tracing; MemTracker's is counted without building the model, ours with it. Memory is
the highest resident set while tracing, above what the process had after its imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from typing import Any

from benchmarks._machine import describe_machine
from lightning_memprec._units import GIB, MIB

_STEPS = 2
_BATCH = (1, 2048)


def _resident_bytes(peak: bool = False) -> int:
    name = "VmHWM" if peak else "VmRSS"
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _model(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _loss(module: Any, batch: Any) -> Any:
    return module(input_ids=batch, labels=batch, use_cache=False).loss


def _ours(layers: int, device: str) -> tuple[float, int]:
    import torch

    from lightning_memprec.memory.estimate import estimate_memory

    start = time.perf_counter()
    estimate = estimate_memory(
        lambda: _model(layers),
        lambda: torch.zeros(_BATCH, dtype=torch.int64, device="meta"),
        optimizer=torch.optim.AdamW,
        loss=_loss,
        precision="bf16-true",
        device=device,
        steps=_STEPS,
    )
    return time.perf_counter() - start, estimate.peak_allocated_bytes


def _mem_tracker(layers: int, device: str) -> tuple[float, int]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = _model(layers)
    with FakeTensorMode():
        # Built on `meta` and replaced, since drawing weights under the mode would take minutes of its own.
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                module._parameters[name] = torch.nn.Parameter(torch.empty(parameter.shape))
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        batch = torch.zeros(_BATCH, dtype=torch.int64)
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer, batch)
        start = time.perf_counter()
        with tracker:
            for _ in range(_STEPS):
                loss = _loss(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                tracker.reset_mod_stats()  # It refuses a second forward pass otherwise.
        seconds = time.perf_counter() - start
        snapshot = tracker.get_tracker_snapshot("peak")
    return seconds, max(parts["Total"] for parts in snapshot.values())


_TOOLS = {"estimate_memory": _ours, "MemTracker": _mem_tracker}


def _measure(tool: str, layers: int, device: str) -> dict[str, float]:
    """Run one tool here and return its figures."""
    warnings.simplefilter("ignore")
    import torch.distributed._tools.mem_tracker  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import lightning_memprec.memory.estimate  # noqa: F401

    before = _resident_bytes()
    seconds, peak_bytes = _TOOLS[tool](layers, device)
    return {"seconds": seconds, "peak_bytes": peak_bytes, "rss_bytes": _resident_bytes(peak=True) - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument(
        "--device", default="cpu", help="semantics of our estimate; MemTracker knows the CPU's"
    )
    parser.add_argument("--only", choices=sorted(_TOOLS), help="measure one tool and print JSON")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(_measure(options.only, options.layers, options.device)))
        return
    print(describe_machine())
    results = {}
    for tool in _TOOLS:
        arguments = ["--layers", str(options.layers), "--device", options.device, "--only", tool]
        command = [sys.executable, "-m", "benchmarks.trace_speed", *arguments]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[tool] = figures = json.loads(output.splitlines()[-1])
        print(
            f"{tool:16s} {figures['seconds']:8.1f} s {figures['rss_bytes'] / MIB:8.0f} MiB above imports, "
            f"peak found {figures['peak_bytes'] / GIB:.2f} GiB",
            flush=True,
        )
    ratio = results["MemTracker"]["seconds"] / results["estimate_memory"]["seconds"]
    print(f"{options.layers} layers, {_STEPS} steps: {ratio:.1f} times faster than MemTracker")


if __name__ == "__main__":
    main()
