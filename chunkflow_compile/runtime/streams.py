"""Streams and events made of host threads: each stream a thread with a FIFO queue, as a device runs behind the host.

An event has CUDA's meaning: ``record`` marks a point of a stream; ``wait`` makes another stream wait for the mark that
was newest *when the host called wait*.  A stream that failed runs nothing more, but still reaches its marks, with the
error, so that no one waits for ever; ``synchronize`` raises the error once and makes the stream usable again.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError

# Which of the streams that could go on does: names in, one of them out.
Choose = Callable[[Sequence[str]], str]


class HostEvent:
    """An event between host threads: a count of marks made and of marks reached."""

    def __init__(self, changed: threading.Condition) -> None:
        self.made = 0
        self.reached = 0
        self.error: BaseException | None = None
        self._changed = changed

    def mark(self) -> int:
        """A new mark, made by the host in program order; :meth:`reach` tells that the stream has come to it."""
        self.made += 1
        return self.made

    def reach(self, mark: int, error: BaseException | None = None) -> None:
        with self._changed:
            self.reached, self.error = max(self.reached, mark), error
            self._changed.notify_all()

    def block(self, mark: int) -> None:
        """Blocks the calling thread until ``mark`` is reached; raises if the stream failed before it."""
        with self._changed:
            self._changed.wait_for(lambda: self.reached >= mark)
        self.check()

    def check(self) -> None:
        if self.error is not None:
            raise ChunkflowError(str(self.error)) from self.error


@dataclass
class _Item:
    """``work`` runs unless the stream has failed; ``record`` and ``over`` always; ``event`` with ``mark``: a wait."""

    work: Callable[[], None] | None = None
    event: HostEvent | None = None
    mark: int = 0
    record: bool = False
    over: threading.Event | None = None

    def ready(self) -> bool:
        return self.event is None or self.record or self.event.reached >= self.mark


@dataclass
class _Queue:
    items: deque[_Item] = field(default_factory=deque)
    failure: BaseException | None = None
    busy: bool = False


class Engine:
    """The queues of a device's threads, under one lock.

    ``choose``: where several streams could go on, one at a time does, the one that it names; without it each goes on
    as soon as it can.  ``pause`` holds all of them, so that the host runs as far ahead as it likes.  ``before``: called
    on a stream's thread in front of each piece of work, with the stream's name.
    """

    def __init__(
        self, names: Sequence[str], choose: Choose | None = None, before: Callable[[str], None] | None = None
    ) -> None:
        self.changed = threading.Condition()
        self._queues = {name: _Queue() for name in names}
        self._choose = choose
        self._before = before
        self._chosen: str | None = None
        self._paused = False
        self._closed = False
        self._threads = [
            threading.Thread(target=self._drain, args=(name,), name=f"chunkflow-{name}", daemon=True) for name in names
        ]
        for thread in self._threads:
            thread.start()

    def pause(self) -> None:
        with self.changed:
            self._paused = True

    def resume(self) -> None:
        with self.changed:
            self._paused = False
            self.changed.notify_all()

    def put(self, name: str, item: _Item) -> None:
        with self.changed:
            if self._closed:
                raise ChunkflowError(
                    f"The {name} stream is closed: the model was restored. Call the compiled model again."
                )
            self._queues[name].items.append(item)
            self.changed.notify_all()

    def take_failure(self, name: str) -> BaseException | None:
        """The error of a stream, which is usable again."""
        with self.changed:
            failure, self._queues[name].failure = self._queues[name].failure, None
            return failure

    def close(self) -> None:
        """Ends the threads once their queues are empty."""
        with self.changed:
            self._closed, self._paused = True, False
            self.changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _drain(self, name: str) -> None:
        queue = self._queues[name]
        while (item := self._take(name, queue)) is not None:
            try:
                self._run(name, queue, item)
            except BaseException as error:  # noqa: BLE001  (kept for the thread that waits)
                queue.failure = _told(name, error)
            finally:
                if item.record and item.event is not None:
                    item.event.reach(item.mark, queue.failure)
                if item.over is not None:
                    item.over.set()
                del item
                with self.changed:
                    queue.busy = False
                    self.changed.notify_all()

    def _run(self, name: str, queue: _Queue, item: _Item) -> None:
        if queue.failure is not None:
            return
        if item.work is not None:
            if self._before is not None:
                self._before(name)
            item.work()
        elif item.event is not None and not item.record:
            item.event.check()

    def _take(self, name: str, queue: _Queue) -> _Item | None:
        with self.changed:
            while True:
                if self._closed and not queue.items:
                    return None
                if not self._paused and self._may(name, queue):
                    queue.busy, self._chosen = True, None
                    return queue.items.popleft()
                self.changed.wait()

    def _may(self, name: str, queue: _Queue) -> bool:
        """Whether a stream may take its next item now."""
        if not (queue.items and queue.items[0].ready()):
            return False
        if self._choose is None:
            return True
        if any(q.busy for q in self._queues.values()):
            return False
        if self._chosen is None:
            able = [n for n, q in self._queues.items() if q.items and q.items[0].ready()]
            self._chosen = self._choose(able)
            self.changed.notify_all()
        return self._chosen == name


class CallingStream:
    """The calling thread as a stream: work is over when ``run`` returns."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self, event: HostEvent) -> None:
        event.reach(event.mark())

    def wait(self, event: HostEvent) -> float:
        start = time.perf_counter()
        event.block(event.made)
        return time.perf_counter() - start

    def synchronize(self) -> None:
        return None


class ThreadStream:
    """One of an engine's threads as a stream."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    def run(self, work: Callable[[], None]) -> None:
        self._engine.put(self._name, _Item(work=work))

    def record(self, event: HostEvent) -> None:
        self._engine.put(self._name, _Item(event=event, mark=event.mark(), record=True))

    def wait(self, event: HostEvent) -> float:
        self._engine.put(self._name, _Item(event=event, mark=event.made))
        return 0.0

    def synchronize(self) -> None:
        over = threading.Event()
        self._engine.put(self._name, _Item(over=over))
        over.wait()
        if (error := self._engine.take_failure(self._name)) is not None:
            raise ChunkflowError(str(error)) from error


_WORK = {"copy": "A copy to the device", "compute": "A region", "collective": "A collective"}


def _told(name: str, error: BaseException) -> BaseException:
    """The error as it is told on; without its frames, which would keep the executor alive."""
    bare = error.with_traceback(None)
    if isinstance(error, ChunkflowError):
        return bare
    told = ChunkflowError(f"{_WORK.get(name, name)} failed: {error}")
    told.__cause__ = bare
    return told


def close_with(owner: Any, engine: Engine) -> weakref.finalize[[], Any]:
    """Ends an engine's threads with its owner, or when the result is called."""
    return weakref.finalize(owner, engine.close)
