from __future__ import annotations

import argparse
import json

import pytest

from lightning_memprec._devices import DEVICES, find_device
from lightning_memprec.cli import devices


def run(capsys, *arguments):
    parser = argparse.ArgumentParser()
    devices.add_parser(parser.add_subparsers())
    code = devices.run(parser.parse_args(["devices", *arguments]))
    return code, capsys.readouterr().out


def test_every_device_has_a_line_with_a_name_that_is_found(capsys):
    code, out = run(capsys)
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()[1 : 1 + len(DEVICES)]]
    assert [find_device(name).name for name in names] == list(DEVICES)


@pytest.mark.parametrize("name", ["A100-40GB", "T4-16GB"])
def test_figures_are_those_of_the_catalogue(capsys, name):
    code, out = run(capsys, "--json")
    entry = next(entry for entry in json.loads(out) if entry["name"] == name)
    spec = find_device(name)
    assert (code, entry["memory_bytes"], entry["native_bf16"]) == (0, spec.memory_bytes, spec.native_bf16)
    line = next(line for line in run(capsys)[1].splitlines() if line.startswith(name))
    assert ("native" in line) == spec.native_bf16
