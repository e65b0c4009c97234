"""Scales, zero points and rounding against a float64 reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lightning_memprec.quantization.affine import dequantize, integer_range, quantize_matrix, spread

MAPPINGS = ["symmetric", "affine", "affine_textbook"]
GRAINS = [("tensor", None), ("channel", None), ("group", 3)]

matrices = hnp.arrays(
    "float32",
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=7),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
)


def parts(matrix, granularity, group_size):
    """Split a matrix into the stretches that share a scale, by Python's own slicing."""
    if granularity == "tensor":
        return [matrix.flatten().tolist()]
    size = group_size or matrix.shape[1]
    return [row[i : i + size].tolist() for row in matrix for i in range(0, len(row), size)]


def reference(values, bits, mapping):
    """Quantize a list in Python's float64, straight from the definitions."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    smallest, largest = min(values), max(values)
    if mapping == "symmetric":
        scale, zero_point, low = max(map(abs, values)) / high or 1.0, 0, -high
    else:
        if mapping == "affine":
            smallest, largest = min(smallest, 0.0), max(largest, 0.0)
        scale = (largest - smallest) / (2**bits - 1)
        magnitude = max(abs(smallest), abs(largest))
        if mapping == "affine_textbook":
            scale = max(scale, magnitude * 2.0**-23)
        scale = scale or 1.0
        zero_point = low - round(smallest / scale)
    return [(min(max(round(v / scale) + zero_point, low), high) - zero_point) * scale for v in values], scale


@settings(max_examples=150, deadline=None)
@given(matrices, st.integers(2, 8), st.sampled_from(MAPPINGS), st.sampled_from(GRAINS))
def test_equals_the_reference_within_one_step(array, bits, mapping, grain):
    matrix, (granularity, size) = torch.from_numpy(array), grain
    values, scale, zero_point = quantize_matrix(
        matrix, bits=bits, mapping=mapping, granularity=granularity, group_size=size
    )
    low, high = integer_range(bits, mapping)
    assert values.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert bool(((values >= low) & (values <= high)).all())
    assert (scale > 0).all()
    wide = scale.double()
    real = dequantize(
        values,
        spread(wide, matrix.shape[1], size),
        None if zero_point is None else spread(zero_point, matrix.shape[1], size),
    ).expand(matrix.shape)
    for exact, got in zip(parts(matrix, granularity, size), parts(real, granularity, size), strict=True):
        expected, step = reference(exact, bits, mapping)
        # FP32 rounds at 2^-24 of the magnitude, which matters for steps that small and below the smallest normal.
        slack = step + max(map(abs, exact)) * 2.0**-22 + torch.finfo(torch.float32).tiny
        assert all(abs(e - g) <= slack for e, g in zip(expected, got, strict=True))


@settings(max_examples=100, deadline=None)
@given(matrices, st.sampled_from(["symmetric", "affine"]))
def test_zero_is_exact(array, mapping):
    matrix = torch.from_numpy(array)
    matrix[0, 0] = 0
    values, scale, zero_point = quantize_matrix(matrix, mapping=mapping)
    assert dequantize(values, scale, zero_point)[0, 0] == 0


def test_textbook_zero_point_of_five_to_ten():
    matrix = torch.linspace(5, 10, 11)[None]
    values, scale, zero_point = quantize_matrix(matrix, mapping="affine_textbook")
    assert zero_point.dtype == torch.int32
    assert zero_point.item() == -383
    assert (values.min().item(), values.max().item()) == (-128, 127)
    assert scale.item() == pytest.approx(5 / 255)


def test_affine_widens_the_range_to_contain_zero():
    _, scale, zero_point = quantize_matrix(torch.linspace(5, 10, 11)[None], mapping="affine")
    assert (zero_point.dtype, zero_point.item()) == (torch.int8, -128)
    assert scale.item() == pytest.approx(10 / 255)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("constant", [0.0, 3.5, -3.5, 1e-42, 1e-3, -3e38], ids=str)
def test_constants_come_back(constant, mapping):
    matrix = torch.full((2, 4), constant)
    values, scale, zero_point = quantize_matrix(matrix, mapping=mapping)
    # A float32 quotient and product each round once; what is below the smallest normal number may vanish.
    tiny = torch.finfo(torch.float32).tiny
    torch.testing.assert_close(dequantize(values, scale, zero_point), matrix, rtol=3e-7, atol=tiny)
    assert (scale == 1).all() == (constant == 0)


@pytest.mark.parametrize(
    ("columns", "groups"), [(8, 2), (9, 3), (3, 1), (4, 1), (0, 0)], ids=lambda value: str(value)
)
def test_last_group_may_be_shorter(columns, groups):
    matrix = torch.randn(3, columns)
    values, scale, _ = quantize_matrix(matrix, granularity="group", group_size=4)
    assert scale.shape == (3, groups)
    for group in range(groups):
        part = matrix[:, 4 * group : 4 * group + 4]
        torch.testing.assert_close(scale[:, group], part.abs().amax(1) / 127)
    assert values.shape == matrix.shape


@pytest.mark.parametrize(("granularity", "shape"), [("tensor", (1,)), ("channel", (5, 1)), ("group", (5, 2))])
def test_shapes_of_scales(granularity, shape):
    size = 4 if granularity == "group" else None
    _, scale, zero_point = quantize_matrix(
        torch.randn(5, 7), granularity=granularity, group_size=size, mapping="affine"
    )
    assert scale.shape == zero_point.shape == shape


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_non_finite_values_are_refused(bad, granularity):
    matrix = torch.randn(3, 4)
    matrix[1, 2] = bad
    with pytest.raises(ValueError, match="1 of 12 values are NaN or infinite"):
        quantize_matrix(matrix, granularity=granularity)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 9}, "`bits` must be an integer from 2 to 8, got 9"),
        ({"bits": True}, "`bits` must be an integer"),
        ({"mapping": "log"}, "`mapping` must be 'symmetric'"),
        ({"granularity": "row"}, "must be 'tensor', 'channel' or 'group', got 'row'"),
        ({"granularity": "group"}, "`group_size` must be a positive integer, got None"),
        ({"group_size": 4}, "the granularity is 'channel'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize_matrix(torch.randn(2, 8), **arguments)


@pytest.mark.parametrize("matrix", [torch.zeros(3), torch.zeros(3, 3, dtype=torch.int64)], ids=["1-D", "int"])
def test_only_float_matrices(matrix):
    with pytest.raises(ValueError, match="Expected a floating-point matrix"):
        quantize_matrix(matrix)
