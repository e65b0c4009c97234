"""Sizes in bytes: parse what people write, format what people read."""

from __future__ import annotations

import re

__all__ = ["GIB", "MIB", "format_bytes", "parse_bytes"]

KIB, MIB, GIB = 1024, 1024**2, 1024**3

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024**4,
}  # fmt: skip
_MAX_BYTES = 2**63  # Sizes are 64-bit in every allocator.
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: int | str) -> int:
    """Turn a size such as ``"40GiB"`` into bytes.

    Args:
        value: Bytes as an integer, or a number with one of the units B, KB, MB, GB, TB (powers of 1000),
            KiB, MiB, GiB, TiB (powers of 1024).

    Returns:
        The size in bytes, rounded down.

    Raises:
        ValueError: If the text is no size, the unit is unknown, or the size is not positive.
        TypeError: If ``value`` is neither an integer nor text.

    Example:
        >>> parse_bytes("1.5 GiB")
        1610612736
        >>> parse_bytes("24GB")
        24000000000
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"A size must be `int` bytes or text such as '40GiB', got {value!r}.")
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f"Cannot read {value!r} as a size. Write a number and one of B, MB, GB, MiB, GiB, e.g. '24GiB'."
            )
        number = float(match[1])
        size = int(number * _UNITS[match[2].lower()]) if number < _MAX_BYTES else _MAX_BYTES
    if size <= 0:
        raise ValueError(f"A size must be larger than 0 bytes, got {value!r}.")
    if size >= _MAX_BYTES:
        raise ValueError(
            f"A size must be smaller than {_MAX_BYTES} bytes, got {str(value)[:40]!r}. Check the unit."
        )
    return size


def format_bytes(size_bytes: int) -> str:
    """Write a size for people, in binary units with the unit spelled out.

    Args:
        size_bytes: Size in bytes; may be negative (a saving, a missing amount).

    Returns:
        Text with two decimals from KiB upwards.

    Example:
        >>> format_bytes(1610612736)
        '1.50 GiB'
        >>> format_bytes(512)
        '512 B'
    """
    for factor, unit in ((1024**4, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes} B"
