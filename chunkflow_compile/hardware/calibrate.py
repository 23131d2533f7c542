"""Calibration: measure a machine, on the CPU or on CUDA, into a hardware profile.

Every figure is a median of repetitions.  The stages: GEMM and attention rates by dtype, memory bandwidth, the cost of a
call, H2D time against size, compute beside copies; on two ranks, a collective alone, a copy alone, and both at once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn
from tqdm import tqdm

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware, LinkEmulation
from chunkflow_compile.runtime.device import make_port
from chunkflow_compile.runtime.link import Port

from .contention import MIB, beside_copies, compute_slowdown, copier, factor, median_seconds
from .loopback import join_loopback
from .machine import device_name

LINK_RANKS = 2
# The smallest copy gives the cost to start one, the largest the rate.
COPY_SIZES = (4096, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
COLLECTIVE_SIZES = (4096, 1 * MIB, 4 * MIB, 16 * MIB)
# Collectives per measurement.  Fixed, because all ranks must make the same number of calls; copies run beside them for
# some hundred milliseconds.
ROUNDS_BESIDE = 40
# A smaller slowdown of compute is noise, and would keep plans from streaming.
LEAST_SLOWDOWN = 1.02
_TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True)
class _Line:
    """Seconds = latency + bytes / rate."""

    latency: float
    rate: float


def calibrate(
    device: torch.device, name: str, emulated: LinkEmulation | None = None, loopback: bool = False
) -> Hardware:
    """Measure ``device`` into a profile called ``name``, with a progress bar.

    ``emulated``: an emulated link for copies and collectives.  The profile records it, and programs compiled for the
    profile use it.  ``loopback``: measure the collectives of one process, through host memory; one GPU is enough.
    Raises ChunkflowError if a rank fails, or if the machine is too busy to be measured.
    """
    link = LINK_RANKS if device.type == "cpu" or loopback or torch.cuda.device_count() >= LINK_RANKS else 1
    with tqdm(total=6, unit="stage") as progress:

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
        copy = _line_through(
            [(size, median_seconds(device, copier(device, size, _make_link(emulated)))) for size in COPY_SIZES]
        )
        progress.update()
        stage("collectives and compute, alone and beside copies")
        together = _on_ranks(device, emulated, loopback) if link > 1 else None
        slowdown = together.compute_slowdown if together else compute_slowdown(device)
        progress.update()
    profile = _profile_from(name, device, gemms, attention, memory, launch, copy, slowdown, together)
    return profile if emulated is None else replace(profile, link_emulation=emulated)


@dataclass(frozen=True)
class _Together:
    """Measured on two ranks: the line of a collective, and the slowdowns of copies, collectives and compute."""

    collective: _Line
    copy_slowdown: float
    collective_slowdown: float
    compute_slowdown: float


def _profile_from(
    name: str,
    device: torch.device,
    gemms: dict[str, float],
    attention: float,
    memory: float,
    launch: float,
    copy: _Line,
    slowdown: float,
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
        compute_slowdown=round(slowdown, 2) if slowdown >= LEAST_SLOWDOWN else 1.0,
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
            "compute_slowdown": f"{by}: an MLP beside copies",
        },
    )


def _dtypes(device: torch.device) -> Sequence[torch.dtype]:
    return (torch.float32,) if device.type == "cpu" else (torch.bfloat16, torch.float16, torch.float32)


def _gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return round(2 * n**3 / median_seconds(device, lambda: a @ b))


def _attention_rate(device: torch.device, dtype: torch.dtype) -> float:
    tokens, heads = (1024, 8) if device.type == "cpu" else (8192, 24)
    q, k, v = (torch.randn(1, heads, tokens, 128, device=device, dtype=dtype) for _ in range(3))
    seconds = median_seconds(device, lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
    return 4 * heads * tokens**2 * 128 / seconds


def _memory_rate(device: torch.device) -> float:
    size = (256 if device.type == "cpu" else 2048) * MIB
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return round(2 * size / median_seconds(device, lambda: target.copy_(source)))


def _launch_seconds(device: torch.device) -> float:
    a = torch.ones(16, 16, device=device)
    calls = 200

    def many() -> None:
        for _ in range(calls):
            torch.relu(a)

    return median_seconds(device, many) / calls


def _make_link(emulated: LinkEmulation | None) -> Port | None:
    """This rank's port of the emulated link, None without one."""
    return None if emulated is None else make_port(emulated)


def _on_ranks(device: torch.device, emulated: LinkEmulation | None, loopback: bool) -> _Together:
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_measure_rank, (device.type, folder, emulated, loopback), nprocs=1 if loopback else LINK_RANKS)
        except ProcessException as error:
            raise ChunkflowError(f"A rank of the calibration failed: {error}") from error
        result: _Together = torch.load(Path(folder) / "rank0.pt", weights_only=False)
        return result


def _measure_rank(rank: int, kind: str, folder: str, emulated: LinkEmulation | None, loopback: bool) -> None:
    torch.set_num_threads(1)
    port = _make_link(emulated)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if loopback:
        # A copy engine serves one stream until that has no copy left: an exchange by copies would wait for all beside it.
        join_loopback(LINK_RANKS, by_kernels=kind == "cuda")
    else:
        backend, meet = "nccl" if kind == "cuda" else "gloo", f"file://{folder}/meet"
        dist.init_process_group(backend, init_method=meet, rank=rank, world_size=LINK_RANKS, timeout=_TIMEOUT)
    try:
        points = []
        for size in COLLECTIVE_SIZES:
            crossing = size * (LINK_RANKS - 1) // LINK_RANKS
            points.append((crossing, median_seconds(device, _all_to_all(device, size, port), ROUNDS_BESIDE)))
        alone = _line_through(points)
        exchange, size = _all_to_all(device, COLLECTIVE_SIZES[-1], port), COPY_SIZES[-1] // 4
        copy_alone = median_seconds(device, copier(device, size, port), own_stream=True)
        exchange_alone = median_seconds(device, exchange, ROUNDS_BESIDE, own_stream=True)
        copy_beside, exchange_beside = beside_copies(device, exchange, ROUNDS_BESIDE, copier(device, size, port))
        found = _Together(
            alone,
            copy_slowdown=round(factor(copy_beside, copy_alone), 2),
            collective_slowdown=round(factor(exchange_beside, exchange_alone), 2),
            compute_slowdown=compute_slowdown(device, port, dist.barrier),
        )
        if rank == 0:
            torch.save(found, Path(folder) / "rank0.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _all_to_all(device: torch.device, size: int, port: Port | None = None) -> Callable[[], object]:
    sent, received = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))

    def exchange() -> None:
        dist.all_to_all_single(received, sent)
        if port is not None:
            port.send("collective", size * (LINK_RANKS - 1) // LINK_RANKS)

    return exchange


def _line_through(points: Sequence[tuple[int, float]]) -> _Line:
    """Latency: the seconds of the smallest size, a few KiB.  Rate: from the smallest to the largest size."""
    (small, latency), (large, seconds) = points[0], points[-1]
    if seconds <= latency:
        raise ChunkflowError(
            f"{large} bytes took no longer than {small}: the machine is too busy to measure. Try again when it is idle."
        )
    return _Line(latency=latency, rate=round((large - small) / (seconds - latency)))
