"""Entry point of ``lightning-memprec``: parses the arguments and hands over to one subcommand.

Each subcommand is a module of this package with ``add_parser(subparsers)`` and ``run(args) -> int``.
Nothing here imports torch, so ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_memprec.__about__ import __version__
from lightning_memprec.cli import estimate, formula

__all__ = ["build_parser", "main"]

_COMMANDS = {"formula": formula, "estimate": estimate}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="lightning-memprec", description="Tell what memory a training run needs, before it starts."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command in _COMMANDS.values():
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console command.

    Args:
        argv: Arguments after the program's name; ``None`` takes those of the process.

    Returns:
        The exit code. Bad usage exits with 2 through :class:`SystemExit`, as argparse does.
    """
    args = build_parser().parse_args(argv)
    code: int = _COMMANDS[args.command].run(args)
    return code
