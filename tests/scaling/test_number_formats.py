"""The table of docs/number-formats.md, against torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "number-formats.md").read_text()
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| ") and (cells := [cell.strip() for cell in line.strip("|").split("|")])
}
FORMATS = ["float32", "tf32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"]


def finfo(name):
    if name != "tf32":
        return torch.finfo(getattr(torch, name))
    # NVIDIA A100 whitepaper: the exponent of FP32, the mantissa of FP16; torch has no such dtype.
    return SimpleNamespace(max=(2 - 2**-10) * 2.0**127, smallest_normal=2.0**-126, eps=2.0**-10, bits=19)


def same(cell, value):
    number = re.match(r"[\d.e-]+", cell)[0]
    digits = len(re.sub(r"e.*|\.", "", number).lstrip("0"))
    # Half a unit in the last digit that is printed.
    return float(number) == pytest.approx(value, rel=0.5 * 10 ** (1 - digits))


def test_every_format_has_its_row():
    assert [name for name in ROWS if name != "format"] == FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_row(name):
    bits, largest, normal, subnormal, at_one, at_thousand = ROWS[name]
    info = finfo(name)
    sign, exponent, mantissa = map(int, bits.split(","))
    assert sign + exponent + mantissa == info.bits
    assert info.eps == 2.0**-mantissa
    assert same(largest, info.max)
    assert same(normal, info.smallest_normal)
    assert same(at_one, info.eps)
    assert f"(2^-{mantissa})" in at_one
    if subnormal != "-":
        assert same(subnormal, info.smallest_normal * info.eps)
    if at_thousand != "-":
        assert same(at_thousand, info.eps * 2**9)  # 512 <= 1000 < 1024
    assert (at_thousand == "-") == (info.max < 1000)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2"])
def test_spacing_at_1000_is_that_of_the_numbers_themselves(name):
    dtype = getattr(torch, name)
    values = torch.arange(512, 1024, 0.25).to(dtype).float().unique()
    assert same(ROWS[name][5], values.diff().max().item())


def test_example(capsys):
    spec = importlib.util.spec_from_file_location("choose", ROOT / "examples" / "choose_precision.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(steps=3)
    out = capsys.readouterr().out
    assert re.search(r"T4 +16-mixed", out)
    assert "Recommended:" in out
