"""Byte sizes and rates as people read and write them."""

from __future__ import annotations

import math
import re

from chunkflow_compile.passes.errors import ChunkflowError

_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")})
_UNITS.update({f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")})
_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}
# Unit of a size that is shown -> its decimals: a hundredth of a GiB is as much as a small weight.
_SHOWN = {"B": 0, "KiB": 1, "MiB": 1, "GiB": 2}
# Bytes/s of any link or drive: what lies outside was written without its unit.
RATES = 1e5, 1e12


def size(nbytes: int | None) -> str:
    """Bytes as text, in the unit that fits: ``"4.0 KiB"``, ``"1.50 GiB"``; ``"-"`` for None."""
    if nbytes is None:
        return "-"
    unit, value = _in_unit(nbytes)
    return f"{value:.{_SHOWN[unit]}f} {unit}"


def enough(nbytes: int) -> str:
    """The least size with as many digits that is at least ``nbytes``, as :func:`parse_bytes` takes it: ``"1.51GiB"``."""
    unit, value = _in_unit(nbytes)
    scale = 10 ** _SHOWN[unit]
    text = f"{math.ceil(value * scale) / scale:.{_SHOWN[unit]}f}"
    return f"{text.rstrip('0').rstrip('.') if scale > 1 else text}{unit}"


def _in_unit(nbytes: int) -> tuple[str, float]:
    """The largest unit of which there is one, after rounding, and how many."""
    for unit, digits in _SHOWN.items():
        value = nbytes / _UNITS[unit]
        if round(value, digits) < 1024:
            break
    return unit, value


def parse_rate(text: str, what: str) -> float:
    """``"200MB"`` or ``"200MB/s"`` as bytes/s.  Raises ChunkflowError naming ``what``, also for what no link or drive has."""
    rate = float(parse_bytes(text.removesuffix("/s"), what))
    if not RATES[0] <= rate <= RATES[1]:
        raise ChunkflowError(
            f"{what}={text!r} is {rate:g} bytes/s, which no link or drive has: give a unit, such as 7GB/s."
        )
    return rate


def whole_number(value: object, what: str, least: int) -> None:
    """Raise ChunkflowError naming ``what`` unless the value is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ChunkflowError(f"{what} must be a whole number of at least {least}, not {value!r}.")


def parse_bytes(value: object, what: str) -> int:
    """``8``, ``"8GiB"``, ``"500 MB"`` as a whole number of bytes.  Raises ChunkflowError naming ``what``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _LOWER or len(match[1]) > 20:
        raise ChunkflowError(f"{what}={value!r} is not a size: give bytes, or a text such as '8GiB' or '500MB'.")
    return int(float(match[1]) * _LOWER[match[2].lower()])
