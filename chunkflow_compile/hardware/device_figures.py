"""Measurement of one device: rates of GEMMs and attention, memory, caches, the cost of a call, and copies from the host."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.runtime.device import make_port
from chunkflow_compile.units import size

from .contention import MIB, copier, median_seconds
from .stopwatch import Stopwatch

# Number of runs of the same GEMMs in :func:`repeated_seconds`, which is called before and after a calibration to detect
# a busy machine.
_REPEATED = 4
# Sizes of the timed copies in bytes.  On a CPU, the time to start a copy is computed from the smallest size, and the
# rate from the smallest and the largest size.
COPY_SIZES = (4096, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
# Seconds of warm-up.  Without warm-up, the measurement of an idle H100 (345 MHz) gave 725 TFLOP/s instead of 781, and
# 52.6 GB/s instead of 55.
_WARM_UP_S = 1.0
# Name of an attention kernel -> the backend of ``scaled_dot_product_attention`` that runs this kernel.
BACKENDS: Mapping[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# The assumed ``eta_gemm`` of a GPU, that is, the share of the measured GEMM rate that a model reaches.  In measured
# models, this share is between 0.78 (H100) and 0.95 (RTX 4090).
_ETA_GEMM = 0.85


# A figure in a profile: the field of ``Hardware``, the value, and a text that states how the value was measured, or
# that it was not measured.
Figure = tuple[str, Any, str]


def repeated_seconds(device: torch.device) -> list[float]:
    """Run the same GEMMs several times, and return the seconds that each run took.  If the runs take different times,
    other work keeps the device busy."""
    warm_up(device)
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


def warm_up(device: torch.device) -> None:
    """Run work until the GPU is at full speed.  An idle GPU takes a second to reach its maximum clocks and to wake its
    PCIe link."""
    if device.type == "cuda":
        work = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        start, copy = time.monotonic(), copier(device, 64 * MIB)
        while time.monotonic() - start < _WARM_UP_S:
            copy()
            work @ work
            torch.cuda.synchronize(device)


def compute_figures(device: torch.device) -> Iterator[Figure]:
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


def memory_figures(device: torch.device) -> Iterator[Figure]:
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

    ``in_a_row``: a function that calls its argument many times, and returns the average seconds per call.  The time for
    a single element is the cost of starting a kernel.  It is subtracted from the time for ``part``, because plans add
    this cost separately.
    """
    short, long = (in_a_row(partial(torch.add, values, 1, out=values)) for values in (part[:1], part))
    return round(2 * (part.nbytes - part[:1].nbytes) / (long - short)) if long > short else 0


def call_figures(device: torch.device) -> Iterator[Figure]:
    a = torch.ones(16, 16, device=device)
    call = _in_a_row(device, lambda: torch.relu(a))
    if device.type == "cpu":
        yield "launch_s", call, "a call that computes next to nothing"
    else:
        yield "launch_s", 2e-6, "assumption: an event between two kernels, as on an H200"
    yield "kernel_s", call, "small kernels in a row"


def _in_a_row(device: torch.device, call: Callable[[], object], calls: int = 200) -> float:
    """Return the seconds per call, averaged over many calls.  On a GPU, the host issues the calls while the GPU is busy
    with earlier work, so that launch overhead on the host does not count."""
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


def copy_figures(device: torch.device, emulated: LinkEmulation | None) -> Iterator[Figure]:
    if device.type == "cuda":
        start_s, rate = _queued_copies(device)
        yield "h2d_bandwidth", rate, "copies of 64 MiB in a row, less the time to start one"
        yield "chunk_s", start_s, "copies of 1 MiB in a row, less their bytes"
        return
    port = None if emulated is None else make_port(emulated)
    times = [(size, median_seconds(device, copier(device, size, port))) for size in COPY_SIZES]
    start_s, rate = line_through(times)
    yield "h2d_bandwidth", rate, "a copy of 64 MiB, less the time to start one"
    yield "chunk_s", start_s, "a copy of 4 KiB"


def _queued_copies(device: torch.device) -> tuple[float, float]:
    """Return the seconds to start a copy, and the bytes/s of copies.  As in a step, each copy is queued while the copy
    before it still runs, so most of the time to start a copy is hidden."""
    small, large = MIB, 64 * MIB
    short = _in_a_row(device, copier(device, small, walk=256 * MIB), 256)
    long = _in_a_row(device, copier(device, large, walk=256 * MIB), 8)
    rate = (large - small) / (long - short)
    return float(f"{max(0.0, short - small / rate):.3g}"), round(rate)


def line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
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
