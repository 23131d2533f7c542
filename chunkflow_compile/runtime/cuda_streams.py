"""The streams of a GPU: the caller's stream, and the streams on which copies run.

If some weights are in unpinned memory or on the SSD, a separate thread issues all work on the copy stream.  The reason is
that a thread that issues a copy of such a weight may be blocked until the copy stream reaches this copy.  If the main thread
issued these copies, it could not issue compute while it is blocked, so copies and compute would not overlap.  The separate
thread copies unpinned bytes through a small pinned ring buffer.  If even this ring buffer cannot be pinned, the separate
thread issues each copy only after the window of the copy has opened.

Before the main thread issues a region, it waits until the copies of the region's weights have been issued, but not until
these copies are done.  The main thread ends a step only after all copies of the step have been issued.  So with unpinned
weights, the host cannot run as far ahead of the GPU as with pinned weights.
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
    """A stream of the GPU.

    ``clock``: the clock that, in measured calls, records when the work of this stream begins and ends.  ``stream``: the
    torch.cuda.Stream.  For the caller's stream, ``stream`` is None until the first step.
    """

    def __init__(self, cuda: TorchCuda, clock: Clock, stream: torch.cuda.Stream | None = None) -> None:
        self.cuda = cuda
        self.clock = clock
        self.stream: Any = stream
        self._staged: StagedCopies | None = None  # the copy stream whose events this stream waits for, set by stage()
        self._side = stream is not None
        self._process = os.getpid()

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the process that created the stream.  A forked process cannot use the GPU."""
        return os.getpid() != self._process

    def follow(self, stream: torch.cuda.Stream) -> None:
        """From now on, issue work to ``stream``, the caller's current stream."""
        self.stream = stream

    def stage(self, copies: CudaStream) -> StagedCopies:
        """Let a separate thread issue the work of the copy stream ``copies``, whose events this stream waits for.  Return a
        copy stream that replaces ``copies``."""
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
        """Copy ``source`` to ``target`` (uint8, equal sizes).  The caller passes this method to :meth:`run` as work."""
        assert not isinstance(source, InRing), "weights on the drive are staged"
        self.cuda.copy(target, source.read_all() if isinstance(source, DriveBytes) else source)

    def await_record(self, event: torch.cuda.Event) -> None:
        """Block until the latest record of ``event`` has been issued.  CUDA requires this order: a wait for an event must be
        issued after the record of the event."""

    def end_step(self) -> None:
        """Block until all work of a step has been issued.  Only the thread that issues the step calls this method."""

    def close(self) -> None:
        """End the separate thread that issues the work of this stream, if there is one."""


class StagedCopies(CudaStream):
    """A copy stream whose work is issued by a separate thread."""

    def __init__(self, copies: CudaStream, compute: CudaStream) -> None:
        """``copies``: the copy stream that this object replaces.  ``compute``: the compute stream."""
        super().__init__(copies.cuda, copies.clock, copies.stream)
        self._compute = compute
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chunkflow-copies")
        self._staging = Staging(self.cuda.staging, partial(self.cuda.event, False), self.cuda.copy, super().record)
        self._newest: Future[None] | None = None
        self._thread_id = 0
        self._reader: Engine | None = None
        # id of an event -> a future that is done once the latest record of the event in this step has been issued
        self._records: dict[int, Future[None]] = {}
        self._marks: list[torch.cuda.Event] = []  # reusable events that mark points of the compute stream

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        self._put(partial(super().run, work, watch, name))

    def record(self, event: torch.cuda.Event) -> None:
        self._records[id(event)] = self._put(partial(super().record, event))

    def wait(self, event: torch.cuda.Event | HostEvent, waited: Waited | None = None) -> None:
        """Make all copies that are enqueued after this call wait for the latest record of ``event``.  The event was recorded
        on the compute stream or on the stream of reads.

        The compute stream may record ``event`` again before the separate thread issues this wait.  So this method
        immediately records a second event on the compute stream, and the copies wait for this second event instead.
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
            self._marks.append(mark)  # the mark can now be reused, because the wait for it has been issued

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
        """Return a function that blocks until the GPU reaches the latest record of ``event``.  The event was recorded on
        this stream or on the compute stream.

        The function waits for a second event, which this method records now, because ``event`` may be recorded again before
        the function is called.
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
        """Record that copies wait for events of ``reader``, the engine whose thread reads from the SSD."""
        self._reader = reader

    def issued(self) -> None:
        """Block until all work that was enqueued so far has been issued.  Raises ChunkflowError if this work failed.

        In the thread that issues copies and in the thread that reads from the SSD, this method does not block, because
        blocking there would be a deadlock.  These two threads call this method only in a finalizer that unpins the memory of
        another model.  The copies of that model have already been issued, because every step ends with :meth:`end_step`.
        """
        here = threading.get_ident() == self._thread_id or (self._reader is not None and self._reader.runs_here)
        if self._newest is not None and not here and not self.inherited:
            _raise_from(self._newest)

    def end_step(self) -> None:
        """Block until the copies of a step have been issued.  Then forget the events that the step has recorded.  The reason
        is that the events are stored by id, and Python may give the id of a deleted event to another event.

        Only the thread that issues the step may call this method, :meth:`record` and :meth:`await_record`.
        """
        self.issued()
        self._records.clear()

    def synchronize(self) -> None:
        try:
            self.issued()
        except ChunkflowError:
            self._newest = None  # nothing is left to wait for, so the stream is usable again
            raise
        finally:
            super().synchronize()

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _put(self, work: Callable[[], None]) -> Future[None]:
        before = self._newest

        def run() -> None:
            self._thread_id = threading.get_ident()
            if before is not None and (error := before.exception()) is not None:
                raise error  # after a failure, nothing more is issued until synchronize has raised the error
            work()

        self._newest = issued = self._thread.submit(run)
        return issued


class HostReads:
    """The stream of reads from the SSD.  The reads run on a host thread."""

    def __init__(self, copies: StagedCopies, engine: Engine) -> None:
        """``copies``: the copy stream, whose events the reads wait for.  ``engine``: the engine that runs the host
        thread."""
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
