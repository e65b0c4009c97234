"""Padded batches: the same answers as from the tokens alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memprec.quantization.calibration import feed
from lightning_memprec.quantization.convert import quantize_
from lightning_memprec.quantization.padding import MaskedForward, without_padding

LENGTHS = [5, 3, 7, 4]


class Tagger(nn.Module):
    """Looks at each token by itself, so that padding changes nothing but itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        self.body = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.body(self.embedding(input_ids)))


def sentences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 20, (1, length), generator=generator) for length in LENGTHS * 4]


def padded(dtype=torch.long):
    """Four sentences a batch, filled up with token 0 to nine."""
    batches = []
    for group in zip(*[iter(sentences())] * 4, strict=True):
        ids = torch.zeros(4, 9, dtype=torch.long)
        mask = torch.zeros(4, 9, dtype=dtype)
        for row, sentence in enumerate(group):
            ids[row, : sentence.shape[1]] = sentence
            mask[row, : sentence.shape[1]] = 1
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def together():
    """The same tokens without padding, those of a batch in one row."""
    return [{"input_ids": batch["input_ids"][batch["attention_mask"].bool()][None]} for batch in padded()]


def quantized(batches, method="gptq", **options):
    net = Tagger()
    with torch.no_grad():
        net.embedding.weight[0] = 30.0  # Padding that would spoil what is learned.
    return net, quantize_(net, method, bits=4, calibration=batches, exclude=["embedding"], **options)


@pytest.mark.parametrize("dtype", [torch.long, torch.bool], ids=str)
@pytest.mark.parametrize("method", ["gptq", "layer_wise"])
def test_padding_is_neither_learned_from_nor_measured(method, dtype):
    exact, reference = quantized(together(), method)
    ours, report = quantized(padded(dtype), method)
    spoilt, _ = quantized([{"input_ids": batch["input_ids"]} for batch in padded()], method)
    for name, value in exact.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert not torch.equal(spoilt.head.weight, exact.head.weight)
    for mine, other in zip(report.layers, reference.layers, strict=True):
        assert mine.note == other.note
        if mine.output_error is not None:
            # FP32 products of batches of another shape.
            assert mine.output_error == pytest.approx(other.output_error, rel=1e-4)


def test_padding_does_not_widen_static_activations():
    options = {"method": "absmax", "activations": "static"}
    exact, _ = quantized(together(), **options)
    ours, _ = quantized(padded(), **options)
    assert torch.equal(ours.body[0].input_scale, exact.body[0].input_scale)
    assert ours.body[0].input_scale < 30.0 / 127


def test_outliers_of_padding_do_not_count():
    options = {"method": "llm_int8", "exact_outliers": False, "outlier_threshold": 6.0}
    _, reference = quantized(together(), **options)
    _, report = quantized(padded(), **options)
    _, spoilt = quantized([{"input_ids": batch["input_ids"]} for batch in padded()], **options)
    counts = [[row.outlier_columns for row in each.layers] for each in (reference, report, spoilt)]
    assert counts[0] == counts[1]
    assert counts[0] != counts[2]


@pytest.mark.parametrize(
    ("change", "mask"),
    [
        (lambda b: {"input_ids": b["input_ids"], "real": b["attention_mask"]}, "real"),
        (
            lambda b: {"input_ids": b["input_ids"], "pad": ~b["attention_mask"].bool()},
            lambda batch: ~batch["pad"],
        ),
        (lambda b: (b, 3), None),
    ],
    ids=["key", "function", "inside a tuple"],
)
def test_masks_are_found_where_they_are_said_to_be(change, mask):
    def forward(net, batch):
        inner = batch[0] if isinstance(batch, tuple) else batch
        return net(inner["input_ids"])

    expected, _ = quantized(padded())
    ours, _ = quantized([change(batch) for batch in padded()], forward=forward, mask=mask)
    assert torch.equal(ours.head.weight, expected.head.weight)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("padding", r"no 'padding' to tell padding by\. Its keys are: input_ids, attention_mask"),
        ("input_ids", None),
        (lambda batch: batch["attention_mask"].float(), r"must be bool or integer .*, got torch\.float32 \[4, 9\]"),
        (lambda batch: batch["attention_mask"][0], r"got torch\.int64 \[9\]"),
        (lambda batch: [1, 0], "got list"),
    ],
    ids=["no key", "tokens as a mask", "float", "one dimension", "list"],
)  # fmt: skip
def test_a_mask_that_is_none_is_refused(mask, message):
    if message is None:
        quantized(padded(), mask=mask)  # Token 0 is the padding here.
        return
    with pytest.raises(ValueError, match=message):
        quantized(padded(), mask=mask)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((4, 9, 16), 19), ((36, 16), 19), ((4, 16), 4), ((4, 8, 16), 4), ((16,), 16), ((4, 9), 4)],
    ids=str,
)
def test_only_what_is_laid_out_by_tokens_is_masked(shape, rows):
    mask = padded()[0]["attention_mask"]
    forward = MaskedForward(lambda module, batch: None, lambda batch: mask)
    forward.current = mask.bool()
    values = torch.arange(torch.Size(shape).numel()).reshape(shape)
    assert len(without_padding(forward, nn.Linear(1, 1), values)) == rows
    assert without_padding(forward, nn.Conv1d(1, 1, 1), values) is values
    assert without_padding(None, nn.Linear(1, 1), values) is values


def test_a_mask_ends_with_its_batch():
    net, seen = Tagger(), []
    forward = MaskedForward(lambda module, batch: module(**batch))
    batches = [padded()[0], together()[0]]
    feed(net, batches, forward, {"head": net.head}, lambda name, rows: seen.append(len(rows)))
    assert seen == [19, 19]
    assert forward.current is None


class Sometimes(nn.Module):
    """A layer for half of the batches, and one that runs three times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.often, self.rarely = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(3):
            x = self.often(x)
        return self.rarely(x) if x.shape[0] > 20 else x


def test_layers_that_are_shared_or_rarely_used_are_named():
    data = [torch.randn(size, 8) for size in (24, 16, 24, 16)]
    net = Sometimes()
    plain = copy.deepcopy(net)
    notes = {row.name: row.note or "" for row in quantize_(net, "gptq", bits=4, calibration=data).layers}
    assert notes["often"].endswith("shared: runs 3 times in a batch")
    assert notes["rarely"].endswith("reached by 2 of 4 calibration batches")
    # Nothing is learned here, so it does not matter.
    assert [row.note for row in quantize_(plain, bits=4, calibration=data).layers] == [None, None]
