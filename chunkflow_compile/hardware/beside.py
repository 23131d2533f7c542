"""Copies and other work at once: how much they stretch each other."""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.nn.functional as F

from chunkflow_compile.runtime.cuda import register
from chunkflow_compile.runtime.link import Port
from chunkflow_compile.weights.bytes import copy_host_bytes
from chunkflow_compile.weights.host_memory import near_cpus, own_pages

MIB = 1 << 20
REPEATS = 7
# Compute is timed alone and beside copies this often in turns: a machine is not the same from one second to the next.
TURNS = 24
# Blocks between two marks on a GPU: so long that the host, which issues them, is not in the figure.
_BLOCKS = 8
# Copies walk through so much memory that none of it is in a cache when its turn comes.
_WALK = 128 * MIB
# Copies that are enqueued before the first of them is waited for.
_AHEAD = 4


def copier(device: torch.device, size: int, port: Port | None = None, walk: int = 0) -> Callable[[], object]:
    """A copy of ``size`` bytes from host memory to the device, on the engine that the runtime uses; through ``port`` if
    there is one.  ``walk``: bytes that the copies go through one after the other, at least ``size``."""
    pieces = max(1, walk // size)
    source = torch.ones(pieces * size, dtype=torch.uint8)
    targets = torch.ones(pieces * size, dtype=torch.uint8, device=device).split(size)
    if device.type == "cpu":
        turns = cycle(zip(targets, source.split(size), strict=True))

        def copy() -> None:
            start = time.monotonic()
            copy_host_bytes(*next(turns))
            if port is not None:
                port.send("copy", size, start)

        return copy
    pinned = own_pages(source, near_cpus(device))
    unpin = register(pinned)
    turns = cycle(zip(targets, pinned.split(size), strict=True))

    def copy_pinned() -> None:
        target, piece = next(turns)
        target.copy_(piece, non_blocking=True)

    weakref.finalize(copy_pinned, unpin)
    return copy_pinned


def compute_slowdown(
    device: torch.device, port: Port | None = None, meet: Callable[[], object] = lambda: None
) -> float:
    """The factor by which copies, one behind the other, stretch compute of the kind that blocks do.

    ``meet``: a barrier of all ranks, which are to copy at the same time, and to be quiet at the same time.
    """
    host = device.type == "cpu"
    # On the CPU such that several copies fall into each time that is taken, with an emulated link too.
    tokens, width, size = (512, 512, MIB) if host else (8192, 4096, 16 * MIB)
    x, into, back = (
        torch.randn(shape, device=device, dtype=torch.float32 if host else torch.bfloat16)
        for shape in ((tokens, width), (width, 4 * width), (4 * width, width))
    )

    def blocks() -> None:
        for _ in range(1 if host else _BLOCKS):
            _ = x + F.gelu(F.layer_norm(x, (width,)) @ into) @ back

    copy, found = copier(device, size, port, _WALK), []
    for _ in range(TURNS):
        meet()
        alone = median_seconds(device, blocks, 1, own_stream=True)
        meet()
        found.append(factor(beside_copies(device, blocks, 1, copy)[1], alone))
    return round(statistics.median(found), 3)


def factor(beside: float, alone: float) -> float:
    """At least 1: nothing is faster in company but by noise."""
    return max(1.0, beside / alone)


def beside_copies(
    device: torch.device, work: Callable[[], object], repeats: int, copy: Callable[[], object]
) -> tuple[float, float]:
    """Median seconds of ``copy`` and of ``work`` while the other runs all the time."""
    begun, over = threading.Event(), threading.Event()

    def keep_copying() -> list[float]:
        if device.type == "cuda":
            return _copies_back_to_back(device, copy, begun, over)
        copies: list[float] = []
        while not over.is_set():
            start = time.perf_counter()
            copy()
            copies.append(time.perf_counter() - start)
            begun.set()
        return copies

    with ThreadPoolExecutor(1) as thread:
        copying = thread.submit(keep_copying)
        copying.add_done_callback(lambda _: begun.set())  # it may have failed
        begun.wait()
        try:
            beside = median_seconds(device, work, repeats, own_stream=True)
        finally:
            over.set()
        return statistics.median(copying.result()), beside


def _copies_back_to_back(
    device: torch.device, copy: Callable[[], object], begun: threading.Event, over: threading.Event
) -> list[float]:
    """Seconds of each copy on a stream that always has more of them, as the device sees them: the host is not in it."""
    marks: list[Any] = []
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        while not over.is_set():
            marks.append(_mark())
            copy()
            if len(marks) > _AHEAD:
                marks[-_AHEAD].synchronize()
                begun.set()
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
