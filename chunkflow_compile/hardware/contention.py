"""Measurements of how much copies, collectives and compute slow each other down while they run at the same time."""

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

from chunkflow_compile.runtime.link import Port
from chunkflow_compile.runtime.torch_cuda import register
from chunkflow_compile.weights.bytes import copy_host_bytes
from chunkflow_compile.weights.host_memory import empty_pages, fill, near_cpus
from chunkflow_compile.weights.staging import GpuStagings

from .stopwatch import Stopwatch, mark

MIB = 1 << 20
REPEATS = 7
# Number of rounds in which the slowdown of compute is measured.  In each round, compute is timed alone and while copies
# run, because the speed of a machine changes from second to second.
TURNS = 24
# A measured slowdown of compute below this factor is noise.  It counts as 1, because otherwise plans would stream fewer
# weights than they could.
LEAST_SLOWDOWN = 1.02
# Number of MLP blocks per timed run on a GPU.  Their GPU time is so long that launch overhead on the host does not matter.
_BLOCKS = 8
# Size in bytes of the host memory that successive copies cycle through.  It is larger than the CPU's caches, so that no
# copy reads from a cache.
_WALK = 128 * MIB
# Before the host thread enqueues another copy, it waits until at most this many earlier copies are unfinished.
_AHEAD = 4


def copier(device: torch.device, size: int, port: Port | None = None, walk: int = 0) -> Callable[[], object]:
    """Return a function that copies ``size`` bytes from host memory to the device, in the same way as the runtime.

    ``port``: the port of an emulated link, which delays the copies, or None.  A port is used only if the device is a CPU.
    ``walk``: the size in bytes of the host memory that successive calls cycle through.
    """
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
    pinned = empty_pages(source)
    fill(pinned, source, near_cpus(device), GpuStagings())
    unpin = register(pinned, device)
    turns = cycle(zip(targets, pinned.split(size), strict=True))

    def copy_pinned() -> None:
        target, piece = next(turns)
        target.copy_(piece, non_blocking=True)

    weakref.finalize(copy_pinned, unpin)
    return copy_pinned


def compute_slowdown(
    device: torch.device,
    port: Port | None = None,
    barrier: Callable[[], object] = lambda: None,
    copy: Callable[[], object] | None = None,
) -> float:
    """Measure the factor by which back-to-back copies slow down the MLP of a transformer block.

    ``barrier``: a barrier of all ranks, which makes all ranks copy during the same periods.  ``copy``: a function that
    makes one copy per call; by default, it copies from host memory to the device.  ``port``: the port of an emulated
    link for these default copies, or None.
    """
    host = device.type == "cpu"
    # On the CPU, copies are small, so that several of them run during each timed run, even over an emulated link.
    tokens, width, size = (512, 512, MIB) if host else (8192, 4096, 16 * MIB)
    x, into, back = (
        torch.randn(shape, device=device, dtype=torch.float32 if host else torch.bfloat16)
        for shape in ((tokens, width), (width, 4 * width), (4 * width, width))
    )

    def blocks() -> None:
        for _ in range(1 if host else _BLOCKS):
            _ = x + F.gelu(F.layer_norm(x, (width,)) @ into) @ back

    copy, factors = copy or copier(device, size, port, _WALK), []
    for _ in range(TURNS):
        barrier()
        uncontended_s = median_seconds(device, blocks, 1)
        barrier()
        factors.append(factor(contended_seconds(device, blocks, 1, copy)[1], uncontended_s))
    return round(statistics.median(factors), 3)


def attention_slowdown(device: torch.device, exchange: Callable[[], object], repeats: int) -> float:
    """Measure the factor by which attention and a collective slow each other down.

    Two slowdowns are measured: the slowdown of attention, and the slowdown of the collective.  A profile contains only
    one factor for both.  The result is the harmonic mean of the two slowdowns, because this mean preserves the total work
    per second.
    ``exchange``: a function that runs the collective.  ``repeats``: the number of timed collectives, which is equal on
    all ranks.
    """
    host = device.type == "cpu"
    shape, dtype = ((1, 8, 512, 64), torch.float32) if host else ((1, 24, 8192, 128), torch.bfloat16)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))

    def attend() -> None:
        F.scaled_dot_product_attention(q, k, v)

    uncontended_s = median_seconds(device, attend), median_seconds(device, exchange, repeats)
    contended_s = contended_seconds(device, exchange, repeats, attend)
    factors = [factor(*pair) for pair in zip(contended_s, uncontended_s, strict=True)]
    return round(statistics.harmonic_mean(factors), 3)


def factor(contended_s: float, uncontended_s: float) -> float:
    """Return the factor by which contention slows down work.  The result is at least 1, because a lower value is noise."""
    return max(1.0, contended_s / uncontended_s)


def contended_seconds(
    device: torch.device, work: Callable[[], object], repeats: int, copy: Callable[[], object]
) -> tuple[float, float]:
    """Return the median seconds of ``copy`` and of ``work``.  Both are measured while they run at the same time.

    A second thread calls ``copy`` without pause while ``work`` is timed.
    """
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
        copying.add_done_callback(lambda _: begun.set())  # if a copy fails, the caller must not wait forever
        begun.wait()
        try:
            contended_s = median_seconds(device, work, repeats)
        finally:
            over.set()
        return statistics.median(copying.result()), contended_s


def _copies_back_to_back(
    device: torch.device, copy: Callable[[], object], begun: threading.Event, over: threading.Event
) -> list[float]:
    """Run copies on a stream until ``over`` is set, and return the seconds of each copy.  Events on the GPU measure the
    times.  The queue of the stream is never empty, so the times contain no launch overhead of the host."""
    marks: list[Any] = []
    torch.cuda.set_device(device)
    with torch.cuda.stream(stream := torch.cuda.Stream(device)):
        while not over.is_set():
            marks.append(mark(stream))
            copy()
            if len(marks) > _AHEAD:
                marks[-_AHEAD].synchronize()
                begun.set()
        marks.append(mark(stream))
        marks[-1].synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def median_seconds(device: torch.device, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median seconds of ``work``, after one warm-up run.

    On a GPU, only the work on the caller's stream is timed; another thread may issue work on other streams meanwhile.
    """
    times = []
    for _ in range(1 + repeats):
        watch = Stopwatch(device)
        work()
        times.append(watch.stop())
    return float(f"{statistics.median(times[1:]):.4g}")  # more than four digits would be noise
