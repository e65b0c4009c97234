"""Sharded training steps whose memory on one rank is measured and estimated; used by ``test_sharding_cpu.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memprec.memory.sharding.strategies import DDP, FSDP, FullyShard, Strategy


@dataclass(frozen=True)
class ShardedCase:
    name: str
    build: Callable[[], tuple[nn.Module, Any]]
    strategy: Strategy
    ranks: int = 2
    precision: str = "32-true"
    accumulate: int = 1
    clip: float | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    quick: bool = False


class Encoder(nn.Module):
    def __init__(self, layers: int = 3, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(501, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 501)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, channels: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = norm(channels) if norm is nn.BatchNorm2d else norm(8, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(torch.relu(self.norm(self.conv1(x))))


class ConvNet(nn.Module):
    def __init__(self, channels: int = 96, blocks: int = 3, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(channels, norm) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class SplitBlock(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_width = width // heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = (m(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class SplitEncoder(nn.Module):
    """Splits its layers over a mesh, as a LightningModule's ``configure_model`` does."""

    _device_mesh = None

    def __init__(self, width: int = 96, *, by_sequence: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(501, width)
        self.layers = nn.ModuleList(SplitBlock(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 501)
        self.by_sequence = by_sequence

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def shard(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        mesh = self._device_mesh["tensor_parallel"]
        between = Shard(1) if self.by_sequence else Replicate()
        norms = SequenceParallel() if self.by_sequence else None
        for layer in self.layers:
            columns = {name: ColwiseParallel(input_layouts=between) for name in ("q", "k", "v", "up")}
            rows = {name: RowwiseParallel(output_layouts=between) for name in ("out", "down")}
            parallelize_module(
                layer, mesh, columns | rows | ({"norm1": norms, "norm2": norms} if norms else {})
            )
        ends = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        }
        parallelize_module(self, mesh, ends | ({"norm": norms} if norms else {}))
        if self._device_mesh["data_parallel"].size() > 1:
            for block in (*self.layers, self):
                fully_shard(block, mesh=self._device_mesh["data_parallel"])


def split_encoder() -> tuple[nn.Module, Any]:
    return SplitEncoder(), encoder()[1]


def split_encoder_by_sequence() -> tuple[nn.Module, Any]:
    return SplitEncoder(by_sequence=True), encoder()[1]


def encoder() -> tuple[nn.Module, Any]:
    return Encoder(), (torch.randint(501, (4, 32)), torch.randint(501, (4, 32)))


def convnet() -> tuple[nn.Module, Any]:
    return ConvNet(), (torch.randn(4, 3, 16, 16), torch.randint(10, (4,)))


def convnet_in_half() -> tuple[nn.Module, Any]:
    # On a CPU batch norm takes no half weights beside full statistics.
    return ConvNet(norm=nn.GroupNorm), (torch.randn(4, 3, 16, 16), torch.randint(10, (4,)))


def loss(module: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(module(inputs).float().flatten(0, -2), targets.flatten())


_SPLIT = FullyShard(by_module=True, tensor_parallel_size=2)
_BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}

CASES = {
    case.name: case
    for case in (
        ShardedCase("ddp_encoder", encoder, DDP(), quick=True),
        ShardedCase("ddp_convnet", convnet, DDP(), clip=1.0),
        ShardedCase("ddp_convnet_view", convnet, DDP(gradient_as_bucket_view=True), quick=True),
        ShardedCase("ddp_encoder_view_small_buckets", encoder, DDP(gradient_as_bucket_view=True, bucket_cap_mb=0.5)),
        ShardedCase("ddp_encoder_static", encoder, DDP(static_graph=True)),
        ShardedCase("ddp_encoder_find_unused", encoder, DDP(find_unused_parameters=True)),
        ShardedCase("ddp_encoder_accumulate", encoder, DDP(), accumulate=2),
        ShardedCase("ddp_encoder_bf16", encoder, DDP(), precision="bf16-true"),
        ShardedCase("ddp_encoder_4", encoder, DDP(), ranks=4),
        ShardedCase("fsdp1_encoder", encoder, FSDP(), quick=True),
        ShardedCase("fsdp1_convnet", convnet, FSDP()),
        ShardedCase("fsdp1_encoder_grad_op", encoder, FSDP(sharding_strategy="SHARD_GRAD_OP")),
        ShardedCase("fsdp1_convnet_no_shard", convnet, FSDP(sharding_strategy="NO_SHARD")),
        ShardedCase("fsdp1_encoder_accumulate", encoder, FSDP(), accumulate=2),
        ShardedCase("fsdp1_encoder_bf16", encoder, FSDP(), precision="bf16-true"),
        ShardedCase("fsdp1_encoder_root_only", encoder, FSDP(wrap=())),
        ShardedCase("fsdp1_encoder_4", encoder, FSDP(), ranks=4),
        ShardedCase("fsdp2_encoder", encoder, FullyShard(), quick=True),
        ShardedCase("fsdp2_convnet", convnet, FullyShard(), quick=True),
        ShardedCase("fsdp2_encoder_keep", encoder, FullyShard(reshard_after_forward=False)),
        ShardedCase("fsdp2_convnet_keep", convnet, FullyShard(reshard_after_forward=False)),
        ShardedCase("fsdp2_encoder_bf16", encoder, FullyShard(**_BF16), quick=True),
        ShardedCase("fsdp2_convnet_bf16", convnet_in_half, FullyShard(**_BF16)),
        ShardedCase("fsdp2_encoder_bf16_keep", encoder, FullyShard(**_BF16, reshard_after_forward=False)),
        ShardedCase("fsdp2_convnet_bf16_keep", convnet_in_half, FullyShard(**_BF16, reshard_after_forward=False)),
        ShardedCase("fsdp2_encoder_accumulate_clip", encoder, FullyShard(), accumulate=2, clip=1.0),
        ShardedCase("fsdp2_encoder_4", encoder, FullyShard(), ranks=4),
        ShardedCase("fsdp2_convnet_4", convnet, FullyShard(), ranks=4),
        ShardedCase("fsdp2_encoder_4_groups_of_2", encoder, FullyShard(reshard_after_forward=2), ranks=4),
        ShardedCase("fsdp2_encoder_4_bf16_keep", encoder, FullyShard(**_BF16, reshard_after_forward=False), ranks=4),
        ShardedCase("split_encoder", split_encoder, _SPLIT),
        ShardedCase("split_encoder_by_sequence", split_encoder_by_sequence, _SPLIT),
    )
}  # fmt: skip
