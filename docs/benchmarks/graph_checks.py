"""Check the properties of a GPU that allow a step to be one CUDA graph.  The checks use only torch.

python docs/benchmarks/graph_checks.py --out graphs.jsonl

Each check runs in a separate process with a time limit, and writes its lines at once.  If the file exists, checks that
have ended there are skipped.  The check ``overlap`` is decisive: copies inside a graph must overlap with kernels as well
as copies that are issued eagerly.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

MIB = 1 << 20
# The minimum overlap of copies inside a graph, relative to the overlap of copies that are issued eagerly.
GO = 0.95
Figures = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """The sizes of the checks.  ``sides``: the numbers of rows of the square matrices; their products take about 100 and
    200 us on an H100.  ``products``: the number of matrix products; for every two of them, ``nbytes`` are copied into one
    of ``slots``.  ``kernels``: the number of small kernels in a graph.  ``again``: the number of samples.  ``sleep``: the
    duration of a sleeping kernel in GPU cycles."""

    sides: tuple[int, ...] = (3072, 4096)
    products: int = 1000
    nbytes: int = 16 * MIB
    sources: int = 64
    slots: int = 24
    kernels: int = 3000
    again: int = 7
    sleep: int = 100_000_000


SMALL = Load(sides=(64,), products=40, nbytes=MIB, sources=4, slots=8, kernels=60, again=2, sleep=1_000_000)


class Steps:
    """A step with matrix products on one stream and copies on another.  Copy i may start when product 2 i starts.
    Compute waits for a copy after it has started half as many further copies as there are slots, and at the end for all
    copies."""

    def __init__(self, load: Load, side: int) -> None:
        self.load = load
        self.a, self.b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.c = torch.empty_like(self.a)
        self.host = registered(load.sources * load.nbytes)
        self.host.copy_(torch.arange(load.sources, dtype=torch.uint8).repeat_interleave(load.nbytes) + 1)
        self.sources = self.host.chunk(load.sources)
        self.slots = torch.zeros(load.slots, load.nbytes, dtype=torch.uint8, device="cuda")
        self.side = torch.cuda.Stream(priority=-1)

    def products(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.a, self.b, out=self.c)

    def only_products(self) -> None:
        self.products(self.load.products)

    def only_copies(self) -> None:
        for i in range(self.load.products // 2):
            self.slots[i % self.load.slots].copy_(self.sources[i % self.load.sources], non_blocking=True)

    def both_late(self) -> None:
        """Issue each copy right before the wait for it, although it could have started long before."""
        self.both(late=True)

    def both(self, late: bool = False) -> None:
        load, compute = self.load, torch.cuda.current_stream()
        copies, ahead = load.products // 2, load.slots // 2
        openings, arrivals = ([torch.cuda.Event() for _ in range(copies)] for _ in range(2))

        def copy(i: int) -> None:
            self.side.wait_event(openings[i])
            with torch.cuda.stream(self.side):
                self.slots[i % load.slots].copy_(self.sources[i % load.sources], non_blocking=True)
                arrivals[i].record()

        for i in range(copies):
            openings[i].record()
            if not late:
                copy(i)
            if i >= ahead:
                if late:
                    copy(i - ahead)
                compute.wait_event(arrivals[i - ahead])
            self.products(2)
        for i in range(copies - ahead, copies) if late else ():
            copy(i)
        compute.wait_stream(self.side)

    def check(self, call: Callable[[], object]) -> None:
        """Raise AssertionError unless, after a call, each slot contains the bytes of the latest copy into it."""
        self.slots.zero_()
        call()
        last = self.load.products // 2
        for i in range(last - self.load.slots, last):
            slot, source = self.slots[i % self.load.slots], self.sources[i % self.load.sources]
            if not torch.equal(slot.cpu(), source):
                raise AssertionError(f"slot {i % self.load.slots} has not the bytes of copy {i}")


def overlap(load: Load) -> Iterator[Figures]:
    """Check a: compare the overlap of products and copies in a graph with the overlap if both are issued eagerly."""
    go = True
    for side in load.sides:
        steps = Steps(load, side)
        products, copies, both = (
            timed(call, load.again) for call in (steps.only_products, steps.only_copies, steps.both)
        )
        steps.check(steps.both)
        found: Figures = {"side": side, "products_ms": products, "copies_ms": copies, "eager_ms": both}
        found["eager_hidden"] = (products + copies - both) / min(products, copies)
        for name, body in (("early", steps.both), ("late", steps.both_late)):
            graph, figures = captured(body)
            steps.check(graph.replay)
            step = timed(graph.replay, load.again)
            hidden = (products + copies - step) / min(products, copies)
            figures |= {"ms": step, "hidden": hidden, "launch_ms": launch_ms(graph, load.again)}
            found |= {f"{name}_{key}": value for key, value in figures.items()}
            graph.reset()
        best = max(found["early_hidden"], found["late_hidden"])
        go = go and best >= GO * found["eager_hidden"]
        yield found
    says = ("GO", "at least") if go else ("NO GO", "less than")
    yield {"says": f"{says[0]}: copies inside a graph are hidden {says[1]} {100 * GO:.0f} % as well as eager ones"}


def launches(load: Load) -> Iterator[Figures]:
    """Check b: measure the host time to launch a graph of many small kernels, on one stream and on two, and the time of
    consecutive launches."""
    x, y = (torch.zeros(1024, device="cuda") for _ in range(2))
    side = torch.cuda.Stream()

    def line() -> None:
        for _ in range(load.kernels):
            x.add_(1)

    def forked() -> None:
        compute = torch.cuda.current_stream()
        for _ in range(load.kernels // 20):
            side.wait_stream(compute)
            with torch.cuda.stream(side):
                for _ in range(10):
                    y.add_(1)
            for _ in range(10):
                x.add_(1)
            compute.wait_stream(side)

    yield {"arm": "eager", "kernels": load.kernels, "ms": timed(line, load.again)}
    for name, call in (("line", line), ("forked", forked)):
        graph, figures = captured(call)
        one, ten = (
            timed(graph.replay, load.again),
            timed(lambda graph=graph: [graph.replay() for _ in range(10)], load.again),
        )
        figures |= {"launch_ms": launch_ms(graph, load.again), "ms": one, "in_a_row_ms": (ten - one) / 9}
        before = x[0].item()
        graph.replay()
        if x[0].item() == before:
            raise AssertionError("a replay computes nothing")
        yield {"arm": name, **figures}
        graph.reset()


def host_bytes(load: Load) -> Iterator[Figures]:
    """Check c: find out whether a launch reads the bytes that were written to registered memory after the previous
    launch."""
    host, there = registered(load.nbytes), torch.zeros(load.nbytes, dtype=torch.uint8, device="cuda")
    graph, _ = captured(lambda: there.copy_(host, non_blocking=True))
    seen = []
    for value in range(1, 21):
        host.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        seen.append(bool((there == value).all()))
    yield {"replays": len(seen), "read": all(seen)}
    graph.reset()


def unregistered(load: Load) -> Iterator[Figures]:
    """Check c: find out what happens if a graph is launched after its host memory was unregistered.  This may crash the
    process."""
    host, there = registered(load.nbytes), torch.zeros(load.nbytes, dtype=torch.uint8, device="cuda")
    graph, _ = captured(lambda: there.copy_(host, non_blocking=True))
    host.fill_(3)
    code = torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    yield {"unregister": str(code)}
    try:
        graph.replay()
        torch.cuda.synchronize()
        yield {"launch": "ran", "read": bool((there == 3).all())}
    except RuntimeError as error:
        yield {"launch": str(error).splitlines()[0]}


def events(load: Load) -> Iterator[Figures]:
    """Check d: external events between a graph and another stream, with the wait before and after the launch."""
    x, y = (torch.zeros(1024, device="cuda") for _ in range(2))
    other = torch.cuda.Stream()

    def read_by_other(event: torch.cuda.Event) -> None:
        other.wait_event(event)
        with torch.cuda.stream(other):
            y.copy_(x)

    def launched(early: bool) -> Figures:
        """Have the graph write x and record an event; another stream waits for the event and reads x.  ``early``: whether
        the wait is issued before the launch."""
        event = torch.cuda.Event(external=True)

        def body() -> None:
            torch.cuda._sleep(load.sleep)  # type: ignore[no-untyped-call]
            x.add_(1)
            event.record()
            torch.cuda._sleep(load.sleep)  # type: ignore[no-untyped-call]

        graph, _ = captured(body)
        x.zero_(), y.zero_()
        torch.cuda.synchronize()
        if early:
            read_by_other(event)
        graph.replay()
        if not early:
            read_by_other(event)
            other.synchronize()
        found: Figures = {} if early else {"before_the_graph_ended": not torch.cuda.current_stream().query()}
        torch.cuda.synchronize()
        found["read"] = bool((y == 1).all())
        graph.reset()
        return found

    def awaited(early: bool) -> Figures:
        """Have another stream write x and record an event; the graph waits for the event and reads x.  ``early``: whether
        the graph is launched before the event is recorded."""
        event = torch.cuda.Event(external=True)
        event.record()

        def body() -> None:
            torch.cuda.current_stream().wait_event(event)
            y.copy_(x)

        graph, _ = captured(body)
        x.zero_(), y.zero_()
        torch.cuda.synchronize()
        if early:
            graph.replay()
        with torch.cuda.stream(other):
            torch.cuda._sleep(load.sleep)  # type: ignore[no-untyped-call]
            x.fill_(2)
            event.record()
        if not early:
            graph.replay()
        torch.cuda.synchronize()
        found = {"read": bool((y == 2).all())}
        graph.reset()
        return found

    yield {"arm": "recorded in a graph, waited for after the launch", **launched(early=False)}
    yield {"arm": "recorded in a graph, waited for before the launch", **launched(early=True)}
    yield {"arm": "recorded on a stream, before the launch of a graph that waits", **awaited(early=False)}
    yield {"arm": "recorded on a stream, after the launch of a graph that waits", **awaited(early=True)}


def nccl(load: Load) -> Iterator[Figures]:
    """Check f: launch a graph with an all-to-all of one rank a hundred times, and then destroy the process group."""
    if load is SMALL:
        yield {"says": "not run: NCCL needs a GPU"}
        return
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    x = torch.zeros(load.nbytes // 4, device="cuda")
    y = torch.empty_like(x)

    def exchange() -> None:
        dist.all_to_all_single(y, x)

    graph, figures = captured(exchange)
    seen = []
    for value in range(1, 101):
        x.fill_(value)
        graph.replay()
        seen.append((y == value).all())
    yield {"replays": len(seen), "right": all(bool(s) for s in seen), **figures}
    graph.reset()
    begin = time.perf_counter()
    dist.destroy_process_group()
    yield {"destroyed_in_s": time.perf_counter() - begin}


# The checks by name, with a time limit in seconds.  Two more checks, e and g, concern ChunkFlow's own steps: see
# card_calls.py.
CHECKS: dict[str, tuple[Callable[[Load], Iterator[Figures]], float]] = {
    "overlap": (overlap, 90),
    "launches": (launches, 40),
    "host bytes": (host_bytes, 30),
    "unregistered": (unregistered, 30),
    "events": (events, 30),
    "nccl": (nccl, 40),
}


def registered(nbytes: int) -> torch.Tensor:
    """Return memory that is registered with CUDA.  It is backed by a memfd, like the host memory of ChunkFlow's
    weights."""
    number = os.memfd_create("check")
    try:
        os.ftruncate(number, nbytes)
        made = torch.frombuffer(mmap.mmap(number, nbytes), dtype=torch.uint8)
    finally:
        os.close(number)
    if int(code := torch.cuda.cudart().cudaHostRegister(made.data_ptr(), nbytes, 0)):
        raise RuntimeError(f"cudaHostRegister: {code}")
    return made


def captured(body: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, Figures]:
    """Run ``body`` once, and then capture it in a graph.  Return the graph, the times to capture and instantiate it, and
    the bytes of GPU memory that it takes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, begin = torch.cuda.mem_get_info()[0], time.perf_counter()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    recorded = time.perf_counter()
    graph.instantiate()
    made = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    figures = {"capture_ms": 1e3 * (recorded - begin), "instantiate_ms": 1e3 * (made - recorded)}
    return graph, {**figures, "bytes": free - torch.cuda.mem_get_info()[0]}


def timed(call: Callable[[], object], again: int) -> float:
    """Return the median GPU time of a call in milliseconds, after one warm-up call.  ``again``: the number of timed
    calls."""
    found = []
    for _ in range(again + 1):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return median(found[1:])


def launch_ms(graph: torch.cuda.CUDAGraph, again: int) -> float:
    """Return the median host time in milliseconds to launch a graph while the GPU is idle."""
    found = []
    for _ in range(again):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        found.append(1e3 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return median(found)


def add(out: Path, check: str, **figures: Any) -> None:
    line = json.dumps({"check": check, **figures})
    print(line, flush=True)
    with out.open("a") as file:
        file.write(line + "\n")


def one(check: str, out: Path, load: Load) -> None:
    """Run a check in this process."""
    begin = time.perf_counter()
    with torch.no_grad():
        for figures in CHECKS[check][0](load):
            add(out, check, **figures)
    add(out, check, ended=True, seconds=round(time.perf_counter() - begin, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON lines; checks that have ended there are not run again"
    )
    parser.add_argument("--seconds", type=float, default=280.0, help="time for all checks (default 280)")
    parser.add_argument("--small", action="store_true", help="small loads: shows that each check runs")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.check is not None:
        try:
            one(given.check, given.out, SMALL if given.small else Load())
        except Exception as error:  # noqa: BLE001  (the line says it)
            add(given.out, given.check, failed=f"{type(error).__name__}: {error}")
            return 1
        return 0
    start, status = time.monotonic(), 0
    done = {
        line["check"]
        for line in map(json.loads, given.out.read_text().splitlines() if given.out.exists() else ())
        if line.get("ended")
    }
    for check in (name for name in CHECKS if name not in done):
        left = given.seconds - (time.monotonic() - start)
        if left < 15:
            print(f"no time is left for {check}")
            return status or 3
        command = [sys.executable, __file__, "--out", str(given.out), "--check", check, *["--small"] * given.small]
        try:
            subprocess.run(command, check=True, timeout=min(left, CHECKS[check][1]))
        except subprocess.TimeoutExpired:
            status = 1
            add(given.out, check, failed="cut off")
        except subprocess.CalledProcessError as error:
            status = 1
            if error.returncode != 1:  # with 1, the process has written the error itself
                add(given.out, check, failed=f"its process ended with {error.returncode}")
    return status


if __name__ == "__main__":
    sys.exit(main())
