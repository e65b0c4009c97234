"""Small nets made of blocks, data for them, and what quantization does to each block."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn

from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.blocks import find_blocks
from lightning_memprec.quantization.reconstruction.recording import TensorStore, record, replay
from lightning_memprec.quantization.targets import find_targets

from . import digits

NETS = ("mlp", "residual", "transformer")


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(x + self.second(self.act(self.norm(self.first(x)))))


class Layer(nn.Module):
    """A transformer layer that takes its mask by keyword and answers with a tuple, as many do."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, *, mask):
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)))), None


class Transformer(nn.Module):
    def __init__(self, depth=2, width=16, words=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, tokens, padding=None):
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril().expand(len(tokens), 1, -1, -1)
        if padding is not None:
            mask = mask & ~padding[:, None, None, :]
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x, mask=mask)
        return {"logits": self.head(x)}


def sentences(count=160, length=12, words=32, seed=0):
    """Return tokens that follow from the one before, most of the time."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(words, (count, length), generator=generator)
    for place in range(1, length):
        follows = torch.rand(count, generator=generator) < 0.8
        tokens[:, place] = torch.where(follows, (3 * tokens[:, place - 1] + 1) % words, tokens[:, place])
    return tokens


@functools.cache
def _trained(kind):
    if kind == "mlp":
        return digits.trained("mlp")
    torch.manual_seed(3)
    if kind == "transformer":
        net, data, epochs = Transformer(), sentences(), 30
    else:
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2),
            nn.Sequential(Residual(8), Residual(8)),
            nn.Flatten(),
            nn.Linear(72, 10),
        )
        data, epochs = None, 4
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    images, labels, _ = digits.images()
    for _ in range(epochs):
        for rows in torch.arange(160 if data is not None else 600).split(40):
            optimizer.zero_grad()
            if data is None:
                loss = nn.functional.cross_entropy(net(images[rows]), labels[rows])
            else:
                logits = net(data[rows])["logits"][:, :-1]
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), data[rows, 1:].flatten())
            loss.backward()
            optimizer.step()
    return net.eval()


def trained(kind):
    return copy.deepcopy(_trained(kind))


def calibration(kind, count=240):
    """Return batches of 20; those of the transformer are mappings, with padding."""
    if kind != "transformer":
        return list(digits.images()[0][:count].split(20))
    batches = []
    for tokens in sentences(count, seed=1).split(20):
        padding = torch.zeros(tokens.shape, dtype=torch.bool)
        padding[::3, 9:] = True
        batches.append({"tokens": tokens, "padding": padding})
    return batches


def test_batches(kind):
    if kind == "transformer":
        return [{"tokens": tokens} for tokens in sentences(200, seed=2).split(100)]
    return list(digits.images()[2].split(300))


test_batches.__test__ = False


def call(net, batch):
    return net(**batch) if isinstance(batch, dict) else net(batch)


def calls_of(net, batches, loss=None):
    """Return the blocks of a net and their recorded calls."""
    blocks = find_blocks(net, find_targets(net, Scheme())[0])
    modules = {block.name: block.module for block in blocks}
    return blocks, record(net, modules, batches, call, TensorStore(2**30), loss)


def block_errors(kind, exact, rounded):
    """Return the squared error of each block's output on test data, fed with the float net's inputs."""
    _, calls = calls_of(exact, test_batches(kind))
    errors = {}
    with torch.no_grad():
        for name, own in calls.items():
            module = rounded.get_submodule(name)
            squares = [
                (replay(module, one).double() - one.output.load().double()).square().mean() for one in own
            ]
            errors[name] = float(torch.stack(squares).mean())
    return errors


def student_errors(kind, exact, student, rounded):
    """Return the squared error of each block's output in the student, before and after its block learned.

    Before: the block is that of ``rounded``, and the ones in front of it are the student's.
    """
    batches = test_batches(kind)
    blocks, teacher = calls_of(exact, batches)
    before, after = {}, {}
    for block in blocks:
        for errors, whole in ((before, copy.deepcopy(student)), (after, student)):
            if errors is before:
                whole.set_submodule(block.name, rounded.get_submodule(block.name))
            modules = {block.name: whole.get_submodule(block.name)}
            seen = record(whole, modules, batches, call, TensorStore(2**30))[block.name]
            squares = [
                (a.output.load().double() - b.output.load().double()).square().mean()
                for a, b in zip(seen, teacher[block.name], strict=True)
            ]
            errors[block.name] = float(torch.stack(squares).mean())
    return before, after
