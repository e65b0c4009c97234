"""What each card holds of a run on four: DDP, FSDP, FSDP2 and ZeRO, without a GPU.

python examples/sharded.py
"""

from __future__ import annotations

import torch

from lightning_memprec import estimate_memory
from lightning_memprec._units import format_bytes
from lightning_memprec.memory.sharding.strategies import DDP, FullyShard


def build() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 8)


def main() -> None:
    strategies = {
        "DDP": "ddp",
        "DDP, gradients in buckets": DDP(gradient_as_bucket_view=True),
        "FSDP": "fsdp",
        "FSDP, CPU offload": "fsdp_cpu_offload",
        "FSDP2, bf16 weights": FullyShard(param_dtype="bfloat16"),
        "ZeRO 3": "deepspeed_stage_3",
    }
    for name, strategy in strategies.items():
        estimate = estimate_memory(
            build,
            torch.empty(4, 512, 1024),
            optimizer=torch.optim.AdamW,
            precision="bf16-mixed",
            device="A100-40GB",
            strategy=strategy,
            num_devices=4,
        )
        on_host = estimate.host.offloaded_bytes if estimate.host is not None else 0
        print(
            f"{name:28s}{format_bytes(estimate.minimum_device_bytes):>12s} a card"
            + (f", {format_bytes(on_host)} of the host" if on_host else "")
        )


if __name__ == "__main__":
    main()
