"""Copies from pageable memory, for weights that could not be pinned, and from the drive.

CUDA may hold the thread that issues such a copy until the copy stream comes to it.  If that were the thread that issues
compute, nothing would overlap.  So a thread of its own issues everything on the copy stream, and sends pageable bytes
through a small pinned ring.  Where not even the ring can be pinned, it issues a copy only once its opening is reached.

The thread that issues compute waits only until the copies of a weight are issued, never until they are over.  It ends a
step when all its copies are issued: the host then runs less far ahead of the GPU than with pinned weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.source import DriveBytes, Source
from chunkflow_compile.weights.staging import Staging

from .read_ahead import Reading
from .streams import Waited, Watch


class StagedCopies:
    """A copy stream whose work one thread issues.  ``device``, ``stream``: a CudaDevice and its CudaStream for copies."""

    def __init__(self, device: Any, stream: Any) -> None:
        self._device = device
        self._inner = stream
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chunkflow-copies")
        self._staging = Staging(device.cuda.staging, lambda: device.cuda.event(False))
        self._newest: Future[None] | None = None
        self._worker = 0  # ident of the thread
        self._records: dict[int, Future[None]] = {}  # id of an event -> where its newest record in this step is issued
        self._marks: list[Any] = []  # events to reuse, each at a point of the compute stream

    @property
    def stream(self) -> Any:
        return self._inner.stream

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        self._put(lambda: self._inner.run(work, watch, name))

    def record(self, event: Any) -> None:
        self._records[id(event)] = self._put(lambda: self._inner.record(event))

    def wait(self, event: Any, waited: Waited | None = None) -> None:
        """Let the copies put from here on start after ``event``, which compute has just recorded.

        ``event`` will be recorded again before the thread comes to this wait, so an event of our own marks the point.
        """
        mark = self._marks.pop() if self._marks else self._device.event()
        self._device.compute.record(mark)

        def issue() -> None:
            if self._staging.pinned:
                self._inner.wait(mark)
            else:
                mark.synchronize()
            self._marks.append(mark)  # a wait that is issued holds on to the point, not to the event

        self._put(issue)

    def copy_bytes(self, target: torch.Tensor, source: Source | Reading) -> None:
        """Called by the thread, as work of the stream."""
        if isinstance(source, Reading):
            values, _ = source.acquire()
            self._device.cuda.copy(target, values)
            copied = self._device.cuda.event(False)
            self._inner.record(copied)
            source.release(copied)
            return
        if source.is_pinned() or not self._staging.pinned:
            self._device.cuda.copy(target, source.read_all() if isinstance(source, DriveBytes) else source)
        else:
            self._staging.to_device(target, source, self._device.cuda.copy, self._inner.record)

    def await_record(self, event: Any) -> None:
        """Wait until the newest record of ``event`` is issued; only then may another stream wait for the event."""
        if (record := self._records.get(id(event))) is not None:
            _raise_from(record)

    def issued(self) -> None:
        """Wait until everything put so far is issued; raise what failed.

        Not on the thread itself, where the collector may run a finalizer that unpins another model's memory.
        """
        if self._newest is not None and threading.get_ident() != self._worker and not self._device.inherited:
            _raise_from(self._newest)

    def end_step(self) -> None:
        """Wait until the copies of a step are issued, and forget where: an event that is dropped leaves its id to another.

        Called by the thread that issues the step, as :meth:`record` and :meth:`await_record` are.
        """
        self.issued()
        self._records.clear()

    def synchronize(self) -> None:
        try:
            self.issued()
        finally:
            self._newest = None
            self._inner.synchronize()

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _put(self, work: Callable[[], None]) -> Future[None]:
        before = self._newest

        def run() -> None:
            self._worker = threading.get_ident()
            if before is not None and (error := before.exception()) is not None:
                raise error  # after a failure nothing more is issued, until synchronize has told of it
            work()

        self._newest = made = self._thread.submit(run)
        return made


def _raise_from(issued: Future[None]) -> None:
    if (error := issued.exception()) is not None:
        raise ChunkflowError(f"A copy to the device failed: {error}") from error
