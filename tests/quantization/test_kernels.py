"""Kernels: right answers on every backend, the probe that finds wrong ones, and what explains the choice."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from lightning_memprec.quantization import kernels, kernels_portable
from lightning_memprec.quantization.affine import dequantize
from lightning_memprec.quantization.kernels import explain, probe, select
from lightning_memprec.quantization.kernels_base import Kernel
from lightning_memprec.quantization.kernels_int8 import BitsAndBytes, Fbgemm, IntMM, OneDNN
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.modules.linear import Int8Linear

CPU = torch.device("cpu")
CPU_KERNELS = [OneDNN(), IntMM("cpu"), Fbgemm(), Fbgemm(weight_bits=7)]


def layer(weight, **scheme):
    scheme = Scheme(**scheme)
    return Int8Linear(scheme.quantize(weight), None, scheme, torch.float32)


def by_integers(values, layer):
    """Vector-wise product by the book: int8 rows times int8 columns, summed in int64, rescaled in float64."""
    scale = values.double().abs().amax(1, keepdim=True) / 127
    integers = (values.double() / scale).round().long()
    return (integers @ layer.weight.long().t()).double() * scale * layer.weight_scale.double().flatten()


def run(kernel, values, layer):
    return kernel.run(values, layer, kernel.pack(layer))


def trusted(kernel):
    if probe(kernel, CPU) is not None:
        pytest.skip(f"refused on this machine: {probe(kernel, CPU)}")
    return kernel


@pytest.mark.parametrize("features", [2, 64, 1000])
@pytest.mark.parametrize("activations", ["token", "tensor"])
@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda k: k.name)
def test_ones_are_summed_exactly(kernel, activations, features):
    ones = layer(torch.ones(9, features), activations=activations)
    answer = run(trusted(kernel), torch.ones(17, features), ones)
    # Scales are 1/127 in FP32; 32-bit sums are exact.
    torch.testing.assert_close(answer, torch.full((17, 9), float(features)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(1, 8, 64), (3, 1, 64), (3, 8, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("activations", ["float", "token", "tensor"])
def test_ones_are_summed_exactly_by_whatever_was_chosen(activations, shape):
    tokens, channels, features = shape
    model = layer(torch.ones(channels, features), activations=activations)
    ones = torch.ones(1, 1).expand(tokens, features)  # Strides of 0.
    exact = torch.full((tokens, channels), float(features))
    torch.testing.assert_close(model(ones), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kernel", [OneDNN(), IntMM("cpu")], ids=lambda k: k.name)
def test_exact_kernels_are_the_product_of_integers(kernel):
    torch.manual_seed(0)
    model, values = layer(torch.randn(24, 37), activations="token"), torch.randn(5, 37)
    answer = run(trusted(kernel), values, model)
    # Only the scales are rounded to FP32; a rounding of activations to the other side of a half would show.
    torch.testing.assert_close(answer.double(), by_integers(values, model), rtol=1e-5, atol=1e-5)


def test_bitsandbytes_is_the_product_of_integers():
    # Its operator has a CPU form, which is not used but shows that it is called rightly.
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model, values = layer(torch.randn(24, 32), activations="token"), torch.randn(5, 32)
    answer = BitsAndBytes().run(values, model, None)
    torch.testing.assert_close(answer.double(), by_integers(values, model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 7], ids=lambda bits: f"{bits} bits")
def test_fbgemm_is_near_the_product_of_integers(bits):
    torch.manual_seed(0)
    kernel = trusted(Fbgemm(weight_bits=bits))
    model, values = layer(torch.randn(24, 256), activations="token"), torch.randn(5, 256)
    values[2] *= 1000  # Token-wise: one large row must not spoil the others.
    values[3] = 0
    exact = values @ dequantize(model.weight, model.weight_scale, None).t()
    error = (run(kernel, values, model) - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-9)
    # Rounding of activations to 1/127.5, and of weights to 1/63 for 7 bits, of the largest of 256 values.
    assert error.max() < 0.03
    assert error[3] == 0


SATURATED = """
import torch
from lightning_memprec.quantization.kernels import explain, probe
from lightning_memprec.quantization.kernels_int8 import IntMM
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.modules.linear import Int8Linear

scheme = Scheme(activations="token")
layer = Int8Linear(scheme.quantize(torch.ones(8, 64)), None, scheme, torch.float32)
torch.testing.assert_close(layer(torch.ones(3, 64)), torch.full((3, 8), 64.0), rtol=1e-5, atol=0)
print(probe(IntMM("cpu"), torch.device("cpu")), "|", explain(layer))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="limits an x86 instruction set")
def test_a_library_that_saturates_is_refused():
    # Real saturation in oneDNN, on any x86 machine.
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run(
        [sys.executable, "-c", SATURATED], env=environment, capture_output=True, text=True, check=True
    )
    refusal, _, explanation = run.stdout.partition(" | ")
    assert refusal.startswith("it saturates: 64 times 1 gave")
    assert not explanation.startswith("torch._int_mm")


def test_engine_is_put_back():
    before = torch.backends.quantized.engine
    run(Fbgemm(), torch.ones(2, 8), layer(torch.ones(4, 8), activations="token"))
    assert torch.backends.quantized.engine == before


@dataclass(frozen=True)
class Saturating(Kernel):
    """u8 times s8 added in pairs in 16 bits, as ``vpmaddubsw`` does on CPUs without VNNI."""

    weight_bits: int = 8
    name = "saturating"
    device_type = "cpu"

    def fits(self, layer):
        return None

    def run(self, values, layer, packed):
        scale = values.abs().amax(1, keepdim=True) / 127
        integers = (values / scale).round().long() + 128
        weight = layer.weight.long()
        if self.weight_bits == 7:
            weight = (weight * 63 / 127).round().long()
        products = integers[:, None, :] * weight[None]
        pairs = products.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1)
        sums = pairs.sum(-1) - 128 * weight.sum(-1)
        narrow = 127 / 63 if self.weight_bits == 7 else 1
        return sums.float() * scale * layer.weight_scale.flatten() * narrow


def test_probe_refuses_saturation_and_accepts_seven_bits():
    assert probe(Saturating(), CPU).startswith("it saturates: 64 times 1 gave 0.")
    assert probe(Saturating(weight_bits=7), CPU) is None


def test_probe_names_what_a_kernel_raises():
    class Broken(Saturating):
        def run(self, values, layer, packed):
            raise RuntimeError("no such operator\nsecond line")

    assert probe(Broken(), CPU) == "RuntimeError: no such operator"


def test_probe_refuses_wrong_answers():
    class Transposed(Saturating):
        def run(self, values, layer, packed):
            return super().run(values.flip(1), layer, packed)

    assert probe(Transposed(weight_bits=7), CPU).startswith("it is wrong:")


def test_next_kernel_is_taken_and_explained(monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", (Saturating(), Saturating(weight_bits=7)))
    model = layer(torch.randn(8, 64), activations="token")
    assert select(model) == Saturating(weight_bits=7)
    assert explain(model).startswith("saturating on cpu (not saturating: it saturates: 64 times 1 gave")


def test_portable_kernel_is_what_remains(monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", ())
    torch.manual_seed(0)
    model, values = layer(torch.randn(24, 37), activations="token"), torch.randn(5, 37)
    assert select(model) is None
    assert explain(model) == "portable block-wise dequantization (no int8 kernel for cpu)"
    # FP32 sums instead of integer ones.
    torch.testing.assert_close(model(values).double(), by_integers(values, model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ({}, "activations stay in floating point"),
        ({"activations": "token", "mapping": "affine"}, "zero points need the portable kernel"),
        (
            {"activations": "token", "weight_granularity": "group", "group_size": 8},
            "scales of groups need the portable kernel",
        ),
    ],
    ids=["weight only", "affine", "group"],
)
def test_what_needs_the_portable_kernel(scheme, reason):
    assert explain(layer(torch.randn(8, 64), **scheme)) == f"portable block-wise dequantization ({reason})"


def test_blocks_cover_all_channels(monkeypatch):
    monkeypatch.setattr(kernels_portable, "_BLOCK_ELEMENTS", 100)
    model = layer(torch.randn(23, 16))
    assert list(kernels_portable.blocks(model)) == [(0, 6), (6, 12), (12, 18), (18, 23)]
    values = torch.randn(4, 16)
    torch.testing.assert_close(model(values), values @ model.dequantize().t())
