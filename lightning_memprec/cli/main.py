"""Entry point of ``lightning-memprec``: parses the arguments and hands over to one subcommand.

Each subcommand is a module of this package with ``add_parser(subparsers)`` and ``run(args) -> int``.
Nothing here imports torch, so ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lightning_memprec.__about__ import __version__
from lightning_memprec.cli import (
    devices,
    estimate,
    export,
    formula,
    inspect,
    plan,
    precision,
    quantize,
    report,
)
from lightning_memprec.cli._examples import EXAMPLES, show_examples

__all__ = ["build_parser", "main"]

_COMMANDS = {
    "estimate": estimate,
    "plan": plan,
    "report": report,
    "formula": formula,
    "devices": devices,
    "precision": precision,
    "inspect": inspect,
    "export": export,
    "quantize": quantize,
}

_BROKEN_PIPE = 128 + 13  # as a shell reports a program that SIGPIPE ended


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="lightning-memprec", description="Memory and precision of training runs, before and after."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, command in _COMMANDS.items():
        command.add_parser(subparsers)
        show_examples(subparsers.choices[name], EXAMPLES[name])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console command.

    Args:
        argv: Arguments after the program's name; ``None`` takes those of the process.

    Returns:
        The exit code. Bad usage exits with 2 through :class:`SystemExit`, as argparse does. 141 if whoever read
        the output, such as ``head``, did not wait for its end.
    """
    try:
        try:
            args = build_parser().parse_args(argv)
            code: int = _COMMANDS[args.command].run(args)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return code
