"""What tests ask of the stand-in and set: calls by name, limits, errors."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def active() -> bool:
    """Whether this process runs on the stand-in."""
    return "STAND_IN" in os.environ and "libcudart" in os.environ.get("LD_PRELOAD", "")


@cache
def runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.stand_in_counts.argtypes = (ctypes.c_char_p, ctypes.c_long)
    library.stand_in_set.argtypes = (ctypes.c_char_p, ctypes.c_long)
    for name in ("stand_in_counts", "stand_in_contexts", "stand_in_pinned_bytes"):
        getattr(library, name).restype = ctypes.c_long
    return library


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(os.environ["STAND_IN"]) / "libcuda.so.1"))
    library.stand_in_launches.restype = library.stand_in_modules.restype = ctypes.c_long
    return library


def counts() -> dict[str, int]:
    """Calls of each entry point since the process began; also copies to the device and to the host, kernels and launches of
    Triton."""
    text = ctypes.create_string_buffer(1 << 16)
    runtime().stand_in_counts(text, len(text))
    found = (line.rsplit(" ", 1) for line in text.value.decode().splitlines())
    return {
        **{name: int(n) for name, n in found},
        "launches of Triton": _driver().stand_in_launches(),
        "modules of Triton": _driver().stand_in_modules(),
    }


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """The calls made inside the context; the dictionary is filled when it ends."""
    before, made = counts(), dict[str, int]()
    yield made
    made.update({name: n - before.get(name, 0) for name, n in counts().items() if n != before.get(name, 0)})


def pinned_bytes() -> int:
    return int(runtime().stand_in_pinned_bytes())


def contexts() -> set[int]:
    """The devices that have a context."""
    bits = int(runtime().stand_in_contexts())
    return {i for i in range(bits.bit_length()) if bits >> i & 1}


DEFAULTS = {
    "taken": 0,
    "rate": 0,
    "kernel_us": 0,
    "lag": 0,
    "pause_us": 0,
    "allocations": -1,
    "pins": -1,
    "pinned_allocations": -1,
    "pin_bytes": -1,
    "refused_address": 0,
}


def settings(**values: int) -> None:
    """Set limits and rates; see Settings in stand_in.h."""
    for name, value in values.items():
        if runtime().stand_in_set(name.encode(), int(value)):
            raise ValueError(f"The stand-in has no setting {name}.")


def set_device_broken(broken: bool) -> None:
    """Let every later call fail, as after an illegal access; or mend the device, which no CUDA device can be."""
    runtime().stand_in_break(int(broken))
