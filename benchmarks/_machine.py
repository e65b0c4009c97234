"""What every benchmark prints first: the machine and the versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

__all__ = ["describe_machine"]

_PACKAGES = (
    "lightning-memprec", "torch", "lightning", "torchvision", "timm", "transformers", "peft", "torch-optimi", "torchao",
    "bitsandbytes",
)  # fmt: skip


def describe_machine() -> str:
    """Return machine and versions on two lines."""
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            processor = next(
                line.partition(":")[2].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        pass
    machine = f"{processor}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
    versions = [f"python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"{machine}\n{', '.join(versions)}"
