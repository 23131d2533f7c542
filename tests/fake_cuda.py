"""A fake GPU for machines without one: side streams are threads, the caller's stream is the calling thread."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from conftest import WITHIN
from fake_graphs import FakeGraph, RecordedStream

from chunkflow_compile.passes.names import LANES, Lane
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.runtime.cuda import CudaDevice
from chunkflow_compile.runtime.host_clock import MONOTONIC, HostClock
from chunkflow_compile.runtime.streams import CallingStream, Engine, HostEvent, ThreadStream
from chunkflow_compile.weights.bytes import copy_host_bytes


class FakeStream:
    def __init__(self, cuda: FakeCuda, stream: CallingStream | ThreadStream | RecordedStream) -> None:
        self.cuda = cuda
        self.stream = stream
        self.awaited: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.awaited.append(event)
        with self.cuda.copying() if self is self.cuda.callers else contextlib.nullcontext():
            self.stream.wait(event.event)

    def synchronize(self) -> None:
        self.cuda.calls["synchronize"] += 1
        with self.cuda.copying():
            self.stream.synchronize()


class FakeEvent:
    def __init__(self, cuda: FakeCuda, timed: bool) -> None:
        self.cuda = cuda
        self.timed = timed
        self.event = HostEvent(cuda.engine.bell)

    def record(self, stream: FakeStream) -> None:
        stream.stream.record(self.event)

    def query(self) -> bool:
        return self.event.reached >= self.event.recorded

    def synchronize(self) -> None:
        self.cuda.calls["synchronize"] += 1
        with self.cuda.copying():
            self.event.block(self.event.recorded)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timed and end.timed and self.query() and end.query(), "as torch.cuda.Event asks for"
        return (end.event.reached_at - self.event.reached_at) * 1e3


# The stream on which the nodes of a lane run.
_OF_GRAPHS = "{} of graphs"


class FakeCuda:
    """``copy_s``: least seconds of a copy; ``launched_copy_s``: of one in a graph, by default the same.  ``graphs``: those
    recorded.  ``calls``: number of calls by method; ``pinned``: address -> bytes; ``names``:
    the ranges that a profiler shows, if one runs: ``in_profiler``.  ``late``: copies outside of
    graphs begin only while the caller's stream waits for some."""

    def __init__(
        self,
        copy_s: float = 0.0,
        clock: HostClock = MONOTONIC,
        late: bool = False,
        launched_copy_s: float | None = None,
    ) -> None:
        self.copy_s = copy_s
        self.launched_copy_s = copy_s if launched_copy_s is None else launched_copy_s
        self.clock = clock
        self.late = late
        self._waiting = threading.Event()
        self.engine = Engine((*LANES, *map(_OF_GRAPHS.format, LANES)), clock=clock)
        weakref.finalize(self, self.engine.end)
        self.calls: Counter[str] = Counter()
        self.pinned: dict[int, int] = {}
        self.names: list[str] = []
        self.in_profiler = False
        self.graphs: list[FakeGraph] = []
        self.callers = self._current = FakeStream(self, CallingStream(clock))
        self._recorded: FakeStream | None = None

    def stream(self, moves: Lane = "copy") -> FakeStream:
        self.calls["stream"] += 1
        return FakeStream(self, self.engine.streams[moves])

    def current(self) -> FakeStream:
        return self._recorded or self.callers

    def free(self) -> int:
        self.calls["free"] += 1
        return -1000 * sum(graph.nodes is not None for graph in self.graphs)

    @contextlib.contextmanager
    def capturing(self, pool: FakeGraph | None) -> Iterator[tuple[FakeGraph, dict[Lane, FakeStream]]]:
        assert pool is None or pool.pool()
        graph = FakeGraph(self.engine.bell, self.callers.stream)
        compute = graph.stream()
        lanes = {moves: graph.stream(self.engine.streams[_OF_GRAPHS.format(moves)]) for moves in LANES}
        self._recorded = FakeStream(self, compute)
        try:
            with graph.recorded(compute, lanes.values()):
                yield graph, {moves: FakeStream(self, lane) for moves, lane in lanes.items()}
        finally:
            self._recorded = None
        self.graphs.append(graph)

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self.calls["on"] += 1
        self._current = stream
        try:
            yield
        finally:
            self._current = self.callers

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """While the caller waits."""
        self._waiting.set()
        try:
            yield
        finally:
            self._waiting.clear()

    def event(self, timed: bool) -> FakeEvent:
        self.calls["event"] += 1
        return FakeEvent(self, timed)

    def profiled(self) -> bool:
        return self.in_profiler

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.calls["allocate"] += 1
        return torch.empty(nbytes, dtype=torch.uint8)

    def trim(self) -> None:
        self.calls["trim"] += 1

    def record_stream(self, memory: torch.Tensor, stream: FakeStream) -> None:
        self.calls["record_stream"] += 1

    def abandon(self, memory: torch.Tensor) -> None:
        self.calls["abandon"] += 1

    def staging(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.calls["copy"] += 1
        seconds = self.copy_s if self._recorded is None else self.launched_copy_s
        late = self.late and self._recorded is None

        def work() -> None:
            assert not late or self._waiting.wait(WITHIN)
            self.clock.sleep(seconds)
            copy_host_bytes(target, source)

        assert self._current is not self.callers, "copies have a stream of their own"
        self._current.stream.run(work)

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        address = host.data_ptr()
        self.pinned[address] = host.numel() * host.element_size()
        return lambda: self.pinned.pop(address) and None

    def arena(self) -> Arena:
        """An arena whose programs run on this GPU."""
        device: Any = CudaDevice(self)
        return Arena(make=lambda *_: device)
