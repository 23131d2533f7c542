"""The releases of torch that ChunkFlow is tested on."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Mapping
from typing import Any

OLDEST, NEWEST = (2, 11), (2, 15)
TESTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def release_of(version: str) -> tuple[int, int]:
    """The major and minor number of a version such as ``2.13.0+cpu``; (0, 0) if there are none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


@functools.cache  # Dynamo resets Python's own record of shown warnings
def warn_if_untested(version: str) -> None:
    """Warn of a torch outside the tested range, once per process."""
    if not OLDEST <= release_of(version) <= NEWEST:
        warnings.warn(
            f"This is torch {version}; ChunkFlow is tested on torch {TESTED}. It may work. If it does not, install a tested "
            "release.",
            stacklevel=2,
        )


def source_name(source: Any) -> str:
    """The name of a source of Dynamo, an expression such as ``L['timestep']``; it is a method in some releases."""
    return str(source.name() if callable(source.name) else source.name)


def backend_of(compiled: Any) -> Any:
    """The backend of a function that torch.compile returned; None for any other object.

    torch has no function for it: Dynamo's callback is in the closure of the function, and leads to the backend.
    """
    if not inspect.isfunction(compiled) or not hasattr(compiled, "_torchdynamo_orig_callable"):
        return None
    inside: Mapping[str, Any] = inspect.getclosurevars(compiled).nonlocals
    found = next((value for value in inside.values() if hasattr(value, "_torchdynamo_orig_backend")), None)
    while (within := getattr(found, "_torchdynamo_orig_backend", None)) is not None:
        found = within
    return getattr(found, "compiler_fn", found)
