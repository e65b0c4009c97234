"""Catalogue of CUDA devices: what the driver offers, and what a process takes of it before any tensor."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from lightning_memprec._units import MIB

__all__ = ["DEVICES", "DeviceSpec", "find_device"]

# Compute capability: generation and largest number of resident threads per multiprocessor.
# Source: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
_GENERATIONS = {
    (6, 1): ("Pascal", 2048),
    (7, 0): ("Volta", 2048),
    (7, 5): ("Turing", 1024),
    (8, 0): ("Ampere", 2048),
    (8, 6): ("Ampere", 1536),
    (8, 9): ("Ada", 1536),
    (9, 0): ("Hopper", 2048),
    (10, 0): ("Blackwell", 2048),
    (12, 0): ("Blackwell", 1536),
}

# A context sets memory aside for every thread that can be resident. 2 KiB a thread meets the published
# readings of an empty context within 5 %: 107 MiB on an RTX 4060 Ti (34 multiprocessors) and 555 MiB on an
# RTX PRO 6000 (188), ggml-org/llama.cpp#23604; 256 MiB on an RTX 3090 (82), invoke-ai/InvokeAI#9413;
# 426 MiB on an RTX 6000 Ada (142), unslothai/unsloth-zoo#1053.
_CONTEXT_BYTES_PER_THREAD = 2048

# Kernels and library handles load when first used (lazily, CUDA 11.7 and later). PyTorch's out-of-memory message
# tells what a process holds beside the allocator's memory. Less the context, that is 43 MiB on an RTX 4060
# (ESRSchao/EdgeRegNet#2), 66 on an RTX A4000 (DengKaiCQ/VGGT-Long#6), 55 on a T4 (Zheng-Chong/CatVTON#133), 61 on an
# RTX 2080 Ti (lllyasviel/FramePack#369), 69 on an A100 (TianheWu/CoSeR#10), 81 on an L40 (QwenLM/Qwen3-VL#2097),
# 88 on an L40S (huggingface/sentence-transformers#3214), 89 on an RTX 4090 (pinokiofactory/flux-webui#11): each
# +-15 MiB, since the message rounds; their middle is 67.
_LOADED_KERNELS_BYTES = 64 * MIB


@dataclass(frozen=True)
class DeviceSpec:
    """One device model.

    Args:
        name: Catalogue name, such as ``"A100-80GB"``.
        memory_bytes: Capacity in bytes as the driver reports it, less than the capacity on the box.
        compute_capability: CUDA compute capability, ``(major, minor)``.
        multiprocessors: Number of streaming multiprocessors.
        source: Where ``memory_bytes`` comes from.
        aliases: Other names, among them those that the driver uses.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def generation(self) -> str:
        """Name of the architecture, such as ``"Ampere"``."""
        return _GENERATIONS[self.compute_capability][0]

    @property
    def native_bf16(self) -> bool:
        """Whether the hardware multiplies bfloat16 natively (Ampere and later)."""
        return self.compute_capability >= (8, 0)

    @property
    def context_bytes(self) -> int:
        """Bytes that a training process takes outside PyTorch's allocator: context, kernels and handles.

        Modelled, for one process with lazily loaded kernels (CUDA 11.7 and later). The context itself follows
        published readings within 5 %; the kernels depend on how many different ones the run uses and can be
        64 MiB more or less. Older CUDA, or ``CUDA_MODULE_LOADING=EAGER``, loads all kernels at once: about
        1 GiB more. NCCL buffers and other processes are not included.
        """
        threads = self.multiprocessors * _GENERATIONS[self.compute_capability][1]
        return threads * _CONTEXT_BYTES_PER_THREAD + _LOADED_KERNELS_BYTES


# The capacity that the driver reports depends on its version and on ECC (by up to 2 %), so the smallest
# figure found stands here: what fits it fits the others.
_EXACT = "total bytes reported by the driver"
_LOGS = "total_memory that PyTorch prints, in MiB; the smallest of several public logs"
_LOG = "total_memory that PyTorch prints, in MiB; one public log"

DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        DeviceSpec("B200-180GB", 182_631 * MIB, (10, 0), 148, _LOGS),
        DeviceSpec("H200-141GB", 143_156 * MIB, (9, 0), 132, _LOGS),
        DeviceSpec("H100-80GB", 81_082 * MIB, (9, 0), 132, _LOGS, ("H100-80GB-HBM3", "H100-SXM5-80GB")),
        DeviceSpec("H100-PCIe-80GB", 81_008 * MIB, (9, 0), 114, _LOG, ("H100-80GB-PCIe",)),
        DeviceSpec("A100-80GB", 81_038 * MIB, (8, 0), 108, _LOGS, ("A100-SXM4-80GB", "A100-80GB-PCIe")),
        DeviceSpec("A100-40GB", 42_474_471_424, (8, 0), 108, _EXACT, ("A100-SXM4-40GB", "A100-PCIe-40GB")),
        DeviceSpec("V100-32GB", 32_494 * MIB, (7, 0), 80, _LOGS, ("V100-SXM2-32GB", "V100-PCIe-32GB")),
        DeviceSpec("V100-16GB", 16_130 * MIB, (7, 0), 80, _LOGS, ("V100-SXM2-16GB", "V100-PCIe-16GB")),
        DeviceSpec("T4-16GB", 14_930 * MIB, (7, 5), 40, _LOGS),
        DeviceSpec("L4-24GB", 22_563 * MIB, (8, 9), 58, _LOGS),
        DeviceSpec("L40S-48GB", 45_495 * MIB, (8, 9), 142, _LOGS),
        # The log is of an A10G, its sibling with the same memory and 80 multiprocessors.
        DeviceSpec("A10-24GB", 22_587 * MIB, (8, 6), 80, _LOG, ("A10G", "A10G-24GB")),
        DeviceSpec("A6000-48GB", 48_676 * MIB, (8, 6), 84, _LOGS, ("RTX-A6000",)),
        DeviceSpec("RTX6000Ada-48GB", 50_865_307_648, (8, 9), 142, _EXACT, ("RTX-6000-Ada-Generation",)),
        DeviceSpec("RTX5090-32GB", 32_102 * MIB, (12, 0), 170, _LOGS),
        DeviceSpec("RTX5080-16GB", 15_840 * MIB, (12, 0), 84, _LOG),
        DeviceSpec("RTX4090-24GB", 24_081 * MIB, (8, 9), 128, _LOGS),
        DeviceSpec("RTX4080-16GB", 16_049 * MIB, (8, 9), 76, _LOG),
        DeviceSpec("RTX4070TiSuper-16GB", 16_069 * MIB, (8, 9), 66, _LOG),
        DeviceSpec("RTX4070Ti-12GB", 12_007 * MIB, (8, 9), 60, _LOG),
        DeviceSpec("RTX4070-12GB", 11_994 * MIB, (8, 9), 46, _LOGS),
        DeviceSpec("RTX4060-8GB", 8_318_222_336, (8, 9), 24, _EXACT),
        DeviceSpec("RTX3090-24GB", 24_124 * MIB, (8, 6), 82, _LOGS),
        DeviceSpec("RTX3080Ti-12GB", 11_910 * MIB, (8, 6), 80, _LOGS),
        DeviceSpec("RTX3080-10GB", 10_002 * MIB, (8, 6), 68, _LOGS),
        DeviceSpec("RTX3070-8GB", 7_973 * MIB, (8, 6), 46, _LOG),
        DeviceSpec("RTX3060Ti-8GB", 7_833 * MIB, (8, 6), 38, _LOG),
        DeviceSpec("RTX3060-12GB", 12_622_168_064, (8, 6), 28, _EXACT),
        DeviceSpec("RTX2080Ti-11GB", 10_825 * MIB, (7, 5), 68, _LOGS),
        # The logs of these two are of the Super, with the same memory; it has the same or more multiprocessors.
        DeviceSpec("RTX2080-8GB", 7_982 * MIB, (7, 5), 48, _LOGS, ("RTX-2080-Super",)),
        DeviceSpec("RTX2070-8GB", 7_972 * MIB, (7, 5), 40, _LOGS, ("RTX-2070-Super",)),
        DeviceSpec("RTX2060-6GB", 5_918 * MIB, (7, 5), 30, _LOG),
        DeviceSpec("GTX1660Ti-6GB", 5_914 * MIB, (7, 5), 24, _LOG),
        DeviceSpec("GTX1660-6GB", 5_928 * MIB, (7, 5), 22, _LOGS, ("GTX-1660-Super",)),
        DeviceSpec("GTX1080Ti-11GB", 11_172 * MIB, (6, 1), 28, _LOGS),
    )
}


def find_device(name: str, *, otherwise: str = "give the memory of your device instead") -> DeviceSpec:
    """Look a device up by its catalogue name, its driver's name or its model alone.

    Case, spaces, hyphens and a leading ``NVIDIA``, ``GeForce`` or ``Tesla`` do not matter. A model that is
    sold with one capacity needs no capacity in its name.

    Args:
        name: For example ``"A100-80GB"``, ``"NVIDIA A100-SXM4-80GB"`` or ``"rtx 3090"``.
        otherwise: What the message advises for a card that is not in the catalogue.

    Returns:
        The entry of the catalogue.

    Raises:
        ValueError: If no entry, or more than one, has that name; the message lists near matches.

    Example:
        >>> find_device("NVIDIA GeForce RTX 3060").name
        'RTX3060-12GB'
        >>> find_device("t4").native_bf16
        False
    """
    matches = _names().get(_normalized(name), [])
    if len(matches) == 1:
        return matches[0]
    near = [spec.name for spec in matches] or _near_matches(name)
    fact = f"{name!r} is more than one device" if matches else f"Unknown device {name!r}"
    hint = f"Did you mean {', '.join(near)}? " if near else ""
    raise ValueError(f"{fact}. {hint}Use a name of the catalogue ({', '.join(DEVICES)}), or {otherwise}.")


def _normalized(name: str) -> str:
    return re.sub(r"^(nvidia|geforce|tesla)+", "", re.sub(r"[\s_-]", "", name.lower()))


def _names() -> dict[str, list[DeviceSpec]]:
    """Return every normalized name with the devices that bear it."""
    names: dict[str, list[DeviceSpec]] = {}
    for spec in DEVICES.values():
        for name in {_normalized(n) for n in (spec.name, spec.name.rsplit("-", 1)[0], *spec.aliases)}:
            names.setdefault(name, []).append(spec)
    return names


def _near_matches(name: str) -> list[str]:
    known = _names()
    wanted = _normalized(name)
    close = difflib.get_close_matches(wanted, [n for n in known if _same_number(n, wanted)], n=3)
    return list(dict.fromkeys(spec.name for match in close for spec in known[match]))


def _same_number(known: str, wanted: str) -> bool:
    """Tell whether two model numbers can be the same one, cut or with a digit too many: 1660 is never 1080."""
    numbers = [match[0] if (match := re.search(r"\d+", name)) else "" for name in (known, wanted)]
    return numbers[0].startswith(numbers[1]) or numbers[1].startswith(numbers[0])
