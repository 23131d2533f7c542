"""The streams of a GPU: the caller's stream, and a stream for copies.

If some copies come from pageable memory, a separate thread issues all work on the copy stream.  The reason is that CUDA may
block the thread that issues a copy from unpinned memory or from the SSD until the copy stream reaches this copy.  If it
blocked the thread that issues compute, nothing would overlap.  The separate thread sends pageable bytes through a small
pinned ring buffer.  If not even the ring can be pinned, it issues a copy only once the window of the copy has opened.

The thread that issues compute waits until the copies of a weight are issued, but never until they are done.  It ends a step
when all copies of the step are issued, so the host does not run as far ahead of the GPU as with pinned weights.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.source import Bytes, DriveBytes
from chunkflow_compile.weights.staging import Staging

from .cuda_time import Clock, Frame
from .device_base import Waited, Watch
from .read_ahead import InRing
from .streams import Engine, HostEvent
from .torch_cuda import TorchCuda


class CudaStream:
    """A stream of the GPU.  ``clock``: records the times of its work in measured calls.

    ``stream``: the torch.cuda.Stream; None before the first step if it is the caller's stream.
    """

    def __init__(self, cuda: TorchCuda, clock: Clock, stream: torch.cuda.Stream | None = None) -> None:
        self.cuda = cuda
        self.clock = clock
        self.stream: Any = stream
        self._staged: StagedCopies | None = None  # the copy stream whose events it waits for
        self._side = stream is not None
        self._process = os.getpid()

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the process that made the stream.  It then cannot use the GPU or wait for
        it."""
        return os.getpid() != self._process

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Issue work to ``stream``, the caller's current stream, from now on."""
        self.stream = stream

    def stage(self, copies: CudaStream) -> StagedCopies:
        """Make a thread issue the work of ``copies``, whose events this stream waits for; return the thread's stream."""
        self._staged = StagedCopies(copies, self)
        return self._staged

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        if watch is not None and (frame := self.clock.open) is not None:
            work = partial(self._marked, work, frame, watch)
        if name and self.cuda.profiled():
            work = partial(_within, self.cuda.named(name), work)
        if self._side:
            with self.cuda.on(self.stream):
                work()
        else:
            work()

    def _marked(self, work: Callable[[], None], frame: Frame, watch: Watch) -> None:
        begin = frame.mark(self.stream)
        work()
        frame.between(begin, frame.mark(self.stream), watch)

    def record(self, event: torch.cuda.Event) -> None:
        event.record(self.stream)

    def wait(self, event: torch.cuda.Event, waited: Waited | None = None) -> None:
        if self._staged is not None:
            self._staged.await_record(event)
        if waited is None or (frame := self.clock.open) is None:
            self.stream.wait_event(event)
            return
        begin = frame.mark(self.stream)
        self.stream.wait_event(event)
        frame.stalled(begin, frame.mark(self.stream), waited)

    def synchronize(self) -> None:
        try:
            if self.stream is not None and not self.inherited:
                self.stream.synchronize()
        except RuntimeError as error:
            raise ChunkflowError(f"The GPU failed: {error}") from error

    def copy_bytes(self, target: torch.Tensor, source: Bytes | InRing) -> None:
        """Copy ``source`` to ``target`` (uint8, equal sizes).  It is called as work of this stream."""
        assert not isinstance(source, InRing), "weights on the drive are staged"
        self.cuda.copy(target, source.read_all() if isinstance(source, DriveBytes) else source)

    def await_record(self, event: torch.cuda.Event) -> None:
        """Wait until the latest record of ``event`` is issued.  Only then may another stream wait for the event."""

    def end_step(self) -> None:
        """Wait until the work of a step is issued.  It is called by the thread that issues the step."""

    def close(self) -> None:
        """End the thread that issues the work, if there is one."""


class StagedCopies(CudaStream):
    """A copy stream whose work is issued by a separate thread."""

    def __init__(self, copies: CudaStream, compute: CudaStream) -> None:
        """``copies``: the copy stream, which the thread takes over.  ``compute``: the compute stream."""
        super().__init__(copies.cuda, copies.clock, copies.stream)
        self._compute = compute
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chunkflow-copies")
        self._staging = Staging(self.cuda.staging, partial(self.cuda.event, False), self.cuda.copy, super().record)
        self._newest: Future[None] | None = None
        self._worker = 0  # ident of the thread
        self._reader: Engine | None = None  # the thread that reads from the SSD, whose events copies wait for
        # id of an event -> a future that is done once the latest record of the event in this step is issued
        self._records: dict[int, Future[None]] = {}
        self._marks: list[torch.cuda.Event] = []  # reusable events that mark points of the compute stream

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        self._put(partial(super().run, work, watch, name))

    def record(self, event: torch.cuda.Event) -> None:
        self._records[id(event)] = self._put(partial(super().record, event))

    def wait(self, event: torch.cuda.Event | HostEvent, waited: Waited | None = None) -> None:
        """Make the copies enqueued from here on start after ``event``, just recorded by compute or the stream of reads.

        Compute may record its event again before the thread reaches this wait, so a separate event marks the point.
        """
        if isinstance(event, HostEvent):
            self._put(partial(event.block, event.recorded))
            return
        mark = self._marks.pop() if self._marks else self.cuda.event(False)
        self._compute.record(mark)
        wait = super().wait

        def issue() -> None:
            if self._staging.pinned:
                wait(mark)
            else:
                mark.synchronize()
            self._marks.append(mark)  # a wait that was issued refers to the recorded point, so the event can be reused

        self._put(issue)

    def copy_bytes(self, target: torch.Tensor, source: Bytes | InRing) -> None:
        if isinstance(source, InRing):
            self.cuda.copy(target, source.values())
            return
        if source.is_pinned() or not self._staging.pinned:
            self.cuda.copy(target, source.read_all() if isinstance(source, DriveBytes) else source)
        else:
            self._staging.to_device(target, source)

    def await_record(self, event: torch.cuda.Event) -> None:
        if (record := self._records.get(id(event))) is not None:
            _raise_from(record)

    def reached(self, event: torch.cuda.Event) -> Callable[[], None]:
        """A function that blocks until the point that this stream or compute has just recorded as ``event`` is reached.

        The event will be recorded again, so a separate event marks the point.
        """
        mark, issued = self.cuda.event(False), None
        if id(event) in self._records:
            issued = self._put(partial(super().record, mark))
        else:
            self._compute.record(mark)

        def block() -> None:
            if issued is not None:
                _raise_from(issued)
            try:
                mark.synchronize()
            except RuntimeError as error:
                raise ChunkflowError(f"The GPU failed: {error}") from error

        return block

    def await_reads(self, reader: Engine) -> None:
        """Note that copies wait for events of ``reader``, the thread that reads from the SSD."""
        self._reader = reader

    def issued(self) -> None:
        """Wait until all work enqueued so far is issued.  Raises ChunkflowError if it failed.

        It does not wait on a thread that this would wait for.  There, the garbage collector may run a finalizer that unpins
        the memory of another model; the copies of that model are already issued, because every step ends with this wait.
        """
        here = threading.get_ident() == self._worker or (self._reader is not None and self._reader.runs_here)
        if self._newest is not None and not here and not self.inherited:
            _raise_from(self._newest)

    def end_step(self) -> None:
        """Wait until the copies of a step are issued, and forget its records, because the id of a dropped event is reused.

        It is called by the thread that issues the step, like :meth:`record` and :meth:`await_record`.
        """
        self.issued()
        self._records.clear()

    def synchronize(self) -> None:
        try:
            self.issued()
        except ChunkflowError:
            self._newest = None  # the stream is usable again
            raise
        finally:
            super().synchronize()

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _put(self, work: Callable[[], None]) -> Future[None]:
        before = self._newest

        def run() -> None:
            self._worker = threading.get_ident()
            if before is not None and (error := before.exception()) is not None:
                raise error  # after a failure nothing more is issued, until synchronize has raised it
            work()

        self._newest = issued = self._thread.submit(run)
        return issued


class HostReads:
    """The stream of reads from the SSD, which run on a host thread.  ``copies``: the copy stream whose events it waits
    for."""

    def __init__(self, copies: StagedCopies, engine: Engine) -> None:
        """``engine``: the engine that runs the thread."""
        self._copies = copies
        self._stream = engine.streams["read"]
        copies.await_reads(engine)
        self.run, self.record, self.synchronize = self._stream.run, self._stream.record, self._stream.synchronize
        self.recover = self._stream.recover

    def wait(self, event: torch.cuda.Event, waited: Waited | None = None) -> None:
        self._stream.run(self._copies.reached(event))


def _within(context: contextlib.AbstractContextManager[Any], work: Callable[[], None]) -> None:
    with context:
        work()


def _raise_from(issued: Future[None]) -> None:
    if (error := issued.exception()) is not None:
        raise ChunkflowError(f"A copy to the device failed: {error}") from error
