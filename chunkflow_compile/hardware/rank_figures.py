"""Measurement of the links of a device: collectives, copies and pulls of several ranks, and how much they slow each other
down.

Collectives are measured on two ranks.  Copies and pulls are measured on all ranks at the same time.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware, LinkEmulation
from chunkflow_compile.runtime.device import make_port

from .contention import (
    LEAST_SLOWDOWN,
    MIB,
    attention_slowdown,
    compute_slowdown,
    contended_seconds,
    copier,
    factor,
    median_seconds,
)
from .device_figures import COPY_SIZES, Figure, line_through
from .lockstep import EXCHANGES, all_to_all, process_group, rank_device, rounds
from .loopback import join_loopback
from .machine import device_name
from .pulls import Pulls, measure_pulls, pull_figures

LINK_RANKS = 2
COLLECTIVE_SIZES = (4096, 1 * MIB, 4 * MIB, 16 * MIB)
# Copies per rank in a round in which all ranks copy.  A round takes 40 ms on PCIe 5, which is long compared with the
# skew between ranks after a barrier.
COPIES_TOGETHER = 32
_ASSUMED = "not measured, one device only"
_ONE_RANK = "not measured, one rank only: chunkflow calibrate --ranks N measures N at once"


def assumed_link_figures(device: torch.device, figures: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield figures of the links for a machine with one GPU.  Collectives cannot be measured there, so their figures are
    assumed.  Only the slowdown of compute by copies is measured.

    ``figures``: the figures from the stages of the calibration that have already run.
    """
    yield "collective_latency_s", 3e-5, f"{_ASSUMED}: assumption"
    yield "collective_bandwidth", 0.75 * figures["h2d_bandwidth"], f"{_ASSUMED}: 3/4 of the link"
    yield "shared_link", True, f"{_ASSUMED}: assumption"
    yield "copy_slowdown", 2.0, f"{_ASSUMED}: a fair share"
    yield "collective_slowdown", 2.0, f"{_ASSUMED}: a fair share"
    yield (
        "attention_slowdown",
        Hardware.attention_slowdown,
        f"{_ASSUMED}: overlap gains nothing, as over NVLink",
    )
    yield _slowdown_figure("compute_slowdown", compute_slowdown(device))


# How the slowdowns of compute were measured, by field.
_SLOWDOWN_SOURCES = {
    "compute_slowdown": "an MLP during copies",
    "attention_slowdown": "attention and an all-to-all of 16 MiB at the same time, the harmonic mean of both",
}


def _slowdown_figure(name: str, slowdown: float) -> Figure:
    return name, round(slowdown, 2) if slowdown >= LEAST_SLOWDOWN else 1.0, _SLOWDOWN_SOURCES[name]


def link_figures(device: torch.device, emulated: LinkEmulation | None, loopback: bool) -> list[Figure]:
    found: list[Figure] = _spawned(_measure_rank, 1 if loopback else LINK_RANKS, device.type, emulated, loopback)
    return found


def joint_copy_figures(device: torch.device, emulated: LinkEmulation | None, ranks: int) -> Iterator[Figure]:
    if ranks < 2:
        yield "host_bandwidth", 0.0, _ONE_RANK
        return
    worst: float = _spawned(_copy_together, ranks, device.type, emulated, ranks)
    yield (
        "host_bandwidth",
        round(ranks * worst),
        f"{ranks} ranks that copy at once, {ranks} times the rate of the slowest",
    )


def joint_pull_figures(
    device: torch.device, emulated: LinkEmulation | None, ranks: int, exchanges: bool, figures: Mapping[str, Any]
) -> Iterator[Figure]:
    """Measure pulls, and yield their figures.  ``exchanges``: whether to measure pulls during collectives as well.
    ``figures``: the figures from the stages of the calibration that have already run."""
    hardware = Hardware(name=device_name(device), **figures)
    if ranks < 2:
        found: Pulls | str = _ONE_RANK
    elif emulated is not None and not emulated.peers:
        found = "0: pulls take the emulated link of copies from host memory"
    else:
        found = _spawned(measure_pulls, ranks, device.type, emulated, ranks, exchanges)
        found = f"0: {found}" if isinstance(found, str) else found
    yield from pull_figures(found, hardware, ranks)


def _spawned(work: Callable[..., None], ranks: int, kind: str, *arguments: Any) -> Any:
    """Run ``work`` in ``ranks`` processes, and return the result that rank 0 saves in a temporary folder.  Each process
    gets the path of this folder as an argument."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(work, (kind, folder, *arguments), nprocs=ranks)
        except ProcessException as error:
            raise ChunkflowError(f"A rank of the calibration failed: {error}") from error
        return torch.load(Path(folder) / "rank0.pt", weights_only=False)


def _copy_together(rank: int, kind: str, folder: str, emulated: LinkEmulation | None, ranks: int) -> None:
    """Measure copies while all ranks copy at the same time.  Rank 0 saves the bytes/s of the slowest rank."""
    device = rank_device(kind, rank)
    with process_group("gloo", rank, ranks, folder):
        size = COPY_SIZES[-1] if kind == "cuda" else MIB
        port, walk = None if emulated is None else make_port(emulated), (4 if kind == "cuda" else 1) * COPY_SIZES[-1]
        copy = copier(device, size, port, walk)
        seconds = [max(s) for s in rounds(device, copy, COPIES_TOGETHER)]
        if rank == 0:
            torch.save(COPIES_TOGETHER * size / statistics.median(seconds[1:]), Path(folder) / "rank0.pt")


def _measure_rank(rank: int, kind: str, folder: str, emulated: LinkEmulation | None, loopback: bool) -> None:
    device = rank_device(kind, rank)
    port = None if emulated is None else make_port(emulated)
    with _group_or_loopback(rank, kind, folder, loopback):
        points = []
        for size in COLLECTIVE_SIZES:
            crossing = size * (LINK_RANKS - 1) // LINK_RANKS
            points.append((crossing, median_seconds(device, all_to_all(device, size, LINK_RANKS, port), EXCHANGES)))
        copy = copier(device, COPY_SIZES[-1] // 4, port)
        exchange = all_to_all(device, COLLECTIVE_SIZES[-1], LINK_RANKS, port)
        uncontended_s = median_seconds(device, copy), median_seconds(device, exchange, EXCHANGES)
        contended_s = contended_seconds(device, exchange, EXCHANGES, copy)
        factors = [round(factor(*pair), 2) for pair in zip(contended_s, uncontended_s, strict=True)]
        figures = [
            *_collective_figures(*line_through(points), *factors),
            _slowdown_figure("attention_slowdown", attention_slowdown(device, exchange, EXCHANGES)),
            _slowdown_figure("compute_slowdown", compute_slowdown(device, port, dist.barrier)),
        ]
        if rank == 0:
            torch.save(figures, Path(folder) / "rank0.pt")


@contextlib.contextmanager
def _group_or_loopback(rank: int, kind: str, folder: str, loopback: bool) -> Iterator[None]:
    """A context with a process group of two ranks.  With ``loopback``, this process acts for both ranks."""
    if not loopback:
        with process_group("nccl" if kind == "cuda" else "gloo", rank, LINK_RANKS, folder):
            yield
        return
    # Kernels move the bytes, because a copy engine serves one stream until the queue of this stream is empty.  An
    # exchange by copy engines would therefore wait for all other copies.
    join_loopback(LINK_RANKS, by_kernels=kind == "cuda")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _collective_figures(latency_s: float, rate: float, copy: float, collective: float) -> Iterator[Figure]:
    """Yield the figures of a collective, and the factors by which copies and collectives slow each other down."""
    shared = max(copy, collective) > 1.05
    yield "collective_latency_s", latency_s, "an all-to-all of 4 KiB"
    yield "collective_bandwidth", rate, "an all-to-all of 16 MiB, less its latency"
    yield "shared_link", shared, "a factor above 1.05"
    yield "copy_slowdown", copy if shared else 1.0, "during a collective"
    yield "collective_slowdown", collective if shared else 1.0, "during copies"
