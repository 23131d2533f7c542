"""The releases of torch that ChunkFlow is tested on."""

from __future__ import annotations

import functools
import re
import warnings

OLDEST, NEWEST = (2, 11), (2, 15)
TESTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def release_of(version: str) -> tuple[int, int]:
    """The major and minor number of a version such as ``2.13.0+cpu``; (0, 0) if the version does not begin with them."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


@functools.cache  # once per process: Dynamo resets Python's own record of the warnings that were shown
def warn_if_untested(version: str) -> None:
    """Warn about a torch version outside the tested range, once per process."""
    if not OLDEST <= release_of(version) <= NEWEST:
        warnings.warn(
            f"This is torch {version}; ChunkFlow is tested on torch {TESTED}. It may work. If it does not, install a tested "
            "release.",
            stacklevel=2,
        )
