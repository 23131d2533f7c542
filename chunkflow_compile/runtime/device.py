"""The protocol between the executor and a device: streams in order, and events between them.

An event has CUDA's meaning: ``record`` marks a point of a stream; ``wait`` makes another stream wait for the mark that
was newest *when the host called wait*.  On ``cpu`` the compute stream is the calling thread, so that what it runs is
over when ``run`` returns, and the copy stream is a thread that stands for the copy engine.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from chunkflow_compile.passes.errors import ChunkflowError


class Event(Protocol):
    """A mark on a stream; made once, recorded again every step."""


class Stream(Protocol):
    """Work in order."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueues ``work``."""

    def record(self, event: Any) -> None:
        """Marks this point of the stream."""

    def wait(self, event: Any) -> float:
        """Work enqueued from here on starts after the event's newest mark.  Returns seconds that the host waited."""

    def synchronize(self) -> None:
        """The host waits until the stream is empty.  Raises what the stream's work raised."""


class Device(Protocol):
    """A device: where the arena lies and which streams there are."""

    name: str
    compute: Any
    copy: Any

    def event(self) -> Any:
        """A new event, with no mark."""

    def copy_bytes(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies ``source`` over ``target`` (uint8, equal sizes) on the copy stream's engine."""

    def close(self) -> None:
        """Ends the streams."""


class HostEvent:
    """An event between host threads: a count of marks made and of marks reached."""

    def __init__(self) -> None:
        self._reached = 0
        self._made = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def mark(self) -> int:
        """A new mark, made by the host in program order; :meth:`reach` tells that the stream has come to it."""
        self._made += 1
        return self._made

    def reach(self, mark: int, error: BaseException | None = None) -> None:
        with self._changed:
            self._reached = max(self._reached, mark)
            self._error = error
            self._changed.notify_all()

    @property
    def newest(self) -> int:
        return self._made

    def block(self, mark: int) -> None:
        """Blocks the calling thread until ``mark`` is reached; raises if the stream failed before it."""
        with self._changed:
            while self._reached < mark:
                self._changed.wait()
            if self._error is not None:
                raise ChunkflowError(f"A copy to the device failed: {self._error}") from self._error


class HostStream:
    """The calling thread as a stream: work is over when ``run`` returns."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self, event: HostEvent) -> None:
        event.reach(event.mark())

    def wait(self, event: HostEvent) -> float:
        start = time.perf_counter()
        event.block(event.newest)
        return time.perf_counter() - start

    def synchronize(self) -> None:
        return None


class ThreadStream:
    """A thread with a FIFO queue as a stream.

    After an error it runs nothing more, but still reaches its marks, with the error, so that no one waits for ever;
    ``synchronize`` raises the error once and makes the stream usable again.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: list[BaseException] = []
        self._thread = threading.Thread(target=_drain, args=(self._queue, self._failure), name=name, daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, self._queue.put, None)

    def run(self, work: Callable[[], None]) -> None:
        self._put(_unless(self._failure, work))

    def record(self, event: HostEvent) -> None:
        mark = event.mark()
        failure = self._failure
        self._put(lambda: event.reach(mark, failure[0] if failure else None))

    def wait(self, event: HostEvent) -> float:
        mark = event.newest
        self.run(lambda: event.block(mark))
        return 0.0

    def synchronize(self) -> None:
        done = threading.Event()
        self._put(done.set)
        done.wait()
        if self._failure:
            error = self._failure[0]
            self._failure.clear()
            raise ChunkflowError(f"A copy to the device failed: {error}") from error

    def close(self) -> None:
        self._close()
        self._thread.join()

    def _put(self, item: Callable[[], None]) -> None:
        if not self._close.alive:
            raise ChunkflowError("The copy stream is closed: the model was restored. Call the compiled model again.")
        self._queue.put(item)


def _unless(failure: list[BaseException], work: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        if not failure:
            work()

    return run


def _drain(work: queue.SimpleQueue[Callable[[], None] | None], failure: list[BaseException]) -> None:
    while (item := work.get()) is not None:
        try:
            item()
        except BaseException as error:  # noqa: BLE001  (kept for the thread that waits)
            failure.append(error.with_traceback(None))  # its frames would keep the executor alive


class CpuDevice:
    """Compute on the calling thread, copies on one thread of their own."""

    name = "cpu"

    def __init__(self) -> None:
        self.compute = HostStream()
        self.copy = ThreadStream("chunkflow-copy")

    def event(self) -> HostEvent:
        return HostEvent()

    def copy_bytes(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copy_host_bytes(target, source)

    def close(self) -> None:
        self.copy.close()


def copy_host_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies between host tensors (uint8, equal sizes) by one thread, as a copy engine does.

    Tensor.copy_ would spread over the compute's threads.  ctypes releases the GIL.
    """
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


def check_device(device: torch.device) -> None:
    """Raises ChunkflowError for a device that programs cannot run on."""
    if device.type != "cpu":
        raise ChunkflowError(f"ChunkFlow does not run on {device.type} yet: place the model on the cpu.")


def make_device(device: torch.device) -> CpuDevice:
    """The device that runs programs whose weights are on ``device``."""
    check_device(device)
    return CpuDevice()
