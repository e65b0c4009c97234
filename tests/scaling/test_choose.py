from __future__ import annotations

import json
import re

import pytest
import torch

from lightning_memprec._devices import DEVICES
from lightning_memprec._units import format_bytes
from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.scaling.capabilities import (
    Capabilities,
    capabilities_of_cpu,
    capabilities_of_cuda,
    detect_capabilities,
)
from lightning_memprec.scaling.choose import choose_precision

# The cards of the catalogue that are older than Ampere.
OLD = {
    "V100-32GB": "16-mixed",
    "V100-16GB": "16-mixed",
    "T4-16GB": "16-mixed",
    "RTX2080Ti-11GB": "16-mixed",
    "RTX2080-8GB": "16-mixed",
    "RTX2070-8GB": "16-mixed",
    "RTX2060-6GB": "16-mixed",
    "GTX1660Ti-6GB": "32-true",
    "GTX1660-6GB": "32-true",
    "GTX1080Ti-11GB": "32-true",
}
APPLE = Capabilities("mps", "mps", False, True, None, tf32=False, reason="test")
AMX = capabilities_of_cpu("Xeon", {"avx512_bf16": True, "amx_bf16": True})
VECTORS = capabilities_of_cpu("EPYC", {"avx512_bf16": True})


@pytest.mark.parametrize("name", DEVICES)
def test_cards_of_the_catalogue(name):
    choice = choose_precision(name)
    assert choice.precision == OLD.get(name, "bf16-mixed")
    assert choice.capabilities.device == name
    assert name in choice.reason


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        (capabilities_of_cuda("NVIDIA GeForce GTX 1660", (7, 5)), "32-true"),
        (AMX, "bf16-mixed"),
        (VECTORS, "32-true"),
        (APPLE, "32-true"),
    ],
    ids=["gtx1660", "amx", "vectors-only", "apple"],
)
def test_capabilities_can_be_injected(capabilities, precision):
    assert choose_precision(capabilities=capabilities).precision == precision


def test_default_is_this_machine():
    assert choose_precision().capabilities == detect_capabilities()


@pytest.mark.parametrize("name", ["A100-80GB", "T4", "GTX1080Ti"])
def test_pure_half_is_named_only_with_its_loss(name):
    choice = choose_precision(name)
    offered = {choice.precision, *(other.precision for other in choice.alternatives)}
    assert not offered & {"bf16-true", "16-true"}
    for other in choice.alternatives:
        if re.search(r"16-true", other.when):
            assert "is lost" in other.when


def test_fp16_comes_with_its_monitor():
    assert any("GradScalerMonitor" in text for text in choose_precision("T4").watch)
    assert not any("GradScalerMonitor" in text for text in choose_precision("A100-80GB").watch)


@pytest.mark.parametrize(
    ("name", "asked"),
    [("A100-80GB", ["memory", "Slower", "bf16"]), ("T4", ["memory", "Slower"]), ("GTX1080Ti", [])],
)
def test_only_what_follows_the_choice_is_answered(name, asked):
    questions = [answer.question for answer in choose_precision(name).answers]
    assert len(questions) == len(asked)
    assert all(word in question for word, question in zip(asked, questions, strict=True))


# The peak falls into another phase with the batch; what is said of the parameters must not depend on it.
@pytest.mark.parametrize("batch", [4, 4096])
def test_memory_answer_quotes_the_estimates(batch):
    def model():
        return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))

    parameters = 2 * (256 * 256 + 256)
    memory = {
        precision: estimate_memory(
            model, torch.empty(batch, 256), optimizer=torch.optim.Adam, precision=precision, device="cpu"
        )
        for precision in ("32-true", "bf16-mixed")
    }
    answer = choose_precision("A100-80GB", memory=memory).answers[0].answer
    assert answer.startswith(choose_precision("A100-80GB").answers[0].answer)
    for name, estimate in memory.items():
        # 4 for weight and gradient, 8 for Adam's two moments; its two counters a layer are 4 bytes each.
        fixed = 16 * parameters + 4 * 4
        assert f"{format_bytes(fixed)} in {name}" in answer
        assert f"{format_bytes(estimate.minimum_device_bytes)} in {name}" in answer


def test_figures_in_the_texts_are_those_of_torch():
    bf16, fp16 = torch.finfo(torch.bfloat16), torch.finfo(torch.float16)
    assert (bf16.eps, fp16.eps, torch.finfo(torch.float32).eps) == (2**-7, 2**-10, 2**-23)
    texts = {name: str(choose_precision(name)) for name in ("A100-80GB", "T4")}
    assert f"{fp16.max:.0f}" in texts["T4"]
    assert f"{fp16.smallest_normal * fp16.eps:.0e}".replace("e-0", "e-") in texts["T4"]
    assert f"{fp16.eps:.5f}" in texts["T4"]
    assert f"{bf16.max:.1e}".replace("e+", "e") in texts["A100-80GB"]
    assert f"{bf16.eps:.4f}" in texts["A100-80GB"]


@pytest.mark.parametrize("name", ["A100-80GB", "T4", "GTX1080Ti"])
def test_text_and_json(name):
    choice = choose_precision(name)
    assert json.loads(json.dumps(choice.to_dict()))["precision"] == choice.precision
    lines = str(choice).splitlines()
    assert repr(choice.precision) in lines[0]
    assert max(len(line) for line in lines) <= 88


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "H900"}, "H900"),
        ({"device": "cpu", "capabilities": AMX}, "already describe"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        choose_precision(**arguments)
