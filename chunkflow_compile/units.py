"""Parsing and formatting of byte sizes and rates, such as ``"8GiB"`` and ``"7GB/s"``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from numbers import Integral, Real

from chunkflow_compile.passes.errors import ChunkflowError

# A size as users pass it: a number of bytes, or a string such as "8GiB".
Size = int | float | str

_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{p}i{b}": 1024 ** (i + 1) for i, p in enumerate("KMGT") for b in ("", "B")})
_UNITS.update({f"{p}{b}": 1000 ** (i + 1) for i, p in enumerate("KMGT") for b in ("", "B")})
_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}
# Unit of a formatted size -> its number of decimals.  GiB has two, because 0.01 GiB is the size of a small weight.
_SHOWN = {"B": 0, "KiB": 1, "MiB": 1, "GiB": 2}
# The range of rates in bytes/s that PCIe, NVLink or an SSD can have.  A rate outside this range most likely lacks its unit.
RATES = 1e5, 1e12
# If a number has no unit and is below this, it was meant in GiB: few machines have more GiB, and no model runs in fewer
# bytes.
_MEANT_IN_GIB = 4096
# If a string has no unit and is below this, it was meant in MiB, the unit of nvidia-smi.  This limit does not apply to int
# and float, because programs compute such small sizes for tiny models.
_MEANT_IN_MIB = 1 << 20
_TEXT = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?(?:e\+?\d{1,2})?)\s*([a-z]*)\s*", re.IGNORECASE)
_DEVICE = re.compile(r"(cpu|cuda|hip|mps|xpu)(:\d+)?")


def size(nbytes: int | None) -> str:
    """Format a number of bytes in a suitable unit: ``"4.0 KiB"``, ``"1.50 GiB"``; ``"-"`` for None."""
    if nbytes is None:
        return "-"
    unit, value = _in_unit(nbytes)
    return f"{value:.{_SHOWN[unit]}f} {unit}"


def enough(nbytes: int) -> str:
    """Round ``nbytes`` up to the decimals of :func:`size`, in a form that :func:`parse_bytes` accepts: ``"1.51GiB"``."""
    unit, value = _in_unit(nbytes)
    scale = 10 ** _SHOWN[unit]
    text = f"{math.ceil(value * scale) / scale:.{_SHOWN[unit]}f}"
    return f"{text.rstrip('0').rstrip('.') if scale > 1 else text}{unit}"


def _in_unit(nbytes: int) -> tuple[str, float]:
    """Return the smallest unit in which ``nbytes``, rounded, is below 1024, and the number in this unit."""
    for unit, digits in _SHOWN.items():
        value = nbytes / _UNITS[unit]
        if round(value, digits) < 1024:
            break
    return unit, value


def parse_rate(text: str, what: str) -> float:
    """Parse a rate such as ``"200MB"`` or ``"200MB/s"`` into bytes/s.

    Raises ChunkflowError naming ``what`` if the text is not a rate, or if the rate is implausibly low or high.
    """
    if (read := _read(text.removesuffix("/s"))) is None:
        raise _no_size(text, what)
    rate = float(read[0])
    if not RATES[0] <= rate <= RATES[1]:
        raise ChunkflowError(
            f"{what}={text!r} is {rate:g} bytes/s, which no link or drive has: give a unit, such as 7GB/s."
        )
    return rate


def whole_number(value: object, what: str, least: int) -> None:
    """Raise ChunkflowError naming ``what`` unless the value is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ChunkflowError(f"{what} must be a whole number of at least {least}, not {value!r}.")


def parse_bytes(value: object, what: str) -> int:
    """Parse a size such as ``12.5e9``, ``"8GiB"``, ``"500 MB"`` or ``"12G"`` into bytes.

    G and GB are 10^9 bytes; Gi and GiB are 2^30 bytes.
    Raises ChunkflowError naming ``what`` for a value that is not a size, for a fraction of a byte, and for a value so small
    that its unit must be missing.  Small values are allowed if the name ``what`` ends in ``_bytes``, such as
    ``"chunk_bytes"``.
    """
    if (read := _read(value)) is None:
        raise _no_size(value, what)
    nbytes, number, unit = read
    if not unit and not what.endswith("_bytes") and nbytes > 0:
        _refuse_missing_unit(value, what, nbytes, number)
    if unit in ("", "b") and nbytes.denominator != 1:
        raise ChunkflowError(f"{what}={value!r} is a fraction of a byte: give whole bytes, or a text such as '8GiB'.")
    return int(nbytes)


def is_size(value: object) -> bool:
    """Whether a value can be parsed as a size, even if its unit may be missing."""
    return _read(value) is not None


def _read(value: object) -> tuple[Fraction, str, str] | None:
    """The bytes of a size, its number as a string, and its unit in lower case; None if the value is not a size."""
    if isinstance(value, Real) and not isinstance(value, bool):
        number = int(value) if isinstance(value, Integral) else float(value)
        return (Fraction(number), f"{value}", "") if math.isfinite(number) and number >= 0 else None
    match = _TEXT.fullmatch(value) if isinstance(value, str) else None
    if match is None or (unit := match[2].lower()) not in _LOWER:
        return None
    return Fraction(match[1]) * _LOWER[unit], match[1], unit


def _refuse_missing_unit(value: object, what: str, nbytes: Fraction, number: str) -> None:
    """Raise ChunkflowError for a number of bytes that was most likely meant in another unit."""
    if nbytes < 1:
        raise ChunkflowError(
            f"{what}={value!r} is less than a byte: give a size such as '12GiB', not a share of the memory."
        )
    few = _MEANT_IN_MIB if isinstance(value, str) else _MEANT_IN_GIB
    if nbytes < few:
        meant = f"{number}{'GiB' if nbytes < _MEANT_IN_GIB else 'MiB'}"
        raise ChunkflowError(f"{what}={value!r} is {number} byte{'s' * (nbytes != 1)}; did you mean {meant!r}?")


def _no_size(value: object, what: str) -> ChunkflowError:
    said = f"{what}={value!r} is not a size"
    if _DEVICE.fullmatch(str(value)):
        return ChunkflowError(f"{said}, but a device: pass device={str(value)!r}, and {what} as a text such as '8GiB'.")
    if isinstance(value, Mapping | list | tuple | set):
        return ChunkflowError(f"{said}: give one for all parts together, such as '8GiB'.")
    return ChunkflowError(f"{said}: give bytes, or a text such as '8GiB' or '500MB'.")
