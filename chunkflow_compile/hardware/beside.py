"""Copies and other work at once: how much they stretch each other."""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from chunkflow_compile.runtime.bytes import copy_host_bytes
from chunkflow_compile.runtime.cuda import register
from chunkflow_compile.runtime.host_memory import near_cpus, own_pages
from chunkflow_compile.runtime.link import Port

REPEATS = 7
# Compute is timed alone and beside copies this often in turns: a machine is not the same from one second to the next.
TURNS = 5
# A factor below it is noise.
_LEAST = 1.02
# Copies that are enqueued before the first of them is waited for.
_AHEAD = 4


def copier(device: torch.device, size: int, port: Port | None = None) -> Callable[[], object]:
    """A copy from host memory to the device, on the engine that the runtime uses; through ``port`` if there is one."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.ones(size, dtype=torch.uint8, device=device)
    if device.type == "cpu":

        def copy() -> None:
            start = time.monotonic()
            copy_host_bytes(target, source)
            if port is not None:
                port.send("copy", size, start)

        return copy
    pinned = own_pages(source, near_cpus(device))
    unpin = register(pinned)

    def copy_pinned() -> None:
        target.copy_(pinned, non_blocking=True)

    weakref.finalize(copy_pinned, unpin)
    return copy_pinned


def compute_slowdown(device: torch.device, size: int, port: Port | None = None) -> float:
    """The factor by which copies of ``size`` bytes, one behind the other, stretch compute of the kind that blocks do."""
    tokens, width = (1024, 512) if device.type == "cpu" else (8192, 4096)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x, into, back = (
        torch.randn(shape, device=device, dtype=dtype)
        for shape in ((tokens, width), (width, 4 * width), (4 * width, width))
    )

    def mlp() -> None:
        _ = x + F.gelu(F.layer_norm(x, (width,)) @ into) @ back

    found = []
    for _ in range(TURNS):
        alone = median_seconds(device, mlp, own_stream=True)
        found.append(factor(beside_copies(device, mlp, REPEATS, size, port)[1], alone))
    middle = statistics.median(found)
    return middle if middle >= _LEAST else 1.0


def factor(beside: float, alone: float) -> float:
    """At least 1: nothing is faster in company but by noise."""
    return round(max(1.0, beside / alone), 2)


def beside_copies(
    device: torch.device, work: Callable[[], object], repeats: int, size: int, port: Port | None
) -> tuple[float, float]:
    """Median seconds of a copy of ``size`` bytes and of ``work`` while the other runs all the time."""
    copies: list[float] = []
    over = threading.Event()

    def keep_copying() -> None:
        copy = copier(device, size, port)
        if device.type == "cuda":
            copies.extend(_copies_back_to_back(device, copy, over))
            return
        while not over.is_set():
            start = time.perf_counter()
            copy()
            copies.append(time.perf_counter() - start)

    thread = threading.Thread(target=keep_copying)
    thread.start()
    try:
        beside = median_seconds(device, work, repeats, own_stream=True)
    finally:
        over.set()
        thread.join()
    return statistics.median(copies), beside


def _copies_back_to_back(device: torch.device, copy: Callable[[], object], over: threading.Event) -> list[float]:
    """Seconds of each copy on a stream that always has more of them, as the device sees them: the host is not in it."""
    marks: list[Any] = []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        while not over.is_set():
            marks.append(_mark())
            copy()
            if len(marks) > _AHEAD:
                marks[-_AHEAD].synchronize()
        marks.append(_mark())
        marks[-1].synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def _mark() -> Any:
    """A timed event at this point of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _timed_by_events(work: Callable[[], object]) -> float:
    """Seconds on the current stream."""
    begin = _mark()
    work()
    end = _mark()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def median_seconds(
    device: torch.device, work: Callable[[], object], repeats: int = REPEATS, own_stream: bool = False
) -> float:
    """Median seconds of ``work``, after one run that does not count.  ``own_stream``: by events of the caller's
    stream, where there are any; others are not waited for."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    finish()
    times = []
    for _ in range(repeats):
        if own_stream and device.type == "cuda":
            times.append(_timed_by_events(work))
            continue
        start = time.perf_counter()
        work()
        finish()
        times.append(time.perf_counter() - start)
    return float(f"{statistics.median(times):.4g}")  # what follows is noise
