"""Locks and forks: a child must not wait for a thread that only its parent has."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from conftest import in_a_child

import chunkflow_compile
from chunkflow_compile.weights.locks import ProcessLock

# Where a lock of Python's own may be, and why a child that was forked never waits for it.
PLAIN = {
    "weights/locks.py": "ProcessLock has one for each process",
    "runtime/streams.py": "queues of threads, which refuse the work of a child and end without their lock there",
    "runtime/cuda_time.py": "of calls on a GPU, which a child cannot use",
    "runtime/torch_cuda.py": "of the recording of a CUDA graph, likewise",
}


def test_a_child_takes_a_lock_that_a_thread_of_the_parent_holds() -> None:
    lock, held, over = ProcessLock(), threading.Event(), threading.Event()

    def holds() -> None:
        with lock():
            held.set()
            over.wait()

    thread = threading.Thread(target=holds)
    thread.start()
    held.wait()

    def works() -> bool:
        with lock(), lock():
            return not over.is_set()

    try:
        assert in_a_child(works) and not lock().acquire(blocking=False)
    finally:
        over.set()
        thread.join()


def test_no_other_lock_is_held_over_a_fork() -> None:
    root = Path(chunkflow_compile.__file__).parent
    made = re.compile(r"\b(threading\.)?(R?Lock|Condition|Semaphore|Barrier)\b\(|=threading\.R?Lock\b")
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if made.search(path.read_text())}
    assert found == {*PLAIN}
