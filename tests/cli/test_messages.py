"""What a command says names its options, and its output may be cut off."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from lightning_memprec.cli._messages import as_options

ARGS = argparse.Namespace(overwrite=False, strip_prefix="", source="auto", safety_margin=0.05)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Pass `overwrite=True`.", "Pass `--overwrite`."),
        ("Correct `strip_prefix`.", "Correct `--strip-prefix`."),
        ("take `source='current'`.", "take `--source current`."),
        ("(`safety_margin=0.05`)", "(`--safety-margin 0.05`)"),
        ("Pass `loss=`, or `torch.save(overwrite=True)`.", "Pass `loss=`, or `torch.save(overwrite=True)`."),
        ("overwrite it", "overwrite it"),
    ],
    ids=["flag", "name", "text", "number", "no-option", "plain-word"],
)
def test_arguments_become_options(message, expected):
    assert as_options(ValueError(message), ARGS) == expected


@pytest.mark.parametrize(
    "arguments", [["devices", "--json"], ["formula", "--parameters", "7B"], ["--version"]], ids=str
)
def test_a_reader_that_leaves_ends_the_command_quietly(arguments):
    # Unbuffered, argparse would hide the error of its own prints.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_memprec", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    process.stdout.close()  # long before the command has started
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), err) == (141, b"")
