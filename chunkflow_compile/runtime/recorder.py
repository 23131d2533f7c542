"""Recorder: the streams of a GPU while a call is recorded as a CUDA graph.

A call is issued to it by the same instructions as to the GPU itself.  Three things differ:

* An event has a new mark in the graph each time that it is recorded.  A wait for one that the call has not recorded yet is
  for a copy of an earlier call: it is nothing here, because that call waits for all copies before it ends.
* A copy is recorded right before compute waits for it.  CUDA runs what follows a join in the lane of that parent which was
  recorded first, and this keeps compute in one lane.  The order of copies stays, and what each waits for.
* At the end compute waits for all copies (:meth:`Recorder.join`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError, first_line
from chunkflow_compile.passes.names import Moves
from chunkflow_compile.weights.source import DriveBytes, Source

from .device_base import Device, Waited, Watch
from .read_ahead import Reading
from .torch_cuda import TorchCuda


class Point:
    """An event of a recording.  ``mark``: CUDA's event for its newest mark, None until it has one."""

    mark: torch.cuda.Event | None = None


class _Lane:
    """The stream of a lane: what it is given waits until compute needs it."""

    def __init__(self, cuda: TorchCuda, stream: torch.cuda.Stream) -> None:
        self._cuda = cuda
        self._stream = stream
        self._later: deque[tuple[Callable[[], None], Point | None]] = deque()
        self._forked = False  # whether anything was recorded

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        self._later.append((work, None))

    def record(self, event: Point) -> None:
        event.mark = mark = self._cuda.event(False)
        self._later.append((partial(mark.record, self._stream), event))

    def wait(self, event: Point, waited: Waited | None = None) -> None:
        assert event.mark is not None, "compute has opened the window"
        self._later.append((partial(self._stream.wait_event, event.mark), None))

    def flush(self, until: Point) -> None:
        """Record what was given up to the mark of an event, if that is not recorded yet."""
        while any(event is until for _, event in self._later):
            self._next()

    def end(self) -> Point | None:
        """Record all that was given.  Returns an event after all copies of the call, None if it has none."""
        while self._later:
            self._next()
        if not self._forked:
            return None
        after = Point()
        self.record(after)
        self._next()
        return after

    def _next(self) -> None:
        work, _ = self._later.popleft()
        self._forked = True
        with self._cuda.on(self._stream):
            work()


class _Compute:
    """The stream of compute and collectives, which is the caller's current one during a recording."""

    def __init__(self, cuda: TorchCuda, flush: Callable[[Point], None]) -> None:
        """``flush``: records what the lanes were given up to the mark of an event."""
        self._cuda = cuda
        self._flush = flush

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        try:
            work()
        except Exception as error:
            raise ChunkflowError(f"{name or 'an op between regions'}: {first_line(error)}") from error

    def record(self, event: Point) -> None:
        event.mark = self._cuda.event(False)
        event.mark.record(self._cuda.current())

    def wait(self, event: Point, waited: Waited | None = None) -> None:
        self._flush(event)
        if event.mark is not None:
            self._cuda.current().wait_event(event.mark)

    def synchronize(self) -> None:
        raise NotImplementedError("nothing runs while it is recorded")


class Recorder(Device):
    """A device for the instructions of one call, which it records.  ``lanes``: the streams on which those are recorded."""

    name = "cuda"

    def __init__(self, cuda: TorchCuda, lanes: Mapping[Moves, torch.cuda.Stream]) -> None:
        self._cuda = cuda
        self._streams = lanes
        self.copy: Any = _Lane(cuda, lanes["copy"])
        self.pull: Any = None
        self.compute = self.collective = _Compute(cuda, self._flush)

    def _make_pull(self) -> Any:
        return _Lane(self._cuda, self._streams["pull"])

    def _flush(self, until: Point) -> None:
        lane: Any
        for lane in self.lanes:
            lane.flush(until)

    def event(self) -> Point:
        return Point()

    def copy_bytes(self, target: torch.Tensor, source: Source | Reading, moves: Moves = "copy") -> None:
        assert not isinstance(source, DriveBytes | Reading), "weights on the drive are not recorded"
        self._cuda.copy(target, source)

    def join(self) -> None:
        """Let compute wait for all copies."""
        lane: Any
        for lane in self.lanes:
            if (after := lane.end()) is not None:
                self.compute.wait(after)
