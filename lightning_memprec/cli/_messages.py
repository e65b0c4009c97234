"""Messages of the Python functions, in the words of the command line."""

from __future__ import annotations

import argparse
import re
import sys

__all__ = ["as_options", "refuse"]

# `name`, `name=` or `name=value`, in the backticks that messages put around code.
_ARGUMENT = re.compile(r"`(?P<name>[a-z]\w*)(?P<assignment>=(?P<value>[^`]*))?`")


def as_options(message: object, args: argparse.Namespace) -> str:
    """Name options where a message names arguments of a function.

    Args:
        message: An error, or its text.
        args: Parsed arguments; what bears the name of one of them is an option.

    Returns:
        The text, with for example `` `--overwrite` `` in place of `` `overwrite=True` ``.

    Example:
        >>> as_options("Correct `strip_prefix`, or take `source='current'`.", argparse.Namespace(
        ...     strip_prefix="", source="auto"
        ... ))
        'Correct `--strip-prefix`, or take `--source current`.'
    """

    def rename(match: re.Match[str]) -> str:
        if match["name"] not in vars(args):
            return match[0]
        option = f"--{match['name'].replace('_', '-')}"
        value = (match["value"] or "").strip("'\"")
        return f"`{option}`" if value in ("", "True") else f"`{option} {value}`"

    return _ARGUMENT.sub(rename, str(message))


def refuse(command: str, error: object, args: argparse.Namespace) -> int:
    """Say on standard error why a command does nothing.

    Args:
        command: Name of the command.
        error: An error, or its text.
        args: Parsed arguments.

    Returns:
        The exit code for bad usage.
    """
    print(f"lightning-memprec {command}: error: {as_options(error, args)}", file=sys.stderr)
    return 2
