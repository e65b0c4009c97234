from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_memprec.scaling.capabilities import (
    Capabilities,
    capabilities_of_cpu,
    capabilities_of_cuda,
    capabilities_of_rocm,
    detect_capabilities,
)


@pytest.mark.parametrize(
    ("name", "capability", "bf16", "fp16", "cores"),
    [
        # NVIDIA's product pages: which cards have tensor cores.
        ("Tesla K80", (3, 7), False, False, False),
        ("Tesla P100-PCIE-16GB", (6, 0), False, True, False),
        ("NVIDIA GeForce GTX 1080 Ti", (6, 1), False, False, False),
        ("Tesla V100-SXM2-32GB", (7, 0), False, True, True),
        ("Tesla T4", (7, 5), False, True, True),
        ("NVIDIA GeForce RTX 2080 Ti", (7, 5), False, True, True),
        ("Quadro RTX 5000", (7, 5), False, True, True),
        ("NVIDIA GeForce GTX 1660 Ti", (7, 5), False, True, False),
        ("NVIDIA T400 4GB", (7, 5), False, True, False),
        ("NVIDIA T1000", (7, 5), False, True, False),
        ("NVIDIA A100-SXM4-80GB", (8, 0), True, True, True),
        ("NVIDIA GeForce RTX 4090", (8, 9), True, True, True),
        ("NVIDIA H100 80GB HBM3", (9, 0), True, True, True),
        ("NVIDIA GeForce RTX 5090", (12, 0), True, True, True),
    ],
)
def test_nvidia_cards(name, capability, bf16, fp16, cores):
    found = capabilities_of_cuda(name, capability)
    assert (found.native_bf16, found.native_fp16, found.matrix_units) == (bf16, fp16, cores)
    assert found.tf32 == bf16  # both came with Ampere
    assert ("emulated" in found.reason) == (not bf16)
    assert found.fast_fp16 == (fp16 and cores)


@pytest.mark.parametrize(
    ("architecture", "cores"),
    [
        ("gfx906:sramecc+:xnack-", False),  # MI50
        ("gfx908:sramecc+:xnack-", True),  # MI100
        ("gfx90a:sramecc+:xnack-", True),  # MI250
        ("gfx942", True),  # MI300X
        ("gfx1030", False),  # RX 6800
        ("gfx1100", True),  # RX 7900
    ],
)
def test_amd_cards(architecture, cores):
    found = capabilities_of_rocm("AMD", architecture)
    assert found.fast_bf16 == found.fast_fp16 == cores
    assert architecture.partition(":")[0] in found.reason


@pytest.mark.parametrize(
    ("features", "bf16", "fp16", "units"),
    [
        ({"avx512_f": True}, False, False, False),  # Skylake
        ({"avx512_bf16": True}, True, False, False),  # Cooper Lake, Zen 4
        ({"avx512_bf16": True, "amx_bf16": True, "avx512_fp16": True}, True, True, True),  # Sapphire Rapids
        ({"architecture": "arm64", "bf16": True, "fp16_arith": True}, True, True, None),  # Graviton 3
        ({}, False, False, False),
    ],
    ids=["skylake", "zen4", "sapphire-rapids", "graviton3", "nothing-known"],
)
def test_processors(features, bf16, fp16, units):
    found = capabilities_of_cpu("cpu", features)
    assert (found.native_bf16, found.native_fp16, found.matrix_units) == (bf16, fp16, units)
    assert found.fast_bf16 == bool(bf16 and units)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="reads the flags of Linux"
)
@pytest.mark.parametrize("public", [True, False], ids=["public", "private"])
def test_this_processor_as_the_kernel_sees_it(monkeypatch, public):
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if not public:
        old = {name: value for name, value in vars(torch.cpu).items() if name.startswith("_is_")}
        monkeypatch.setattr(torch, "cpu", SimpleNamespace(**old))
    found = detect_capabilities("cpu")
    assert found.native_bf16 == bool({"avx512_bf16", "amx_bf16"} & flags)
    assert found.matrix_units == bool({"amx_bf16", "amx_fp16"} & flags)


def test_default_is_the_accelerator_or_the_cpu():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert detect_capabilities() == detect_capabilities(accelerator or "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_agrees_with_torch():
    found = detect_capabilities("cuda")
    assert found.native_bf16 == torch.cuda.is_bf16_supported(including_emulation=False)
    assert found.device == torch.cuda.get_device_name()


@pytest.mark.parametrize(
    ("version", "properties", "bf16"),
    [
        (None, {"name": "Tesla T4", "major": 7, "minor": 5}, False),
        ("6.4", {"name": "MI250", "gcnArchName": "gfx90a:sramecc+"}, True),
    ],
    ids=["cuda", "rocm"],
)
def test_a_gpu_is_asked_for_its_properties(monkeypatch, version, properties, bf16):
    # There is no such GPU here; only what its driver would say is put in.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    monkeypatch.setattr(torch.version, "hip", version)
    found = detect_capabilities("cuda:0")
    assert (found.device, found.native_bf16) == (properties["name"], bf16)


@pytest.mark.parametrize(
    ("device", "words"), [("toaster", "no device of torch"), ("meta", "not known"), ("xla", "not known")]
)
def test_other_devices_are_refused(device, words):
    with pytest.raises(ValueError, match=words):
        detect_capabilities(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_an_absent_device_points_to_the_catalogue():
    with pytest.raises(ValueError, match="catalogue"):
        detect_capabilities("cuda")


def test_to_dict_gives_every_field_back():
    found = capabilities_of_cuda("Tesla T4", (7, 5))
    assert Capabilities(**found.to_dict()) == found
