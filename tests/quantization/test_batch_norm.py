"""Batch norm: folded where that is proven right, measured again after quantization, and undone if something fails."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memprec.quantization.batch_norm import (
    batch_norm_moments,
    folded_batch_norm,
    retune_batch_norm_,
)
from lightning_memprec.quantization.checkpoint import load_quantized, save_quantized
from lightning_memprec.quantization.convert import quantize_

from . import digits


def settle(net, seed=0):
    """Give batch norms statistics and factors that differ a lot from channel to channel."""
    generator = torch.Generator().manual_seed(seed)
    for part in net.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            shape = part.running_mean.shape
            part.running_mean.copy_(torch.randn(shape, generator=generator))
            part.running_var.copy_(torch.rand(shape, generator=generator) * 4 + 0.01)
            if part.affine:
                part.weight.data.copy_(torch.randn(shape, generator=generator))
                part.bias.data.copy_(torch.randn(shape, generator=generator))
    return net.eval()


class Residual(nn.Module):
    """The second convolution's output is used twice, so its batch norm cannot be folded."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, values):
        values = self.conv2(torch.relu(self.norm1(self.conv1(values))))
        return values + self.norm2(values)


class Branching(nn.Module):
    """No symbolic trace: the way through depends on values."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, values):
        values = self.body(values)
        return self.norm(self.conv(values)) if values.sum() > -1e9 else values


NETS = {
    "with a bias": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), []),
    "without a bias": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)), []),
    "depth-wise": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6), nn.ReLU()), []),
    "not affine": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False)), []),
    "one dimension": (
        lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6, eps=0.1)), [],
    ),
    "transposed, in groups": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), [],
    ),
    "used twice": (Residual, ["norm2"]),
    "no trace": (Branching, ["norm"]),
    "behind a rectifier": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)), ["2"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", NETS)
def test_folding_changes_nothing_but_the_place_of_the_factor(kind):
    torch.manual_seed(0)
    build, unfolded = NETS[kind]
    net = settle(build())
    images = torch.randn(4, 3, 8, 8)
    exact, before = net(images), copy.deepcopy(net.state_dict())
    with folded_batch_norm(net) as left:
        pass
    # FP32: factors up to 10 and sums of up to 27 products.
    torch.testing.assert_close(net(images), exact, rtol=1e-4, atol=1e-4)
    assert [skipped.name for skipped in left] == unfolded
    assert all("could not be shown to follow one convolution" in skipped.reason for skipped in left)
    for name, part in net.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            assert (part.weight is None or bool((part.weight == 1).all())) == (
                name not in unfolded or not part.affine
            )
    assert before.keys() == net.state_dict().keys()


@pytest.mark.parametrize(
    "build",
    [
        lambda conv: nn.Sequential(conv, nn.BatchNorm2d(3), conv, nn.BatchNorm2d(3)),
        lambda conv: nn.Sequential(conv, nn.BatchNorm2d(3, track_running_stats=False)),
        lambda conv: nn.Sequential(nn.utils.parametrizations.weight_norm(conv), nn.BatchNorm2d(3)),
    ],
    ids=["shared convolution", "no statistics", "parametrized"],
)
def test_what_cannot_be_folded_is_left(build):
    net = settle(build(nn.Conv2d(3, 3, 1)))
    before = copy.deepcopy(net.state_dict())
    with folded_batch_norm(net) as left:
        pass
    assert len(left) == sum(isinstance(part, nn.BatchNorm2d) for part in net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_failure_leaves_the_model_as_it_was():
    net = settle(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)))
    net[2].weight.data[0] = torch.nan
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=r"`2\.weight` cannot be quantized"):
        quantize_(net, batch_norm="fold")
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]) or name == "2.weight"


def moments_by_torch(values):
    channels = values.double().transpose(0, 1).flatten(1)
    return channels.mean(1), channels.var(1, correction=0)


def test_statistics_move_as_what_enters_moves():
    torch.manual_seed(0)
    net = settle(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)))
    batches = [torch.randn(6, 3, 8, 8) + 1, torch.randn(3, 3, 8, 8)]
    first, images = copy.deepcopy(net[1]), torch.cat(batches)
    exact, found = batch_norm_moments(net, batches), moments_by_torch(net[0](images))
    torch.testing.assert_close(tuple(exact["1"][-1]), found, rtol=1e-5, atol=1e-6)
    net[0].weight.data.mul_(1.5)
    net[0].bias.data.add_(0.3)
    modes = [part.training for part in net.train().modules()]
    retune_batch_norm_(net, exact, batches)
    moved = moments_by_torch(net[0](images))
    torch.testing.assert_close(
        net[1].running_mean.double(), first.running_mean + moved[0] - found[0], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        net[1].running_var.double(), first.running_var * moved[1] / found[1], rtol=1e-5, atol=1e-6
    )
    assert modes == [part.training for part in net.modules()]
    assert not any(part._forward_pre_hooks for part in net.modules())


def test_a_model_that_did_not_change_keeps_its_statistics():
    torch.manual_seed(0)
    net = settle(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    )
    net[0].weight.data[1], net[0].bias.data[1] = 0, 0  # A channel without variance.
    before = copy.deepcopy(net.state_dict())
    batches = [torch.randn(5, 3, 8, 8) for _ in range(2)]
    retune_batch_norm_(net, batch_norm_moments(net, batches), batches)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-6, atol=0)


def test_statistics_are_as_before_if_a_batch_is_not_finite():
    net = settle(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    before = copy.deepcopy(net.state_dict())
    good, bad = torch.randn(2, 3, 8, 8), torch.full((2, 3, 8, 8), torch.inf)
    exact = batch_norm_moments(net, [good, good])
    net[0].weight.data.mul_(2)
    with pytest.raises(ValueError, match="gives `1` an input with NaN or infinite values"):
        retune_batch_norm_(net, exact, [good, bad])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items() if name[0] == "1")


def test_arguments_that_do_not_fit():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match="must be 'keep', 'fold' or 'retune', got 'merge'"):
        quantize_(net, batch_norm="merge")
    with pytest.raises(ValueError, match="measured again on data"):
        quantize_(net, batch_norm="retune")
    assert type(net[0]) is nn.Conv2d


def depthwise():
    """Return a small net of depth-wise and point-wise convolutions, as MobileNet's."""

    def unit(inputs, outputs, stride):
        return [
            nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False), nn.BatchNorm2d(inputs),
            nn.ReLU6(), nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU6(),
        ]  # fmt: skip

    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU6(),
        *unit(12, 24, 2), *unit(24, 24, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained():
    """Train it on digits for a few epochs."""
    net = depthwise()
    pixels, labels, _ = digits.images()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        for rows in torch.randperm(len(pixels), generator=generator).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(pixels[rows]), labels[rows]).backward()
            optimizer.step()
    return net.eval()


def distance(net, exact):
    images = digits.images()[2]
    with torch.no_grad():
        return float((net(images) - exact(images)).norm() / exact(images).norm())


def test_retuning_repairs_narrow_weights(trained):
    errors = {}
    for choice in ("keep", "retune"):
        net = copy.deepcopy(trained)
        quantize_(net, bits=3, calibration=digits.calibration(), batch_norm=choice)
        errors[choice] = distance(net, trained)
    assert errors["retune"] < errors["keep"]


def test_folding_is_no_change_for_one_scale_a_channel(trained):
    nets = [copy.deepcopy(trained), copy.deepcopy(trained)]
    quantize_(nets[0], bits=4)
    report = quantize_(nets[1], bits=4, batch_norm="fold")
    assert not report.skipped
    # Integers are the same but for values at the border of two.
    same = sum(
        int((a == b).sum())
        for a, b in zip(nets[0].buffers(), nets[1].buffers(), strict=True)
        if a.dtype == torch.int8
    )
    total = sum(a.numel() for a in nets[0].buffers() if a.dtype == torch.int8)
    assert same >= 0.999 * total


@pytest.mark.parametrize("choice", ["fold", "retune"])
def test_files_of_the_unfolded_model_take_it(tmp_path, trained, choice):
    net = copy.deepcopy(trained)
    quantize_(net, "vectorwise", activations="static", calibration=digits.calibration(100), batch_norm=choice)
    save_quantized(net, tmp_path / "net.safetensors")
    again = load_quantized(tmp_path / "net.safetensors", depthwise()).eval()
    images = digits.images()[2][:20]
    with torch.no_grad():
        assert torch.equal(net(images), again(images))
    assert distance(net, trained) < 0.2
