"""Calibration: measure the CPU or the GPUs of a machine, and create a hardware profile from the results.

Every figure is the median of several repetitions.  ``STAGES`` lists the stages.  If there are several ranks, two of
them measure collectives, and all of them measure simultaneous copies and pulls.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.nn.attention import SDPBackend, sdpa_kernel

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware, LinkEmulation
from chunkflow_compile.runtime.device import make_port
from chunkflow_compile.units import size

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
from .lockstep import ROUNDS_BESIDE, all_to_all, process_group, rank_device, rounds
from .loopback import join_loopback
from .machine import device_name
from .pulls import Pulls, measure_pulls, pull_figures
from .stopwatch import Stopwatch

# The stages of the measurement, in order.
STAGES = (
    "GEMMs and attention",
    "memory",
    "calls",
    "copies",
    "collectives and compute, alone and while copies run",
    "copies of all ranks at once",
    "pulls from the GPUs of other ranks",
)
LINK_RANKS = 2
# How often :func:`repeated_seconds` times the same GEMMs, before and after a calibration, to detect a busy machine.
_REPEATED = 4
# Sizes of the timed copies in bytes.  The time to start a copy is computed from the smallest size, and the rate from
# the smallest and the largest size.
COPY_SIZES = (4096, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
COLLECTIVE_SIZES = (4096, 1 * MIB, 4 * MIB, 16 * MIB)
# Copies per rank in a round in which all ranks copy.  A round takes 40 ms on PCIe 5, which is long compared with the
# skew between ranks after a barrier.
COPIES_TOGETHER = 32
# Seconds of warm-up.  Without warm-up, an H100 (idle at 345 MHz) was measured with 725 instead of 781 TFLOP/s, and 52.6
# instead of 55 GB/s.
_WARM_UP_S = 1.0
# Attention kernel -> the backend of torch that runs it.
BACKENDS: Mapping[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# The assumed ``eta_gemm`` of a GPU.  Values from measured models are between 0.78 (H100) and 0.95 (RTX 4090).
_ETA_GEMM = 0.85

# A figure in a profile: the field of ``Hardware``, the value, and a text that states how the value was measured, or
# that it was not measured.
_Figure = tuple[str, Any, str]
_ASSUMED = "not measured, one device only"
_ONE_RANK = "not measured, one rank only: chunkflow calibrate --ranks N measures N at once"
_AS_IT_IS = ("not measured", "assumption", "0:", "1:", "as the driver says")


def calibrate(
    device: torch.device,
    name: str,
    emulated: LinkEmulation | None = None,
    loopback: bool = False,
    together: int | None = None,
    phase: Callable[[str], AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
) -> Hardware:
    """Measure ``device``, and return a profile called ``name``.

    ``emulated``: an emulated link for copies and collectives, or None.  Programs that are compiled for the profile then
    use this emulated link, too.
    ``loopback``: whether to measure collectives within one process, through host memory.  That needs only one GPU.
    ``together``: the number of ranks that copy at the same time and pull from each other; by default one rank per GPU.
    ``phase``: a function that takes the name of a stage, and returns a context in which this stage is measured.
    Raises ChunkflowError if a rank fails, or if the machine is too busy to be measured.
    """
    together = together or (1 if device.type == "cpu" else torch.cuda.device_count())
    ranks = device.type == "cpu" or loopback or torch.cuda.device_count() >= LINK_RANKS
    figures: dict[str, Any] = {"eta_pref": 1.0}
    sources = {"eta_pref": "1: the bandwidth is measured, not nominal"}
    link = partial(_on_ranks, device, emulated, loopback) if ranks else partial(_on_one_device, device, figures)
    measures: tuple[Callable[[], Iterable[_Figure]], ...] = (
        partial(_compute, device),
        partial(_memory, device),
        partial(_calls, device),
        partial(_copies, device, emulated),
        link,
        partial(_together, device, emulated, together),
        partial(_pulls, device, emulated, together, not loopback, figures),
    )
    by = f"measured on {device_name(device)}, torch {torch.__version__}"
    _warm_up(device)
    for stage, measure in zip(STAGES, measures, strict=True):
        with phase(f"measuring {stage}"):
            for figure, value, how in measure():
                figures[figure], sources[figure] = value, how if how.startswith(_AS_IT_IS) else f"{by}: {how}"
    return Hardware(name=name, **figures, sources=sources, link_emulation=emulated)


def repeated_seconds(device: torch.device) -> list[float]:
    """Time the same GEMMs several times, and return the seconds of each run.  If the times differ, other work keeps the
    device busy."""
    _warm_up(device)
    n, times = (1024, 4) if device.type == "cpu" else (4096, 64)
    a, b = (
        torch.randn(n, n, device=device, dtype=torch.float32 if device.type == "cpu" else torch.float16) for _ in "ab"
    )
    a @ b
    seconds = []
    for _ in range(_REPEATED):
        watch = Stopwatch(device)
        for _ in range(times):
            a @ b
        seconds.append(watch.stop())
    return seconds


def _warm_up(device: torch.device) -> None:
    """Run work until the GPU is at full speed: an idle GPU takes a second to reach its clocks and to wake its PCIe link."""
    if device.type == "cuda":
        work = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        start, copy = time.monotonic(), copier(device, 64 * MIB)
        while time.monotonic() - start < _WARM_UP_S:
            copy()
            work @ work
            torch.cuda.synchronize(device)


def _compute(device: torch.device) -> Iterator[_Figure]:
    dtypes = (torch.float32,) if device.type == "cpu" else (torch.bfloat16, torch.float16, torch.float32)
    gemms = {str(d).removeprefix("torch."): _gemm_rate(device, d) for d in dtypes}
    yield "gemm_flops", gemms, "square GEMMs"
    assumed = "assumption: between the cards of which steps are published" if device.type == "cuda" else "assumption"
    yield "eta_gemm", _ETA_GEMM if device.type == "cuda" else 1.0, assumed
    main: torch.dtype = getattr(torch, max(gemms, key=lambda d: gemms[d]))
    rates, first, masked = _attention_rates(device, main)
    yield "attention_flops", rates, "a square of tokens, heads of 128"
    yield "attention", first, "what scaled_dot_product_attention takes here"
    yield "eta_masked", masked, "what it takes with a mask of all heads, which may be another kernel"


def _gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return round(2 * n**3 / median_seconds(device, lambda: a @ b))


def _attention_rates(device: torch.device, dtype: torch.dtype) -> tuple[dict[str, float], str, float]:
    """Return three values: the FLOP/s of each attention kernel that can run here; the kernel that torch chooses; and
    the rate of this kernel with a mask, as a fraction of its rate without a mask."""
    tokens, heads = (1024, 8) if device.type == "cpu" else (8192, 24)
    q, k, v = (torch.randn(1, heads, tokens, 128, device=device, dtype=dtype) for _ in range(3))

    def rate(mask: torch.Tensor | None = None) -> float:
        seconds = median_seconds(device, lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return round(4 * heads * tokens**2 * 128 / seconds)

    def share(unmasked: float) -> float:
        mask = torch.ones(1, 1, 1, tokens, dtype=torch.bool, device=device)
        return round(min(1.0, rate(mask) / unmasked), 2)

    if device.type == "cpu":
        return {"cpu": (unmasked := rate())}, "cpu", share(unmasked)
    rates = dict[str, float]()
    for kernel, backend in BACKENDS.items():
        with contextlib.suppress(RuntimeError), sdpa_kernel(backend):  # raised by a kernel that cannot run here
            rates[kernel] = rate()
    chosen = SDPBackend(torch._fused_sdp_choice(q, k, v))
    first = next((kernel for kernel, backend in BACKENDS.items() if backend == chosen), "")
    first = first if first in rates else max(rates, key=lambda kernel: rates[kernel])
    return rates, first, share(rates[first])


def _memory(device: torch.device) -> Iterator[_Figure]:
    size = (256 if device.type == "cpu" else 2048) * MIB
    source, target = (torch.ones(size // 4, dtype=torch.float32, device=device) for _ in range(2))
    rate = round(2 * size / median_seconds(device, lambda: torch.add(source, 1, out=target)))
    yield "memory_bandwidth", rate, "a pointwise kernel, read and written"
    yield "eta_memory", 1.0, "1: the bandwidth is measured, not nominal"
    card = None if device.type == "cpu" else torch.cuda.get_device_properties(device)
    yield "memory_bytes", 0 if card is None else card.total_memory, "as the driver says; 0 on a CPU"
    yield "multiprocessors", 0 if card is None else card.multi_processor_count, "as the driver says; 0 on a CPU"
    cache = 0 if card is None else card.L2_cache_size
    yield "cache_bytes", cache, "as the driver says; the caches of a CPU are left out"
    inside = cache_rate(source[: cache // 16], partial(_in_a_row, device)) if cache else rate
    how = "pointwise kernels in a row on a quarter of the cache, less their starts"
    yield "cache_bandwidth", max(rate, inside), how


def cache_rate(part: torch.Tensor, in_a_row: Callable[[Callable[[], object]], float]) -> int:
    """Return the bytes/s at which kernels read and write ``part``, a tensor that fits in the cache.  Return 0 if a
    kernel takes no longer for ``part`` than for a single element.

    ``in_a_row``: a function that returns the seconds per call of its argument, averaged over many calls.  The time for
    a single element is subtracted: it is the cost to start a kernel, which plans add separately.
    """
    short, long = (in_a_row(partial(torch.add, values, 1, out=values)) for values in (part[:1], part))
    return round(2 * (part.nbytes - part[:1].nbytes) / (long - short)) if long > short else 0


def _calls(device: torch.device) -> Iterator[_Figure]:
    a = torch.ones(16, 16, device=device)
    call = _in_a_row(device, lambda: torch.relu(a))
    if device.type == "cpu":
        yield "launch_s", call, "a call that computes next to nothing"
    else:
        yield "launch_s", 2e-6, "assumption: an event between two kernels, as on an H200"
    yield "kernel_s", call, "small kernels in a row"


def _in_a_row(device: torch.device, call: Callable[[], object], calls: int = 200) -> float:
    """Return the seconds per call, averaged over many calls.  On a GPU, the calls are issued while the GPU is busy with
    earlier work, so that launch overhead on the host does not count."""
    if device.type == "cpu":
        return median_seconds(device, lambda: [call() for _ in range(calls)]) / calls
    work = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    seconds = list[float]()
    for _ in range(5):
        for _ in range(6):
            work @ work
        watch = Stopwatch(device)
        for _ in range(calls):
            call()
        seconds.append(watch.stop() / calls)
    return statistics.median(seconds)


def _copies(device: torch.device, emulated: LinkEmulation | None) -> Iterator[_Figure]:
    if device.type == "cuda":
        start_s, rate = _queued_copies(device)
        yield "h2d_bandwidth", rate, "copies of 64 MiB in a row, less the time to start one"
        yield "chunk_s", start_s, "copies of 1 MiB in a row, less their bytes"
        return
    port = None if emulated is None else make_port(emulated)
    times = [(size, median_seconds(device, copier(device, size, port))) for size in COPY_SIZES]
    start_s, rate = _line_through(times)
    yield "h2d_bandwidth", rate, "a copy of 64 MiB, less the time to start one"
    yield "chunk_s", start_s, "a copy of 4 KiB"


def _queued_copies(device: torch.device) -> tuple[float, float]:
    """Return the seconds to start a copy, and the bytes/s of copies.  Copies are measured while others are queued, as
    in a step: the start of a copy is then mostly hidden."""
    small, large = MIB, 64 * MIB
    short = _in_a_row(device, copier(device, small, walk=256 * MIB), 256)
    long = _in_a_row(device, copier(device, large, walk=256 * MIB), 8)
    rate = (large - small) / (long - short)
    return float(f"{max(0.0, short - small / rate):.3g}"), round(rate)


def _on_one_device(device: torch.device, figures: Mapping[str, Any]) -> Iterator[_Figure]:
    """Yield the measured slowdown of compute by copies, and assumed figures for collectives, whose measurement needs a
    second device.  ``figures``: the figures from the earlier stages."""
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
    yield _slowed("compute_slowdown", compute_slowdown(device))


# How the slowdowns of compute were measured, by field.
_SLOWED = {
    "compute_slowdown": "an MLP beside copies",
    "attention_slowdown": "attention and an all-to-all of 16 MiB at the same time, the harmonic mean of both",
}


def _slowed(name: str, slowdown: float) -> _Figure:
    return name, round(slowdown, 2) if slowdown >= LEAST_SLOWDOWN else 1.0, _SLOWED[name]


def _on_ranks(device: torch.device, emulated: LinkEmulation | None, loopback: bool) -> list[_Figure]:
    found: list[_Figure] = _spawned(_measure_rank, 1 if loopback else LINK_RANKS, device.type, emulated, loopback)
    return found


def _together(device: torch.device, emulated: LinkEmulation | None, ranks: int) -> Iterator[_Figure]:
    if ranks < 2:
        yield "host_bandwidth", 0.0, _ONE_RANK
        return
    worst: float = _spawned(_copy_together, ranks, device.type, emulated, ranks)
    yield (
        "host_bandwidth",
        round(ranks * worst),
        f"{ranks} ranks that copy at once, {ranks} times the rate of the slowest",
    )


def _pulls(
    device: torch.device, emulated: LinkEmulation | None, ranks: int, exchanges: bool, figures: Mapping[str, Any]
) -> Iterator[_Figure]:
    """Measure pulls.  ``exchanges``: whether these ranks can run collectives as well.  ``figures``: the figures from
    the earlier stages."""
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
    """Run ``work`` in ``ranks`` processes, and return the result that rank 0 has saved in the folder that all ranks are
    given."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(work, (kind, folder, *arguments), nprocs=ranks)
        except ProcessException as error:
            raise ChunkflowError(f"A rank of the calibration failed: {error}") from error
        return torch.load(Path(folder) / "rank0.pt", weights_only=False)


def _copy_together(rank: int, kind: str, folder: str, emulated: LinkEmulation | None, ranks: int) -> None:
    """Measure copies while all ranks copy at the same time, and save the bytes/s of the slowest rank."""
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
            points.append((crossing, median_seconds(device, all_to_all(device, size, LINK_RANKS, port), ROUNDS_BESIDE)))
        copy = copier(device, COPY_SIZES[-1] // 4, port)
        exchange = all_to_all(device, COLLECTIVE_SIZES[-1], LINK_RANKS, port)
        uncontended_s = median_seconds(device, copy), median_seconds(device, exchange, ROUNDS_BESIDE)
        contended_s = contended_seconds(device, exchange, ROUNDS_BESIDE, copy)
        factors = [round(factor(*pair), 2) for pair in zip(contended_s, uncontended_s, strict=True)]
        figures = [
            *_link_figures(*_line_through(points), *factors),
            _slowed("attention_slowdown", attention_slowdown(device, exchange, ROUNDS_BESIDE)),
            _slowed("compute_slowdown", compute_slowdown(device, port, dist.barrier)),
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
    # Kernels move the bytes: a copy engine serves one stream until its queue is empty, so an exchange made of copies
    # would wait for all other copies.
    join_loopback(LINK_RANKS, by_kernels=kind == "cuda")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _link_figures(latency_s: float, rate: float, copy: float, collective: float) -> Iterator[_Figure]:
    """Yield the figures of a collective, and the factors by which copies and collectives slow each other down."""
    shared = max(copy, collective) > 1.05
    yield "collective_latency_s", latency_s, "an all-to-all of 4 KiB"
    yield "collective_bandwidth", rate, "an all-to-all of 16 MiB, less its latency"
    yield "shared_link", shared, "a factor above 1.05"
    yield "copy_slowdown", copy if shared else 1.0, "beside a collective"
    yield "collective_slowdown", collective if shared else 1.0, "beside copies"


def _line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit seconds = latency + bytes / rate; return latency and rate.

    The latency is the time for the smallest size, a few KiB.  The rate follows from the difference between the smallest
    and the largest size.  Raises ChunkflowError if the largest size took no longer than the smallest.
    """
    (small, latency), (large, seconds) = points[0], points[-1]
    if seconds <= latency:
        raise ChunkflowError(
            f"{size(large)} took no longer than {size(small)}: the machine is too busy to measure. Try again when it is idle."
        )
    return latency, round((large - small) / (seconds - latency))
