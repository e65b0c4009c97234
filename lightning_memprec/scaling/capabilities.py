"""What a device multiplies natively: the ground on which a precision is chosen.

Emulation does not count. ``torch.cuda.is_bf16_supported()`` answers ``True`` on a T4 and on a V100, because a
bfloat16 tensor can be made there; its products are then computed in FP32 after a conversion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

__all__ = [
    "Capabilities",
    "capabilities_of_cpu",
    "capabilities_of_cuda",
    "capabilities_of_rocm",
    "detect_capabilities",
]

Kind = Literal["cuda", "rocm", "cpu", "mps", "xpu"]

# CUDA C++ Programming Guide, "Features and Technical Specifications": tensor cores from 7.0, bfloat16 and TF32
# from 8.0; "Arithmetic Instructions": half precision at least as fast as single in 5.3, 6.0, 6.2 and from 7.0
# on, at 1/64 of it in 6.1 (GTX 10xx).
_TENSOR_CORES_FROM = (7, 0)
_BF16_FROM = (8, 0)
_EARLY_FAST_FP16 = frozenset({(5, 3), (6, 0), (6, 2)})
# Of the cards with 7.5 only these have tensor cores; GTX 16xx, T400 to T1000 and MX 450 have none.
_TURING_WITH_TENSOR_CORES = re.compile(r"RTX|\bT4G?\b")
# AMD's matrix cores: MI100, MI200, MI300 series (CDNA) and WMMA of RDNA 3 and later.
_AMD_MATRIX_CORES = re.compile(r"gfx(908|90a|94\w|95\w|11\w\w|12\w\w)")
# Names of ``torch.cpu.get_capabilities``: x86, then ARM.
_CPU_BF16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
_CPU_FP16 = ("avx512_fp16", "amx_fp16", "fp16_arith")


@dataclass(frozen=True)
class Capabilities:
    """What one device computes natively.

    Args:
        device: Name of the device, for people.
        kind: Which backend of torch drives it.
        native_bf16: Whether bfloat16 products are computed by hardware.
        native_fp16: Whether float16 products are computed by hardware, at least as fast as float32.
        matrix_units: Whether it has tensor cores, matrix cores or AMX; ``None`` where torch does not tell.
        tf32: Whether float32 products can run on tensor cores as TF32.
        reason: How this is known, in one sentence.

    Example:
        >>> capabilities_of_cuda("T4", (7, 5)).native_bf16
        False
    """

    device: str
    kind: Kind
    native_bf16: bool
    native_fp16: bool
    matrix_units: bool | None
    tf32: bool
    reason: str

    @property
    def fast_bf16(self) -> bool:
        """Whether matrix units multiply bfloat16.

        Vector instructions alone do not count: PyTorch accumulates in float32, so without matrix units half
        products gain no time. On a Xeon with AVX512-BF16 and no AMX they take about twice as long as FP32
        (``benchmarks/half_products.py``).
        """
        return self.native_bf16 and bool(self.matrix_units)

    @property
    def fast_fp16(self) -> bool:
        """Whether matrix units multiply float16; see :attr:`fast_bf16`."""
        return self.native_fp16 and bool(self.matrix_units)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, ready for JSON."""
        return asdict(self)


def detect_capabilities(device: str | torch.device | None = None) -> Capabilities:
    """Ask a device of this machine what it computes natively.

    Args:
        device: A device of this machine, such as ``"cuda:1"`` or ``"cpu"``. Default: its accelerator, or the
            CPU where there is none.

    Returns:
        The capabilities.

    Raises:
        ValueError: If this machine has no such device, or torch has no such kind of device.

    Example:
        >>> detect_capabilities("cpu").kind
        'cpu'
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is no device of torch. Use 'cuda', 'cpu', 'mps' or 'xpu'.") from error
    if device.type == "cpu":
        return _cpu()
    detect = {"cuda": _cuda, "mps": _mps, "xpu": _xpu}.get(device.type)
    if detect is None:
        raise ValueError(f"`{device.type}` devices are not known. Give `capabilities=Capabilities(...)`.")
    if not getattr(torch, device.type).is_available():
        raise ValueError(
            f"This machine has no usable `{device.type}` device. Name a card of the catalogue, such as "
            "'A100-80GB', to plan for another machine."
        )
    return detect(device)


def capabilities_of_cuda(name: str, compute_capability: tuple[int, int]) -> Capabilities:
    """Derive the capabilities of an NVIDIA device from its compute capability.

    Args:
        name: Name of the device; tells cards with tensor cores from those without among those of 7.5.
        compute_capability: ``(major, minor)``.

    Returns:
        The capabilities.

    Example:
        >>> card = capabilities_of_cuda("NVIDIA GeForce GTX 1660", (7, 5))
        >>> card.native_fp16, card.matrix_units
        (True, False)
    """
    cc = compute_capability
    bf16 = cc >= _BF16_FROM
    fp16 = cc >= _TENSOR_CORES_FROM or cc in _EARLY_FAST_FP16
    cores = cc >= _TENSOR_CORES_FROM and (cc != (7, 5) or bool(_TURING_WITH_TENSOR_CORES.search(name)))
    formats = [*(["bfloat16"] if bf16 else []), *(["float16"] if fp16 else [])]
    able = f"multiplies {' and '.join(formats)} natively" if formats else "has no fast half precision"
    reason = (
        f"compute capability {cc[0]}.{cc[1]} {able} and has {'' if cores else 'no '}tensor cores"
        f"{'' if bf16 else '; bfloat16 would be emulated (native from 8.0 on)'}"
    )
    return Capabilities(name, "cuda", bf16, fp16, cores, tf32=bf16, reason=reason)


def capabilities_of_rocm(name: str, architecture: str) -> Capabilities:
    """Derive the capabilities of an AMD device from its architecture.

    Args:
        name: Name of the device.
        architecture: Name of the architecture as ROCm gives it, such as ``"gfx90a:sramecc+:xnack-"``.

    Returns:
        The capabilities.
    """
    target = architecture.partition(":")[0]
    cores = _AMD_MATRIX_CORES.fullmatch(target) is not None
    reason = f"architecture {target} has {'' if cores else 'no '}matrix cores for bfloat16 and float16"
    return Capabilities(name, "rocm", cores, cores, cores, tf32=False, reason=reason)


def capabilities_of_cpu(name: str, features: Mapping[str, Any]) -> Capabilities:
    """Derive the capabilities of a CPU from its instruction sets.

    Args:
        name: Name of the processor.
        features: Instruction sets by name, as ``torch.cpu.get_capabilities`` returns them.

    Returns:
        The capabilities; ``matrix_units`` tells of AMX, and is ``None`` on ARM.

    Example:
        >>> cpu = capabilities_of_cpu("Xeon", {"avx512_bf16": True})
        >>> cpu.native_bf16, cpu.matrix_units
        (True, False)
    """
    bf16, fp16 = ([n for n in names if features.get(n)] for names in (_CPU_BF16, _CPU_FP16))
    found = [f"{dtype} ({', '.join(n)})" for dtype, n in (("bfloat16", bf16), ("float16", fp16)) if n]
    arm = str(features.get("architecture", "")).lower() in ("arm64", "aarch64")
    units = None if arm else bool(features.get("amx_bf16") or features.get("amx_fp16"))
    able = (
        f"has instructions for {' and '.join(found)}" if found else "has no instructions for half precision"
    )
    reason = f"the processor {able}{'' if units or arm else ', and no matrix unit (AMX)'}"
    return Capabilities(name, "cpu", bool(bf16), bool(fp16), units, tf32=False, reason=reason)


def _cuda(device: torch.device) -> Capabilities:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return capabilities_of_rocm(properties.name, properties.gcnArchName)
    return capabilities_of_cuda(properties.name, (properties.major, properties.minor))


def _cpu() -> Capabilities:
    # Older versions of torch have private probes only, and those for x86 alone.
    if hasattr(torch.cpu, "get_capabilities"):
        features = torch.cpu.get_capabilities()
    else:
        features = {
            name: getattr(torch.cpu, probe, bool)()
            for name, probe in (
                ("avx512_bf16", "_is_avx512_bf16_supported"),
                # Tiles come with bfloat16 in every processor that has them.
                ("amx_bf16", "_is_amx_tile_supported"),
                ("amx_fp16", "_is_amx_fp16_supported"),
            )
        }
    return capabilities_of_cpu(str(features.get("cpu_name", "cpu")), features)


def _mps(device: torch.device) -> Capabilities:
    reason = "Apple GPUs compute float16 natively; torch does not tell whether this one does bfloat16"
    return Capabilities("mps", "mps", False, True, None, tf32=False, reason=reason)


def _xpu(device: torch.device) -> Capabilities:
    properties = torch.xpu.get_device_properties(device)
    bf16 = torch.xpu.is_bf16_supported(including_emulation=False)
    fp16 = bool(getattr(properties, "has_fp16", False))
    units = getattr(properties, "has_subgroup_matrix_multiply_accumulate", None)
    return Capabilities(properties.name, "xpu", bf16, fp16, units, tf32=False, reason="torch.xpu says so")
