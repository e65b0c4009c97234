"""Are half products faster than FP32 on this device? Time of a matrix product, as a ratio to FP32.

Run with ``python -m benchmarks.half_products``. The answer decides whether vector instructions for bfloat16
without matrix units (AMX, tensor cores) are a reason to train in bf16.
"""

from __future__ import annotations

import time

import torch

from benchmarks._machine import describe_machine
from lightning_memprec.scaling.capabilities import detect_capabilities

REPEATS = 15


def seconds(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the shortest time of one product of two square matrices."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        (left @ right).sum().item()  # reading the value waits for the device
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    capabilities = detect_capabilities()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    print(describe_machine())
    print(f"{capabilities.device}: {capabilities.reason}\n")
    print(f"{'size':>6}{'fp32 ms':>10}{'bf16 / fp32':>13}{'fp16 / fp32':>13}")
    for size in (256, 512, 1024):
        full, bf16, fp16 = (seconds(size, d, device) for d in (torch.float32, torch.bfloat16, torch.float16))
        print(f"{size:>6}{full * 1e3:>10.3f}{bf16 / full:>13.2f}{fp16 / full:>13.2f}")


if __name__ == "__main__":
    main()
