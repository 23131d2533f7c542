"""Byte sizes and rates as people write them."""

from __future__ import annotations

import re

from chunkflow_compile.passes.errors import ChunkflowError

_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")})
_UNITS.update({f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")})
_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}


def parse_rate(text: str, what: str) -> float:
    """``"200MB"`` or ``"200MB/s"`` as bytes/s.  Raises ChunkflowError naming ``what``."""
    return float(parse_bytes(text.removesuffix("/s"), what))


def parse_bytes(value: object, what: str) -> int:
    """``8``, ``"8GiB"``, ``"500 MB"`` as a whole number of bytes.  Raises ChunkflowError naming ``what``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _LOWER or len(match[1]) > 20:
        raise ChunkflowError(f"{what}={value!r} is not a size: give bytes, or a text such as '8GiB' or '500MB'.")
    return int(float(match[1]) * _LOWER[match[2].lower()])
