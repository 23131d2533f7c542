"""The cuda device: compute runs on the caller's stream, copies run on a separate stream per lane, and events order the
streams.

During a step, the host does not wait for the GPU if all weights are pinned (cuda_streams.py describes the other case).  All
use of torch.cuda goes through :class:`TorchCuda`, so tests can run the same code without a GPU.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import LANES, Lane
from chunkflow_compile.weights.source import Bytes

from .cuda_streams import CudaStream, HostReads, StagedCopies
from .cuda_time import Clock, Frame
from .device_base import Device, NamedCopy, StepEnd
from .read_ahead import InRing
from .recorder import Recorder
from .streams import Engine, HostEvent
from .torch_cuda import TorchCuda


class CudaDevice(Device):
    """Issues compute and collectives on the caller's stream, and copies on a separate stream per lane.

    The GPU executes a collective on another stream, which belongs to the process group.  The op wait_tensor makes the
    caller's stream wait until the collective has ended.
    """

    name = "cuda"
    compute: CudaStream
    copy: CudaStream
    pull: CudaStream | None = None

    def __init__(self, cuda: TorchCuda) -> None:
        self.cuda = cuda
        self._clock = Clock(lambda: cuda.event(True))
        self.compute = self.collective = CudaStream(cuda, self._clock)
        self.copy = CudaStream(cuda, self._clock, cuda.stream())
        self._handover, self._issued = self.event(), [self.event() for _ in LANES]
        self._reading: Engine | None = None
        self._launched: torch.cuda.Event | None = None  # an event that is recorded after each graph launch
        self._memory: torch.Tensor | None = None
        self._outside: list[weakref.ref[torch.Tensor]] = []

    @property
    def zero(self) -> float:
        return self._clock.zero

    def event(self) -> torch.cuda.Event:
        return self.cuda.event(False)

    def read_event(self) -> HostEvent:
        return HostEvent(self._reader.bell)

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._memory = None
        # without this call, torch's allocator would keep the freed memory of the old, smaller arena in addition to the new
        # memory
        self.cuda.trim()
        self._memory = memory = self.cuda.allocate(nbytes)
        for lane in self.lanes:
            # torch's allocator must know that the lane uses the memory: the model may be garbage-collected at any time, and
            # the memory is then freed while copies are in flight
            self.cuda.record_stream(memory, lane.stream)
        return memory

    def release(self) -> None:
        self._memory = None

    def record_stream(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember ``tensors``, which steps read, but which are not in the arena's memory.  :meth:`start` and :meth:`close`
        keep the memory of these tensors from being reused while a step is in flight."""
        self._outside = [ref for ref in self._outside if ref() is not None] + [weakref.ref(t) for t in tensors]

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        return self.cuda.pin(host)

    def stage(self) -> None:
        """From now on, copy unpinned memory through a pinned staging buffer."""
        if not isinstance(self.copy, StagedCopies):
            self.copy = self.compute.stage(self.copy)

    @property
    def lanes(self) -> tuple[CudaStream, ...]:
        return (self.copy,) if self.pull is None else (self.copy, self.pull)

    def _make_pull(self) -> CudaStream:
        made = CudaStream(self.cuda, self._clock, self.cuda.stream("pull"))
        if self._memory is not None:
            self.cuda.record_stream(self._memory, made.stream)
        return made

    @property
    def _reader(self) -> Engine:
        if self._reading is None:
            self._reading = Engine(("read",))
            weakref.finalize(self, self._reading.end)
        return self._reading

    def _make_reads(self) -> HostReads:
        assert isinstance(self.copy, StagedCopies), "weights on the drive are staged"
        return HostReads(self.copy, self._reader)

    def copy_bytes(self, target: torch.Tensor, source: Bytes | InRing, lane: Lane = "copy") -> None:
        stream = self.pull if lane == "pull" and self.pull is not None else self.copy
        stream.copy_bytes(target, source)

    def copy_all(self, copies: Sequence[NamedCopy], lane: Lane = "copy") -> None:
        if self.cuda.profiled():  # issue the copies one by one, so that the profiler can show the name of each copy
            super().copy_all(copies, lane)
        else:  # issue all copies as one piece of work: to switch streams takes the host longer than to issue a copy
            self.lane(lane).run(partial(self._copy_each, copies, lane))

    def _copy_each(self, copies: Sequence[NamedCopy], lane: Lane) -> None:
        for target, source, _ in copies:
            self.copy_bytes(target, source, lane)

    def sync_copies(self) -> None:
        for lane in self.lanes:
            lane.synchronize()
        if self._launched is not None and not self.copy.inherited:
            # wait here for the copies that are part of a graph, because these copies do not run on the streams of the lanes
            self._launched.synchronize()

    def why_not_recorded(self) -> str:
        if torch.version.hip is not None:
            return "ROCm runs the copies and the kernels of a graph one after the other"
        staged = isinstance(self.copy, StagedCopies)
        return "some weights could not be pinned, and a thread of the host brings their bytes" if staged else ""

    @contextlib.contextmanager
    def recording(self, pool: Any) -> Iterator[tuple[Any, Device]]:
        with self.cuda.capturing(pool) as (graph, lanes):
            yield graph, Recorder(self.cuda, lanes)

    def launch(self, graph: Any) -> None:
        for lane, event in zip(self.lanes, self._issued, strict=False):
            lane.record(event)
            self.compute.wait(event)
        graph.replay()
        if self._launched is None:
            self._launched = self.event()
        self.compute.record(self._launched)

    def reset(self, graph: Any) -> None:
        if not self.compute.inherited:
            graph.reset()

    def free(self) -> int:
        return self.cuda.free()

    def start(self, marked: bool, consecutive: bool) -> Frame | None:
        """Use the caller's current stream for compute.  If the previous call used another stream, make the current stream
        wait for the work on that other stream."""
        current, before = self.cuda.current(), self.compute.stream
        if before is not None and current != before:
            self._handover.record(before)
            current.wait_event(self._handover)
            for memory in self._all_memory():
                self.cuda.record_stream(memory, current)
        self.compute.follow(current)
        return self._clock.begin(current, marked, consecutive)

    def finish(self, begun: Frame | None, over: StepEnd) -> None:
        self.copy.end_step()
        if begun is not None:
            self._clock.end(begun, self.compute.stream, [lane.stream for lane in self.lanes], over)
        # the host reads events here, while the GPU runs the step, because reading a thousand events takes milliseconds
        self.collect()

    def collect(self, wait: bool = False) -> None:
        # after measure(0), the caller itself measures the times of steps, and reading events would make these times longer
        if self.compute.inherited or (self._left == 0 and not wait):
            return
        try:
            self._clock.collect(wait)
        except RuntimeError as error:
            raise ChunkflowError(f"The GPU failed: {error}") from error

    def close(self) -> None:
        """Wait for work in flight, then close the streams.  The wait is needed because destroying the stream objects does
        not stop this work."""
        self.closed = True
        if self.compute.inherited:
            return
        memory, self._memory = self._all_memory(), None
        for stream in self.streams:
            try:
                stream.synchronize()
            except ChunkflowError:
                for tensor in memory:
                    self.cuda.abandon(tensor)
        self.copy.close()
        if self._reading is not None:
            self._reading.close()

    def _all_memory(self) -> list[torch.Tensor]:
        outside = [tensor for ref in self._outside if (tensor := ref()) is not None]
        return outside if self._memory is None else [self._memory, *outside]
