import re

import pytest

from lightning_memprec._devices import DEVICES, find_device
from lightning_memprec._units import GIB, MIB


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("A100-80GB", "A100-80GB"),
        ("a100 80gb", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("h100", "H100-80GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("Tesla T4", "T4-16GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA L4", "L4-24GB"),
        ("NVIDIA L40S", "L40S-48GB"),
        ("NVIDIA A10G", "A10-24GB"),
        ("NVIDIA GeForce RTX 3060", "RTX3060-12GB"),
        ("GeForce RTX 2080 Ti", "RTX2080Ti-11GB"),
        ("rtx_4090", "RTX4090-24GB"),
        ("NVIDIA RTX A6000", "A6000-48GB"),
        ("NVIDIA GeForce RTX 5080", "RTX5080-16GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX4070TiSuper-16GB"),
        ("RTX 3060 Ti", "RTX3060Ti-8GB"),
        ("GeForce RTX 2080", "RTX2080-8GB"),
        ("NVIDIA GeForce RTX 2070 SUPER", "RTX2070-8GB"),
        ("RTX 2060", "RTX2060-6GB"),
        ("GTX 1660", "GTX1660-6GB"),
        ("NVIDIA GeForce GTX 1660 Ti", "GTX1660Ti-6GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada-48GB"),
    ],
)
def test_find_device_accepts_driver_names_and_short_forms(name, expected):
    assert find_device(name).name == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("A100", "more than one device. Did you mean A100-80GB, A100-40GB"),
        ("H1000", "Unknown device 'H1000'. Did you mean .*H100-80GB"),
        ("RTX 4080 Ti", "Unknown device .* Did you mean RTX4080-16GB"),
        ("RTX 309", "Unknown device .* Did you mean RTX3090-24GB"),
        ("GTX 1650", "Unknown device 'GTX 1650'. Use a name of the catalogue"),
        ("RTX 9999", "Unknown device 'RTX 9999'. Use a name of the catalogue"),
        ("MI300X", "Unknown device 'MI300X'. Use a name of the catalogue .* give the memory of your device"),
        ("", "Unknown device ''. Use a name of the catalogue .*H100-80GB"),
        ("warp core", "Unknown device 'warp core'. Use a name of the catalogue"),
    ],
)
def test_find_device_names_near_matches_of_an_unknown_device(name, message):
    with pytest.raises(ValueError, match=message):
        find_device(name)


@pytest.mark.parametrize("spec", DEVICES.values(), ids=DEVICES)
def test_capacity_lies_just_below_the_capacity_on_the_box(spec):
    nominal = int(re.search(r"-(\d+)GB$", spec.name)[1])
    # ECC takes a sixteenth of cards with GDDR6, the driver some more.
    assert 0.9 * nominal * GIB < spec.memory_bytes < nominal * GIB
    assert find_device(spec.name) is spec
    assert spec.source


@pytest.mark.parametrize(
    ("name", "bf16", "generation"),
    [
        ("GTX 1080 Ti", False, "Pascal"),
        ("V100-32GB", False, "Volta"),
        ("T4", False, "Turing"),
        ("A100-40GB", True, "Ampere"),
        ("RTX 3090", True, "Ampere"),
        ("L4", True, "Ada"),
        ("H100", True, "Hopper"),
        ("RTX 5090", True, "Blackwell"),
    ],
)
def test_bf16_is_native_from_ampere_on(name, bf16, generation):
    spec = find_device(name)
    assert spec.native_bf16 is bf16
    assert spec.generation == generation


@pytest.mark.parametrize(("name", "bare_mib"), [("RTX 3090", 256), ("RTX 6000 Ada Generation", 426)])
def test_context_follows_published_readings_of_an_empty_context(name, bare_mib):
    loaded_kernels_mib = 64
    assert find_device(name).context_bytes / MIB - loaded_kernels_mib == pytest.approx(bare_mib, rel=0.05)


def test_context_is_a_small_part_of_every_device():
    for spec in DEVICES.values():
        assert 100 * MIB < spec.context_bytes < 0.05 * spec.memory_bytes


@pytest.mark.parametrize(
    ("name", "outside_mib"),
    [
        pytest.param("RTX 4060", 115, id="ESRSchao/EdgeRegNet#2"),
        pytest.param("T4", 135, id="Zheng-Chong/CatVTON#133"),
        pytest.param("RTX 2080 Ti", 197, id="lllyasviel/FramePack#369"),
        pytest.param("L40S", 514, id="huggingface/sentence-transformers#3214"),
        pytest.param("RTX 4090", 473, id="pinokiofactory/flux-webui#11"),
        pytest.param("A100-40GB", 501, id="TianheWu/CoSeR#10"),
    ],
)
def test_context_follows_out_of_memory_messages(name, outside_mib):
    """What the process held beside what PyTorch had reserved, by its own message; each figure is rounded."""
    assert find_device(name).context_bytes / MIB == pytest.approx(outside_mib, abs=30)
