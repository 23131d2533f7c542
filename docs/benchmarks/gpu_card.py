"""Measure, in about two minutes, the properties of a GPU machine that ChunkFlow relies on.

python docs/benchmarks/gpu_card.py --out card.json

Each part measures one property and writes its findings to the file at once.  If a part fails, the script notes the error
and continues with the next part.  If the file exists, only the parts that have not passed run.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from chunkflow_compile.hardware.contention import MIB
from chunkflow_compile.hardware.machine import look
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.runtime.device import check_device
from chunkflow_compile.runtime.torch_cuda import register
from chunkflow_compile.units import size
from chunkflow_compile.weights.host_memory import empty_pages
from chunkflow_compile.weights.limits import HostMemory, host_memory, meminfo

GIB = 1 << 30
# More memory than the CUDA contexts of this process and of a monitoring process need, which take about 0.5 GiB each.
_CONTEXT = 2 * GIB
# The bytes of host memory that are written before the free memory is queried again.
_STEP = 256 * MIB
# Two copies share PCIe if a small copy takes at most this many times as long during a large copy as alone: twice as long
# at half of the bandwidth, and half as long again to wait for a piece of the large copy.
_SHARED = 3.0


@dataclass(frozen=True)
class Probe:
    """The parameters of the parts.

    ``nbytes``: the bytes of host memory per type of page.  ``grow``: the bytes of host memory to write in :func:`grow`.
    ``side``: the number of rows and columns of the matrices.  ``computes``: whether Triton and NCCL kernels compute;
    False on a stand-in for CUDA's runtime.
    """

    device: torch.device
    nbytes: int
    grow: int
    side: int
    computes: bool


def machine(probe: Probe) -> Iterator[str]:
    """Yield versions, the PCIe generation, and properties of the host."""
    memory = host_memory()
    yield f"kernel {platform.release()}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores"
    yield f"torch {torch.__version__}, CUDA {torch.version.cuda}, compute capability {torch.cuda.get_device_capability()}"
    yield f"host memory {size(memory.total)}, of which {size(memory.free)} are free"
    yield "huge pages for private memory: {}, for shared memory: {}".format(
        *(p or "not told" for p in look().huge_pages)
    )
    query = ("name", "driver_version", "memory.total", "pcie.link.gen.current", "pcie.link.gen.max")
    query += ("pcie.link.width.current", "pcie.link.width.max", "clocks.sm", "clocks.max.sm", "power.limit")
    try:
        asked = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
        yield "; ".join(f"{name} {value.strip()}" for name, value in zip(query, said.split(","), strict=True))
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        yield f"nvidia-smi does not answer: {error}"
    settings = sorted(k for k in os.environ if k.startswith(("CUDA_", "PYTORCH_", "NCCL_", "TORCH_", "GLOO_")))
    yield f"settings in the environment: {', '.join(settings) or 'none'}"


def grow(probe: Probe) -> Iterator[str]:
    """Find out whether the machine gets more memory when it writes to memory, as some virtual machines do."""
    reserve, before = host_memory().reserve, _told()
    pages, done, start = mmap.mmap(-1, max(probe.grow, _STEP)), 0, time.perf_counter()
    while done < probe.grow and host_memory().free > 2 * reserve:
        length = min(_STEP, probe.grow - done)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(pages, done)), 1, length)
        done += length
    seconds, least = time.perf_counter() - start, _told()
    del pages
    after = _told()
    yield (
        f"{size(done)} of host memory touched at {done / seconds / 1e9:.2f} GB/s; free {size(before.free)} before, "
        f"{size(least.free)} with it, {size(after.free)} after; in all {size(before.total)} before, {size(after.total)} after"
    )
    grew = after.total - before.total > GIB or least.free + done - before.free > GIB
    yield "host memory grows as it is touched" if grew else "host memory does not grow as it is touched"


def group(probe: Probe, backend: str) -> Iterator[str]:
    """Check that a functional all-to-all in a process group with one rank returns its input."""
    if backend == "nccl" and not probe.computes:
        yield "nccl: not run, its kernels do not compute here"
        return
    named = {"device_id": probe.device} if backend == "nccl" else {}
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **named)
    try:
        x = torch.arange(1 << 20, device=probe.device, dtype=torch.float32)
        y = torch.ops._c10d_functional.all_to_all_single(x, [x.numel()], [x.numel()], dist.group.WORLD.group_name)
        y = torch.ops._c10d_functional.wait_tensor(y)
        if not torch.equal(x, y):
            raise AssertionError(f"{backend}: an all-to-all of one rank does not return its input")
        yield f"{backend}: a functional all-to-all of one rank returns its input"
    finally:
        dist.destroy_process_group()


def copies(probe: Probe) -> Iterator[str]:
    """Measure the rate of copies to the GPU by type of page and by size, and the time to pin pages."""
    target = torch.empty(probe.nbytes, dtype=torch.uint8, device=probe.device)
    stream = torch.cuda.Stream(probe.device)
    flat = torch.empty(probe.nbytes, dtype=torch.uint8)
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "the runtime's own pages": lambda: empty_pages(flat),
        "pages of 4 KiB": lambda: _pages(probe.nbytes, getattr(mmap, "MADV_NOHUGEPAGE", 15)),
        "a memfd": lambda: _memfd(probe.nbytes),
        "cudaHostAlloc": lambda: torch.empty(probe.nbytes, dtype=torch.uint8, pin_memory=True),
    }
    for kind, make in kinds.items():
        start = time.perf_counter()
        host = make()
        ctypes.memset(host.data_ptr(), 1, probe.nbytes)
        filled = time.perf_counter() - start
        start = time.perf_counter()
        unpin = None if host.is_pinned() else register(host, probe.device)
        pinned = time.perf_counter() - start
        sizes = [s for s in (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB) if s <= probe.nbytes] or [probe.nbytes]
        rates = [f"{size(s)} {_rate(host, target, s, stream):.2f} GB/s" for s in sizes]
        start = time.perf_counter()
        if unpin is not None:
            unpin()
        unpinned = time.perf_counter() - start
        yield (
            f"copies to the GPU from {kind}, by size: {', '.join(rates)}; {size(probe.nbytes)} written in {filled:.2f} s, "
            f"pinned in {pinned:.2f} s, unpinned in {unpinned:.2f} s"
        )
    yield f"copies to the GPU from pageable memory: {_rate(torch.ones_like(flat), target, probe.nbytes, stream):.2f} GB/s"


def queueing(probe: Probe) -> Iterator[str]:
    """Find out whether a small copy, such as the copy of an input, waits until a large copy on another stream ends."""
    big = torch.ones(min(512 * MIB, probe.nbytes), dtype=torch.uint8, pin_memory=True)
    small = torch.ones(4 * MIB, dtype=torch.uint8, pin_memory=True)
    into, there = torch.empty_like(big, device=probe.device), torch.empty_like(small, device=probe.device)
    weights, other = torch.cuda.Stream(), torch.cuda.Stream()

    def timed(pieces: int) -> tuple[float, float]:
        """Return the milliseconds from the start of the large copy until the small copy ends, and until the large copy
        ends.

        Both times begin at an event on the large copy's stream, because an event on the other stream would wait for the
        copy engine.  ``pieces``: the number of copies into which the large copy is divided; 0 to leave it out.
        """
        with torch.cuda.stream(weights):
            first = _event()
            for a, b in zip(into.chunk(pieces), big.chunk(pieces), strict=True) if pieces else ():
                a.copy_(b, non_blocking=True)
            last = _event()
        with torch.cuda.stream(other):
            there.copy_(small, non_blocking=True)
            end = _event()
        torch.cuda.synchronize()
        return first.elapsed_time(end), first.elapsed_time(last)

    timed(1)
    alone = statistics.median(timed(0)[0] for _ in range(9))
    beside: dict[int, float] = {}
    for pieces in (1, 8, 32):
        beside[pieces], large = (
            statistics.median(column) for column in zip(*(timed(pieces) for _ in range(5)), strict=True)
        )
        yield (
            f"4 MiB to the GPU take {alone:.3f} ms alone, and {beside[pieces]:.3f} ms after {size(big.nbytes)} of another "
            f"stream in {pieces} {'copy' if pieces == 1 else 'copies'}, which take {large:.3f} ms"
        )
    if beside[1] <= _SHARED * alone:
        yield "copies of one direction share PCIe: the size of a copy needs no limit"
    elif beside[32] < beside[1] / 2:
        yield f"copies of one direction queue: limit a copy to {size(big.nbytes // 32)}"
    else:
        yield "copies of one direction queue: a copy waits until the other stream is empty, whatever the size of its copies"


def overlap(probe: Probe) -> Iterator[str]:
    """Measure how well copies overlap with matrix products, on streams from torch's pools."""
    host = torch.ones(min(256 * MIB, probe.nbytes), dtype=torch.uint8, pin_memory=True)
    into = torch.empty_like(host, device=probe.device)
    shape = (probe.side, probe.side)
    a, b = (torch.randn(shape, device=probe.device, dtype=torch.bfloat16) for _ in range(2))
    side = torch.cuda.Stream(priority=-3)

    def timed(products: int, copy: bool) -> float:
        torch.cuda.synchronize()
        begin = _event()
        if copy:
            side.wait_event(begin)
            with torch.cuda.stream(side):
                for _ in range(8):
                    into.copy_(host, non_blocking=True)
        for _ in range(products):
            a @ b
        if copy:
            torch.cuda.current_stream().wait_stream(side)
        end = _event()
        end.synchronize()
        return begin.elapsed_time(end)

    timed(20, True)
    n = max(1, round(20 * timed(0, True) / timed(20, False)))
    alone, products, both = (
        statistics.median(timed(m, c) for _ in range(5)) for m, c in ((0, True), (n, False), (n, True))
    )
    hidden = (alone + products - both) / min(alone, products)
    yield (
        f"matrix products of {products:.2f} ms and copies of {alone:.2f} ms together take {both:.2f} ms, so "
        f"{100 * hidden:.0f} % of the shorter one is hidden"
    )


def marks(probe: Probe) -> Iterator[str]:
    """Measure the host time of the CUDA calls that the executor makes, and the GPU time of a timed event."""
    stream, x = torch.cuda.Stream(), torch.zeros(1, device=probe.device)
    plain, timed = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)
    small = torch.ones(4096, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(small, device=probe.device)
    calls: dict[str, Callable[[], object]] = {
        "record an event": lambda: plain.record(),
        "record a timed event": lambda: timed.record(),
        "wait for an event": lambda: stream.wait_event(plain),
        "copy 4 KiB": lambda: there.copy_(small, non_blocking=True),
        "launch a kernel": lambda: x.add_(1),
    }
    costs = []
    for name, call in calls.items():
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            call()
        costs.append(f"{name} {(time.perf_counter() - start) / 500 * 1e6:.2f} us")
        torch.cuda.synchronize()
    yield f"host time: {', '.join(costs)}"
    found = []
    for marked in (False, True):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(400)]
        for _ in range(2):  # the first time fills caches
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # the queue fills meanwhile
            begin = _event()
            for each in events:
                x.add_(1)
                if marked:
                    each.record()
            end = _event()
            end.synchronize()
        found.append(begin.elapsed_time(end) / 400 * 1e3)
    yield f"time on the GPU: a small kernel {found[0]:.2f} us, with a timed event after it {found[1]:.2f} us"


def by_kernels(probe: Probe) -> Iterator[str]:
    """Measure an exchange by kernels that write to pinned host memory and read from it, like NCCL without peer access.
    It runs alone and during a copy."""
    from chunkflow_compile.hardware.kernel_copy import copy_by_kernel

    words = min(64 * MIB, probe.nbytes) // 8
    host = torch.zeros(words, dtype=torch.int64, pin_memory=True)
    here = torch.arange(words, dtype=torch.int64, device=probe.device)
    back = torch.zeros_like(here)
    big = torch.ones(min(512 * MIB, probe.nbytes), dtype=torch.uint8, pin_memory=True)
    into = torch.empty_like(big, device=probe.device)
    side = torch.cuda.Stream(priority=-3)

    def timed(blocks: int, copy: bool) -> tuple[float, float]:
        torch.cuda.synchronize()
        begin = _event()
        with torch.cuda.stream(side):
            side.wait_event(begin)
            first = _event()
            if copy:
                into.copy_(big, non_blocking=True)
            last = _event()
        copy_by_kernel(host, here, blocks)
        copy_by_kernel(back, host, blocks)
        end = _event()
        torch.cuda.synchronize()
        return begin.elapsed_time(end), first.elapsed_time(last)

    for blocks in (4, 16, 64):
        timed(blocks, True)
        if probe.computes and not torch.equal(here, back):
            raise AssertionError("data that kernels copied through host memory differs")
        alone = statistics.median(timed(blocks, False)[0] for _ in range(5))
        beside = [timed(blocks, True) for _ in range(5)]
        exchange, copy = (statistics.median(column) for column in zip(*beside, strict=True))
        yield (
            f"{size(8 * words)} out and in by kernels of {blocks} blocks take {alone:.2f} ms alone, and {exchange:.2f} ms "
            f"during a copy of {size(big.nbytes)}, which takes {copy:.2f} ms"
        )


PARTS: dict[str, Callable[[Probe], Iterator[str]]] = {
    "machine": machine,
    "host memory that grows": grow,
    "gloo": partial(group, backend="gloo"),
    "nccl": partial(group, backend="nccl"),
    "copies": copies,
    "copies that queue": queueing,
    "overlap": overlap,
    "marks": marks,
    "exchange by kernels": by_kernels,
}


def _event() -> torch.cuda.Event:
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


def _told() -> HostMemory:
    """Return the host memory that the kernel reports, without the limits that environment variables set."""
    said = meminfo()
    return HostMemory(said.get("MemTotal", 0), said.get("MemAvailable", 0))


def _pages(nbytes: int, advice: int) -> torch.Tensor:
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made.madvise(advice)
    return torch.frombuffer(made, dtype=torch.uint8)


def _memfd(nbytes: int) -> torch.Tensor:
    number = os.memfd_create("probe")
    try:
        os.ftruncate(number, nbytes)
        return torch.frombuffer(mmap.mmap(number, nbytes), dtype=torch.uint8)
    finally:
        os.close(number)


def _rate(host: torch.Tensor, target: torch.Tensor, piece: int, stream: torch.cuda.Stream) -> float:
    """Return the GB/s of copies with ``piece`` bytes each.  Each of two runs copies ``host`` twice, and the second run is
    timed."""
    parts = list(zip(target.split(piece), host.split(piece), strict=True))
    with torch.cuda.stream(stream):
        for _ in range(2):
            begin = _event()
            for into, part in (*parts, *parts):
                into.copy_(part, non_blocking=True)
            end = _event()
            end.synchronize()
    return 2 * host.nbytes / begin.elapsed_time(end) / 1e6


def ready() -> torch.device:
    """Return the first GPU.  Raises ChunkflowError if there is no GPU, if another process uses it, or if diffusers is
    missing."""
    device = check_device(torch.device("cuda", 0))
    if importlib.util.find_spec("diffusers") is None:
        raise ChunkflowError(
            "diffusers is missing here. Where there is a registry: pip download --no-deps -d wheels diffusers==0.42.1. "
            "Here: python3 -m pip install --no-index --no-deps wheels/*.whl."
        )
    free, total = torch.cuda.mem_get_info(device)
    if (held := total - free - torch.cuda.memory_reserved(device)) > _CONTEXT:
        raise ChunkflowError(
            f"{size(held)} of the {size(total)} of {device} are held by another process, so nothing here could be compared. "
            "nvidia-smi names it: end it, or wait until it ends."
        )
    return device


def measure(probe: Probe, out: Path) -> list[str]:
    """Run the parts that have not passed, and write the findings to ``out`` after each part.  Return the names of the
    parts that failed."""
    found = json.loads(out.read_text()) if out.exists() else {}
    for name, part in PARTS.items():
        if found.get(name, {}).get("passed"):
            continue
        start, lines, fault = time.perf_counter(), list[str](), ""
        try:
            for line in part(probe):
                lines.append(line)
                print(line, flush=True)
        except Exception as error:  # noqa: BLE001  (the other parts still run)
            fault = f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            print(f"{name} {fault}", flush=True)
        seconds = round(time.perf_counter() - start, 1)
        found[name] = {"passed": not fault, "seconds": seconds, "says": lines + [fault] * bool(fault)}
        out.write_text(json.dumps(found, indent=1) + "\n")
        torch.cuda.empty_cache()
    return [name for name in PARTS if not found[name]["passed"]]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON; parts that have passed there are not run again")
    parser.add_argument("--gib", type=float, default=2.0, help="host memory of each kind of page (default 2)")
    parser.add_argument("--grow", type=float, default=60.0, help="GiB of host memory to touch (default 60)")
    parser.add_argument(
        "--dry-run", action="store_true", help="little memory, on a stand-in: shows that each part runs"
    )
    arguments = parser.parse_args(given)
    dry = arguments.dry_run
    try:
        device = ready()
    except ChunkflowError as error:
        parser.exit(2, f"{error}\n")
    probe = Probe(
        device=device,
        nbytes=8 * MIB if dry else int(arguments.gib * GIB),
        grow=_STEP if dry else int(arguments.grow * GIB),
        side=256 if dry else 8192,
        computes=not dry,
    )
    return 1 if measure(probe, arguments.out) else 0


if __name__ == "__main__":
    sys.exit(main())
