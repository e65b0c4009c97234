"""Peers of ``benchmarks.reconstruction``: torchao, which rounds to nearest, and auto-round, which learns.

auto-round 0.16 needs packages that this project does not, so it may live in an environment of its own, which runs
this file: ``python reconstruction_peers.py REQUEST ANSWER``.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["Peer", "auto_round", "forget_peak", "memory", "torchao"]

# Rounded model, CPU seconds, bytes of memory at the peak beyond those at the start (``None`` where not measured).
Peer = tuple[nn.Module, float, "int | None"]


def torchao(net: nn.Module, layers: dict[str, nn.Module], bits: int) -> tuple[Peer, list[str]]:
    """Quantize the weights of linear layers with one symmetric scale a channel; others are not touched.

    Returns:
        The peer and the names of its layers.
    """
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization import quantize_ as torchao_quantize_

    rounded = copy.deepcopy(net)
    own = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    config = IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"))
    start = time.process_time()
    torchao_quantize_(rounded, config, filter_fn=lambda module, name: name in own)
    return (rounded, time.process_time() - start, None), own


def auto_round(net: Any, windows: torch.Tensor, bits: int, python: Path) -> Peer:
    """Quantize the weights of a Llama with one symmetric scale a channel, by signed gradients of its blocks' outputs.

    Args:
        net: A ``LlamaForCausalLM``.
        windows: Tokens to calibrate with, ``[N, T]``.
        bits: Width.
        python: Interpreter of an environment with auto-round.

    Raises:
        subprocess.CalledProcessError: If it fails; its output says why.
    """
    config = {key: value for key, value in net.config.to_dict().items() if key != "quantization_config"}
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.pt", Path(folder) / "answer.pt"
        torch.save({"config": config, "state": net.state_dict(), "windows": windows, "bits": bits}, request)
        log = subprocess.run(
            [python, __file__, request, answer], check=False, capture_output=True, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        )  # fmt: skip
        if log.returncode:
            raise subprocess.CalledProcessError(log.returncode, "auto-round", log.stdout, log.stderr[-2000:])
        found = torch.load(answer, weights_only=True)
    rounded = copy.deepcopy(net)
    rounded.load_state_dict(found["state"], strict=False)
    return rounded, found["seconds"], found["bytes"]


def _serve(request: Path, answer: Path) -> None:
    """Do what a request asks, in the environment of auto-round."""
    from auto_round import AutoRound
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    task = torch.load(request, weights_only=True)
    net = LlamaForCausalLM(LlamaConfig(**task["config"]))
    net.load_state_dict(task["state"])
    # It asks for a tokenizer even where the data is tokens.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    windows = task["windows"]
    before, start = forget_peak(), time.process_time()
    rounded = AutoRound(
        net, tokenizer, scheme={"bits": task["bits"], "group_size": -1, "sym": True, "data_type": "int"},
        nsamples=len(windows), seqlen=windows.shape[1], dataset=list(windows.split(1)), device_map="cpu",
        enable_torch_compile=False,
    ).quantize()[0]  # fmt: skip
    seconds, used = time.process_time() - start, memory("VmHWM") - before
    state = {
        f"{name}.weight": part.weight.float()
        for name, part in rounded.named_modules()
        if isinstance(part, nn.Linear) and name != "lm_head"
    }
    torch.save({"state": state, "seconds": seconds, "bytes": used}, answer)


def forget_peak() -> int:
    """Start a new measurement of memory; return the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return memory("VmRSS")


def memory(field: str) -> int:
    """Return what Linux knows of this process, in bytes: ``"VmRSS"`` or ``"VmHWM"``, the most since it was cleared."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
