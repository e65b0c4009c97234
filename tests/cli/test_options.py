"""The console command's options are an interface: a change here is a change for users' scripts."""

import argparse

import pytest

from lightning_memprec.cli.main import build_parser

OPTIONS = {
    "formula": {
        "--activation-formula",
        "--batch",
        "--device",
        "--device-memory",
        "--devices",
        "--fused-attention",
        "--heads",
        "--hidden",
        "--json",
        "--layers",
        "--offload",
        "--parameters",
        "--recipe",
        "--recompute",
        "--sequence",
        "--vocabulary",
        "--zero-stage",
    },
    "estimate": {
        "--batch-spec",
        "--cli",
        "--config",
        "--data",
        "--device",
        "--device-memory",
        "--html",
        "--json",
        "--model",
        "--no-remedies",
        "--remedy",
        "--safety-margin",
        "--sample-batches",
        "--snapshot",
    },
    "plan": {
        "--batch",
        "--batch-spec",
        "--cli",
        "--config",
        "--data",
        "--devices",
        "--json",
        "--model",
        "--num-devices",
        "--plot",
        "--recipes",
        "--safety-margin",
        "--sequence",
        "--strategy",
    },
    "report": {"--format", "--out", "-o"},
    "devices": {"--json"},
    "precision": {"--cli", "--compare", "--config", "--data", "--device", "--json", "--model", "--steps"},
    "inspect": {"--json", "--source"},
    "quantize": {
        "--bits",
        "--exclude",
        "--format",
        "--group-size",
        "--include",
        "--method",
        "--model",
        "--model-args",
        "--out",
        "--overwrite",
        "--source",
        "--strip-prefix",
        "-o",
    },
    "export": {"--dtype", "--max-shard-size", "--overwrite", "--source", "--strip-prefix"},
}


def options_of(parser):
    return {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}


@pytest.fixture
def subparsers():
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def test_commands_are_frozen(subparsers):
    assert set(subparsers) == set(OPTIONS)
    assert options_of(build_parser()) == {"--version"}


@pytest.mark.parametrize("command", OPTIONS)
def test_options_are_frozen(subparsers, command):
    assert options_of(subparsers[command]) == OPTIONS[command]
