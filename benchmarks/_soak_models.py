"""Plain nets that ``benchmarks/soak.py`` draws at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._soak_draw import CHECKPOINTING, DROPOUTS, Draw, Drawn, Stack, activation_of

__all__ = ["FAMILIES"]


class _Scaled(nn.Module):
    """Pictures of bytes become floats of the precision's type."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.get_default_dtype()) / 255


def _mlp(draw: Draw) -> Drawn:
    width, batch = draw.pick("width", [64, 200, 512, 777]), draw.pick("batch", [500, 1024, 4096])
    depth, dropout = draw.pick("depth", [1, 2, 4]), draw.pick("dropout", DROPOUTS)
    norm = draw.pick("norm", [None, nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm])
    activation, bias = activation_of(draw), draw.pick("bias", [True, True, False])
    residual, checkpointing = (
        draw.pick("residual", [False, True]),
        draw.pick("checkpointing", CHECKPOINTING),
    )

    def block() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(width, width, bias=bias)]
        layers += [norm(width)] if norm is not None else []
        layers += [activation(), nn.Dropout(dropout)]
        return nn.Sequential(*layers)

    def build() -> tuple[nn.Module, Any]:
        stack = Stack([block() for _ in range(depth)], residual=residual, checkpointing=checkpointing)
        return nn.Sequential(stack, nn.Linear(width, 50)), torch.randn(batch, width)

    return Drawn(build, classes=draw.pick("classes", [True, False]))


def _convolutions(draw: Draw) -> Drawn:
    dim = draw.pick("dim", [1, 2, 2, 2, 3])
    size = draw.pick("size", {1: [500, 2048], 2: [32, 45, 64], 3: [12, 16]}[dim])
    channels, batch = draw.pick("channels", [16, 32, 48, 96]), draw.pick("batch", [4, 8])
    kernel, stride = draw.pick("kernel", [1, 3, 5]), draw.pick("stride", [1, 1, 2])
    groups = draw.pick("groups", [1, 1, 4, channels])
    depth, last = draw.pick("depth", [1, 2, 3]), dim == 2 and draw.pick("channels_last", [False, False, True])
    layers = {1: (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d),
              2: (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
              3: (nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d)}[dim]  # fmt: skip
    conv, batch_norm, max_pool, mean_pool, adaptive = layers
    norm = draw.pick("norm", ["none", "batch", "group", "instance"])
    pool = draw.pick("pool", [nn.Identity, max_pool, mean_pool])
    activation, pictures = activation_of(draw), draw.pick("input", ["float", "float", "bytes"])
    mode = draw.pick("padding_mode", ["zeros", "zeros", "zeros", "reflect", "circular"])
    dropout = draw.pick("dropout", DROPOUTS)

    def normalization() -> nn.Module:
        return {
            "none": nn.Identity(), "batch": batch_norm(channels), "group": nn.GroupNorm(4, channels),
            "instance": nn.GroupNorm(channels, channels),
        }[norm]  # fmt: skip

    def build() -> tuple[nn.Module, Any]:
        blocks: list[nn.Module] = [
            conv(3, channels, 3, padding=1),
            normalization(),
            activation(),
            pool(2) if pool is not nn.Identity else pool(),
        ]
        for _ in range(depth):
            blocks.append(
                conv(channels, channels, kernel, stride, kernel // 2, groups=groups, padding_mode=mode)
            )
            blocks += [normalization(), activation(), nn.Dropout(dropout)]
        head = [adaptive(1), nn.Flatten(), nn.Linear(channels, 10)]
        x = torch.randn(batch, 3, *[size] * dim)
        if pictures == "bytes":
            x = torch.randint(0, 256, x.shape, dtype=torch.uint8)
        first = [_Scaled()] if pictures == "bytes" else []
        model = nn.Sequential(*first, *blocks, *head)
        if last:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        return model, x

    return Drawn(build)


class _UNet(nn.Module):
    def __init__(self, channels: int, up: str) -> None:
        super().__init__()
        self.inner = nn.ModuleList(
            [nn.Conv2d(3 if i == 0 else channels << (i - 1), channels << i, 3, padding=1) for i in range(3)]
        )
        self.outer = nn.ModuleList(
            [nn.Conv2d(3 * (channels << i), channels << i, 3, padding=1) for i in (1, 0)]
        )
        self.up, self.head = up, nn.Conv2d(channels, 3, 1)
        # Each halves the channels of nothing: what is enlarged keeps them.
        self.enlarge = nn.ModuleList(
            [nn.ConvTranspose2d(channels << i, channels << i, 2, 2) for i in (2, 1)]
            if up == "learned"
            else []
        )

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, layer in enumerate(self.inner):
            x = nn.functional.relu(layer(nn.functional.max_pool2d(x, 2) if i else x))
            kept.append(x)
        for i, layer in enumerate(self.outer):
            x = (
                self.enlarge[i](x)
                if self.up == "learned"
                else nn.functional.interpolate(x, scale_factor=2, mode=self.up)
            )
            x = nn.functional.relu(layer(torch.cat([x, kept[1 - i]], 1)))
        return self.head(x)


def _unet(draw: Draw) -> Drawn:
    channels, batch, size = (
        draw.pick("channels", [16, 32]),
        draw.pick("batch", [2, 4]),
        draw.pick("size", [64, 96]),
    )
    up = draw.pick("up", ["nearest", "bilinear", "bicubic", "learned"])
    return Drawn(lambda: (_UNet(channels, up), torch.randn(batch, 3, size, size)), classes=False)


class _AutoEncoder(nn.Module):
    """A variational autoencoder; its own loss is reconstruction and divergence."""

    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent, 512), nn.ReLU(), nn.Linear(512, width))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        return nn.functional.mse_loss(self.decode(z), x) + divergence


def _autoencoder(draw: Draw) -> Drawn:
    width, latent, batch = (
        draw.pick("width", [300, 784]),
        draw.pick("latent", [16, 128]),
        draw.pick("batch", [512, 1500]),
    )
    return Drawn(lambda: (_AutoEncoder(width, latent), torch.randn(batch, width)), own_loss=True)


class _Contrastive(nn.Module):
    """Two views of each sample; every other one is a negative (arXiv 2002.05709)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, out))

    def forward(self, x: Tensor) -> Tensor:
        a, b = (nn.functional.normalize(self.net(x + 0.1 * torch.randn_like(x)), dim=-1) for _ in range(2))
        z = torch.cat([a, b])
        similar = (z @ z.t() / 0.5).masked_fill(
            torch.eye(len(z), dtype=torch.bool, device=z.device), float("-inf")
        )
        targets = (torch.arange(len(z), device=z.device) + len(x)) % len(z)
        return nn.functional.cross_entropy(similar, targets)


def _contrastive(draw: Draw) -> Drawn:
    width, out, batch = (
        draw.pick("width", [128, 400]),
        draw.pick("out", [32, 128]),
        draw.pick("batch", [300, 700]),
    )
    return Drawn(lambda: (_Contrastive(width, out), torch.randn(batch, width)), own_loss=True)


_TIMM = [
    "resnet10t", "resnet18", "mobilenetv3_small_050", "efficientnet_lite0", "convnext_atto", "regnetx_002",
    "mixer_s32_224", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "lcnet_050", "tf_efficientnet_b0",
    "mobileone_s0", "repvgg_a0", "edgenext_xx_small", "poolformer_s12", "pit_ti_224", "xcit_nano_12_p16_224",
]  # fmt: skip


def _timm(draw: Draw) -> Drawn:
    name, batch = draw.pick("model", _TIMM), draw.pick("batch", [2, 4])
    drop = draw.pick("drop_path_rate", [0.0, 0.1])

    def build() -> tuple[nn.Module, Any]:
        import timm

        model = timm.create_model(name, num_classes=10, **({"drop_path_rate": drop} if drop else {}))
        size = 224 if name.endswith("224") else 96
        return model, torch.randn(batch, 3, size, size)

    return Drawn(build)


FAMILIES: dict[str, Callable[[Draw], Drawn]] = {
    "mlp": _mlp,
    "convolutions": _convolutions,
    "unet": _unet,
    "autoencoder": _autoencoder,
    "contrastive": _contrastive,
    "timm": _timm,
}
