"""Streams and events on host threads.  A stream is a thread with a FIFO queue.  As on a GPU, work is enqueued by the host
and runs later.

Events work as in CUDA: ``record`` marks a point of a stream, and ``wait`` makes another stream wait for the mark that was the
latest *when the host called wait*.  After a failure, a stream runs no more work.  It still reaches its marks, so that no
thread waits forever.  Each thread that waits for one of these marks then raises the error of the stream.  ``synchronize``
raises the error once and makes the stream usable again.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from chunkflow_compile.passes.errors import ChunkflowError

from .device_base import Waited, Watch
from .host_clock import MONOTONIC, HostClock

# The maximum time in seconds for which an exiting process waits for its streams.  A limit is needed because the work of a
# stream may hang, for example in a collective after another rank has died.
EXIT_SECONDS = 5.0

_T = TypeVar("_T")

# A function that chooses the stream to run next.  It gets the names of the streams that can run, and returns one of them.
Choose = Callable[[Sequence[str]], str]


class Bell:
    """A condition variable for several threads.  It uses simple locks instead of a threading.Condition, because a Ctrl-C
    inside a threading.Condition could leave the condition locked forever.

    ``now``: a function that returns the current time in seconds.
    """

    def __init__(self, clock: HostClock = MONOTONIC) -> None:
        self.now = clock.now
        self.lock = threading.RLock()
        self._waiting: dict[threading.Lock, Callable[[], bool]] = {}

    def ring(self) -> None:
        """Wake each waiting thread whose function ``ready`` now returns True.  This method calls ``ready`` itself, because it
        would take longer to wake every waiting thread and let it call its own ``ready``."""
        with self.lock:
            for waiter, ready in list(self._waiting.items()):
                if ready():
                    if waiter.locked():
                        waiter.release()
                    self._waiting.pop(waiter, None)

    def wait_for(self, ready: Callable[[], bool], take: Callable[[], _T]) -> _T:
        """Wait until ``ready`` returns True; then call ``take`` and return its result.

        ``ready`` is called immediately and after every :meth:`ring`.  Both functions are called while the lock is held.
        """
        while True:
            with self.lock:
                if ready():
                    return take()
                waiter = threading.Lock()
                waiter.acquire()
                self._waiting[waiter] = ready
            waiter.acquire()


class HostEvent:
    """An event between host threads.  Each record of the event on a stream is a *mark*, and marks are numbered from 1.
    ``recorded``: the number of marks so far.  ``reached``: the number of the latest mark that a stream has reached."""

    def __init__(self, bell: Bell) -> None:
        self.recorded = 0
        self.reached = 0
        self.reached_at = 0.0  # when the latest mark was reached, in seconds of the device's clock
        self.error: BaseException | None = None
        self._bell = bell

    def mark(self) -> int:
        """Make a new mark; return its number.  The host calls this method when it enqueues the mark on a stream.  When the
        stream reaches the mark, the stream calls :meth:`reach` with the number of the mark."""
        self.recorded += 1
        return self.recorded

    def reach(self, mark: int, error: BaseException | None = None) -> None:
        with self._bell.lock:
            self.reached, self.error, self.reached_at = max(self.reached, mark), error, self._bell.now()
            self._bell.ring()

    def block(self, mark: int) -> None:
        """Block the calling thread until the mark with the number ``mark`` is reached.  Raises ChunkflowError if the stream
        failed before it reached this mark."""
        self._bell.wait_for(lambda: self.reached >= mark, self.check)

    def check(self) -> None:
        if self.error is not None:
            raise ChunkflowError(str(self.error)) from self.error


@dataclass
class _Item:
    """An entry in the queue of a stream.

    ``run``: the work, or None.  The work is a function whose argument is the time when the work could have begun.  It is not
    called if the stream has failed.  ``awaits``: an event and the number of one of its marks, or None.  The work runs only
    after a stream has reached this mark.  ``end``: a function, or None.  It is called after the work, even if the work was
    skipped.  Its argument is the error of the stream, or None if the stream has not failed.  ``enqueued``: the time when the
    host enqueued this entry, in seconds of the device's clock.
    """

    run: Callable[[float], None] | None = None
    awaits: tuple[HostEvent, int] | None = None
    end: Callable[[BaseException | None], None] | None = None
    enqueued: float = 0.0

    def ready(self) -> bool:
        return self.awaits is None or self.awaits[0].reached >= self.awaits[1]


class Engine:
    """Runs streams of a device on host threads.  One lock guards the queues of all these streams.

    By default, each stream has its own thread.  If ``choose`` is given, a single thread runs all streams, and ``choose``
    selects the stream that runs next, so that tests can reproduce the order of work.  While the engine is paused
    (:meth:`pause`), the host can enqueue work, but no work runs.

    ``streams``: the streams by name.  ``before``: a function that is called before each piece of work; its argument is the
    name of the stream.
    """

    def __init__(
        self,
        names: Sequence[str],
        choose: Choose | None = None,
        before: Callable[[str], None] | None = None,
        clock: HostClock = MONOTONIC,
    ) -> None:
        self.clock = clock
        self.bell = Bell(clock)
        self._process = os.getpid()
        self.streams = {name: ThreadStream(self, name) for name in names}
        self._choose: Choose = choose or (lambda able: able[0])
        self._before = before
        self._paused = False
        self._closed = False
        shares = [tuple(names)] if choose else [(name,) for name in names]
        self._threads = [
            threading.Thread(target=self._drain, args=(share,), name=f"chunkflow-{'-'.join(share)}", daemon=True)
            for share in shares
        ]
        self._running = len(self._threads)
        for thread in self._threads:
            thread.start()
        atexit.register(self.close, EXIT_SECONDS)  # a process that exits while threads run may abort

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is one of the engine's threads."""
        return threading.current_thread() in self._threads

    def pause(self) -> None:
        with self.bell.lock:
            self._paused = True

    def resume(self) -> None:
        with self.bell.lock:
            self._paused = False
            self.bell.ring()

    def put(self, stream: ThreadStream, item: _Item) -> None:
        self._check_process()
        item.enqueued = self.clock.now()
        with self.bell.lock:
            if self._closed:
                raise ChunkflowError(
                    f"The {stream.name} stream is closed, because the model was restored: compile it again to stream it."
                )
            stream.items.append(item)
            self.bell.ring()

    def end(self) -> None:
        """Let the threads end once their queues are empty.  This method does not wait for the threads, because the garbage
        collector may call it."""
        if os.getpid() != self._process:
            return  # a forked child does not have the threads, and the lock may have been held during the fork
        with self.bell.lock:
            self._closed, self._paused = True, False
            self.bell.ring()

    def close(self, timeout: float | None = None) -> None:
        """Let the threads end once their queues are empty.  Wait for each thread for at most ``timeout`` seconds."""
        self.end()
        for thread in self._threads:
            if thread is not threading.current_thread() and os.getpid() == self._process:
                thread.join(timeout)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ChunkflowError(
                "This process was forked from one that runs a ChunkFlow program, and the threads of its streams do not "
                "exist here: call chunkflow_compile.restore(model) and compile the model again, or start processes "
                "with spawn."
            )

    def _drain(self, share: Sequence[str]) -> None:
        ready, take = partial(self._ready, share), partial(self._take, share)
        while (taken := self.bell.wait_for(ready, take)) is not None:
            stream, item = taken
            try:
                if item.run is not None and stream.failure is None:
                    if item.awaits is None and self._before is not None:
                        self._before(stream.name)
                    item.run(max(stream.since, item.enqueued))
            except BaseException as error:  # noqa: BLE001  (the waiting thread raises it again)
                stream.failure = _explained(stream.name, error)
            finally:
                if item.end is not None:
                    item.end(stream.failure)
                del item, taken  # otherwise, these variables would keep the work alive until the next item comes
        with self.bell.lock:
            self._running -= 1
            if not self._running:
                atexit.unregister(self.close)  # atexit would otherwise keep the engine alive

    def _ready(self, share: Sequence[str]) -> bool:
        """Return whether the thread that runs the streams ``share`` can continue.  It can continue if it can run an item, or
        if it can end because no more items will come."""
        over = self._closed and not any(self.streams[name].items for name in share)
        return over or bool(not self._paused and self._able(share))

    def _take(self, share: Sequence[str]) -> tuple[ThreadStream, _Item] | None:
        """Remove the next item from the queues of the streams ``share``; return its stream and the item.  Return None if no
        more items will come."""
        if not (able := self._able(share)):
            return None
        stream = self.streams[self._choose(able)]
        return stream, stream.items.popleft()

    def _able(self, share: Sequence[str]) -> list[str]:
        return [n for n in share if (items := self.streams[n].items) and items[0].ready()]


class CallingStream:
    """A stream that runs its work on the calling thread.  The work is finished when ``run`` returns."""

    def __init__(self, clock: HostClock = MONOTONIC) -> None:
        self._now = clock.now

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        work() if watch is None else _watched(work, watch, self._now)()

    def record(self, event: HostEvent) -> None:
        event.reach(event.mark())

    def wait(self, event: HostEvent, waited: Waited | None = None) -> None:
        start = self._now()
        event.block(event.recorded)
        if waited is not None:
            waited(self._now() - start)

    def synchronize(self) -> None:
        return None


class ThreadStream:
    """A stream whose work runs on a thread of its engine.

    ``items``: the queue.  ``since``: the time when the running work could have begun; the thread may have woken up later.
    ``ended``: the time at which the running work counts as ended (see :meth:`end_work`); None if the work ends when its
    function returns.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self.items: deque[_Item] = deque()
        self.failure: BaseException | None = None
        self.since = 0.0
        self.ended: float | None = None
        self._now = engine.clock.now
        self._put = partial(engine.put, self)

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        work = _in_callers_modes(_watched(work, watch, self._now))

        def run(since: float) -> None:
            self.since, self.ended = since, None
            work()
            self.since = self.ended or self._now()

        self._put(_Item(run))

    def end_work(self, at: float) -> None:
        """Let the running work count as ended at the time ``at``, although its function has not returned yet."""
        self.ended = at

    def record(self, event: HostEvent) -> None:
        self._put(_Item(end=partial(event.reach, event.mark())))

    def wait(self, event: HostEvent, waited: Waited | None = None) -> None:
        def run(since: float) -> None:
            self.since = max(self.since, event.reached_at)
            event.check()
            if waited is not None:
                waited(max(0.0, event.reached_at - since))

        self._put(_Item(run, awaits=(event, event.recorded)))

    def recover(self) -> None:
        """Make the stream run all work that is enqueued after this call, even if earlier work fails.  An error of the
        earlier work is then raised only in threads that wait for a mark that was enqueued before this call."""

        def forget(_: BaseException | None) -> None:
            self.failure = None

        self._put(_Item(end=forget))

    def synchronize(self) -> None:
        over = threading.Lock()
        over.acquire()
        self._put(_Item(end=lambda _: over.release()))
        over.acquire()  # not a threading.Condition: a Ctrl-C could leave it locked forever
        failure, self.failure = self.failure, None
        if failure is not None:
            raise ChunkflowError(str(failure)) from failure


def _watched(work: Callable[[], None], watch: Watch | None, now: Callable[[], float]) -> Callable[[], None]:
    if watch is None:
        return work

    def run() -> None:
        watch.begins(now())
        try:
            work()
        finally:
            watch.ends(now())

    return run


def _in_callers_modes(work: Callable[[], None]) -> Callable[[], None]:
    """Wrap work so that it runs in the present autograd modes of the thread that enqueues it.  Without the wrapper, it would
    run in the modes of the stream's thread."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run() -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            work()

    return run


_WORK = {
    "copy": "A copy to the device",
    "pull": "A pull from other ranks",
    "compute": "A region",
    "collective": "A collective",
    "completion": "A collective",
}


def _explained(name: str, error: BaseException) -> BaseException:
    """Return the error as a ChunkflowError without a traceback, because a traceback would keep the executor alive."""
    bare = error.with_traceback(None)
    if isinstance(error, ChunkflowError):
        return bare
    failure = ChunkflowError(f"{_WORK.get(name, name)} failed: {error}")
    failure.__cause__ = bare
    return failure
