"""Optional packages: an error names the extra that installs them."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

__all__ = ["is_installed", "require"]


def is_installed(package: str) -> bool:
    """Tell whether ``package`` could be imported, without importing it."""
    return find_spec(package) is not None


def require(package: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional package.

    Args:
        package: Name to import.
        extra: Extra of this project that installs it.
        purpose: What it is needed for, in words that complete "… is needed for".

    Returns:
        The imported module.

    Raises:
        ModuleNotFoundError: If it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`{package}` is needed for {purpose}. Install it with: pip install 'lightning-memprec[{extra}]'"
        ) from error
