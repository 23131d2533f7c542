"""Calibrate: measures a machine into a profile, on the CPU or on CUDA.

Stages, each a median of repetitions: GEMM and attention rates by dtype, memory bandwidth, the cost of a call, H2D time
against size, and over two ranks a collective alone, a copy alone, and both at once.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn
from tqdm import tqdm

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware, LinkEmulation
from chunkflow_compile.runtime.bytes import copy_host_bytes
from chunkflow_compile.runtime.cuda import register
from chunkflow_compile.runtime.device import make_port
from chunkflow_compile.runtime.host_memory import near_cpus, own_pages
from chunkflow_compile.runtime.link import Port

from .loopback import join_loopback
from .machine import device_name

MIB = 1 << 20
RANKS = 2
# Copies of these sizes show both the cost to start one and the rate of a long one.
COPY_SIZES = (4096, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
COLLECTIVE_SIZES = (4096, 1 * MIB, 4 * MIB, 16 * MIB)
REPEATS = 7
# Fixed, because all ranks must call as often; enough that some hundred milliseconds of copies run beside them.
ROUNDS_BESIDE = 40
# Copies that are enqueued before the first of them is waited for.
_AHEAD = 4
_TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True)
class _Line:
    """Seconds = latency + bytes / rate."""

    latency: float
    rate: float


def calibrate(
    device: torch.device, name: str, emulated: LinkEmulation | None = None, loopback: bool = False
) -> Hardware:
    """The profile of ``device`` under ``name``, with a progress bar.  Raises ChunkflowError if a rank fails.

    ``emulated``: a link that copies and collectives pass, of which the profile says so, and which programs that are given
    it run on.  ``loopback``: collectives are those of one process, through host memory, which one GPU can measure.
    """
    link = RANKS if device.type == "cpu" or loopback or torch.cuda.device_count() >= RANKS else 1
    with tqdm(total=6 if link > 1 else 5, unit="stage") as progress:

        def stage(text: str) -> None:
            progress.set_description(text)

        stage("GEMMs")
        gemms = {str(d).removeprefix("torch."): _gemm_rate(device, d) for d in _dtypes(device)}
        progress.update()
        stage("attention")
        main = max(gemms, key=lambda d: gemms[d])
        attention = _attention_rate(device, getattr(torch, main))
        progress.update()
        stage("memory")
        memory = _memory_rate(device)
        progress.update()
        stage("calls")
        launch = _launch_seconds(device)
        progress.update()
        stage("copies")
        copy = _line([(size, _median(device, _copier(device, size, _make_link(emulated)))) for size in COPY_SIZES])
        progress.update()
        together = None
        if link > 1:
            stage("collectives, alone and beside copies")
            together = _on_ranks(device, emulated, loopback)
            progress.update()
    profile = _profile(name, device, gemms, attention, memory, launch, copy, together)
    return profile if emulated is None else replace(profile, link_emulation=emulated)


@dataclass(frozen=True)
class _Together:
    """Two ranks: the line of a collective, and the factors by which it and a copy stretch each other."""

    collective: _Line
    copy_slowdown: float
    collective_slowdown: float


def _profile(
    name: str,
    device: torch.device,
    gemms: dict[str, float],
    attention: float,
    memory: float,
    launch: float,
    copy: _Line,
    together: _Together | None,
) -> Hardware:
    by = f"measured on {device_name(device)}, torch {torch.__version__}"
    alone = "not measured, one device only: "
    shared = together is None or max(together.copy_slowdown, together.collective_slowdown) > 1.05
    return Hardware(
        name=name,
        peak_flops=gemms,
        eta_comp=round(min(1.0, (1 + attention / max(gemms.values())) / 2), 3),
        memory_bandwidth=memory,
        h2d_bandwidth=copy.rate,
        eta_pref=1.0,
        launch_s=launch,
        chunk_s=copy.latency,
        collective_latency_s=together.collective.latency if together else 3e-5,
        collective_bandwidth=together.collective.rate if together else copy.rate * 0.75,
        shared_link=shared,
        copy_slowdown=together.copy_slowdown if together and shared else 2.0 if shared else 1.0,
        collective_slowdown=together.collective_slowdown if together and shared else 2.0 if shared else 1.0,
        sources={
            "peak_flops": f"{by}: square GEMMs",
            "eta_comp": f"{by}: mean of GEMM and attention rates over the GEMM rate",
            "memory_bandwidth": f"{by}: a copy on the device, read and written",
            "h2d_bandwidth": f"{by}: a copy of 64 MiB, less the time to start one",
            "eta_pref": "1: the bandwidth is measured, not nominal",
            "launch_s": f"{by}: a call that computes next to nothing",
            "chunk_s": f"{by}: a copy of 4 KiB",
            "collective_latency_s": f"{by}: an all-to-all of 4 KiB" if together else alone + "assumption",
            "collective_bandwidth": f"{by}: an all-to-all of 16 MiB, less its latency"
            if together
            else alone + "3/4 of the link",
            "shared_link": f"{by}: a factor above 1.05" if together else alone + "assumption",
            "copy_slowdown": f"{by}: beside a collective" if together else alone + "a fair share",
            "collective_slowdown": f"{by}: beside copies" if together else alone + "a fair share",
        },
    )


def _dtypes(device: torch.device) -> Sequence[torch.dtype]:
    return (torch.float32,) if device.type == "cpu" else (torch.bfloat16, torch.float16, torch.float32)


def _gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return round(2 * n**3 / _median(device, lambda: a @ b))


def _attention_rate(device: torch.device, dtype: torch.dtype) -> float:
    tokens, heads = (1024, 8) if device.type == "cpu" else (8192, 24)
    q, k, v = (torch.randn(1, heads, tokens, 128, device=device, dtype=dtype) for _ in range(3))
    seconds = _median(device, lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
    return 4 * heads * tokens**2 * 128 / seconds


def _memory_rate(device: torch.device) -> float:
    size = (256 if device.type == "cpu" else 2048) * MIB
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return round(2 * size / _median(device, lambda: target.copy_(source)))


def _launch_seconds(device: torch.device) -> float:
    a = torch.ones(16, 16, device=device)
    calls = 200

    def many() -> None:
        for _ in range(calls):
            torch.relu(a)

    return _median(device, many) / calls


def _make_link(emulated: LinkEmulation | None) -> Port | None:
    """A port of this rank's own."""
    return None if emulated is None else make_port(emulated)


def _copier(device: torch.device, size: int, port: Port | None = None) -> Callable[[], object]:
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


def _on_ranks(device: torch.device, emulated: LinkEmulation | None, loopback: bool) -> _Together:
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_rank, (device.type, folder, emulated, loopback), nprocs=1 if loopback else RANKS)
        except ProcessException as error:
            raise ChunkflowError(f"A rank of the calibration failed: {error}") from error
        result: _Together = torch.load(Path(folder) / "rank0.pt", weights_only=False)
        return result


def _rank(rank: int, kind: str, folder: str, emulated: LinkEmulation | None, loopback: bool) -> None:
    torch.set_num_threads(1)
    port = _make_link(emulated)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if loopback:
        join_loopback(RANKS)
    else:
        backend, meet = "nccl" if kind == "cuda" else "gloo", f"file://{folder}/meet"
        dist.init_process_group(backend, init_method=meet, rank=rank, world_size=RANKS, timeout=_TIMEOUT)
    try:
        points = []
        for size in COLLECTIVE_SIZES:
            crossing = size * (RANKS - 1) // RANKS
            points.append((crossing, _median(device, _exchange(device, size, port), ROUNDS_BESIDE)))
        alone = _line(points)
        exchange, size = _exchange(device, COLLECTIVE_SIZES[-1], port), COPY_SIZES[-1] // 4
        copy_alone = _median(device, _copier(device, size, port), own_stream=True)
        exchange_alone = _median(device, exchange, ROUNDS_BESIDE, own_stream=True)
        copy_beside, exchange_beside = _both(device, exchange, size, port)
        found = _Together(alone, _factor(copy_beside, copy_alone), _factor(exchange_beside, exchange_alone))
        if rank == 0:
            torch.save(found, Path(folder) / "rank0.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _factor(beside: float, alone: float) -> float:
    return round(max(1.0, beside / alone), 2)


def _exchange(device: torch.device, size: int, port: Port | None = None) -> Callable[[], object]:
    sent, received = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))

    def exchange() -> None:
        dist.all_to_all_single(received, sent)
        if port is not None:
            port.send("collective", size * (RANKS - 1) // RANKS)

    return exchange


def _both(device: torch.device, exchange: Callable[[], object], size: int, port: Port | None) -> tuple[float, float]:
    """Median seconds of a copy and of a collective while the other runs all the time."""
    copies: list[float] = []
    over = threading.Event()

    def keep_copying() -> None:
        copy = _copier(device, size, port)
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
        beside = _median(device, exchange, ROUNDS_BESIDE, own_stream=True)
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


def _median(
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


def _line(points: Sequence[tuple[int, float]]) -> _Line:
    """The latency is what the smallest takes, a few KiB; the rate is that between the smallest and the largest."""
    (small, latency), (large, seconds) = points[0], points[-1]
    if seconds <= latency:
        raise ChunkflowError(
            f"{large} bytes took no longer than {small}: the machine is too busy to be measured. Run calibrate again."
        )
    return _Line(latency=latency, rate=round((large - small) / (seconds - latency)))
