"""Ranks that read the drive together, as readers of one process, with a ring between them."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from conftest import WITHIN

from chunkflow_compile.runtime.read_ahead import ReadAhead, Reading
from chunkflow_compile.runtime.read_thread import Order
from chunkflow_compile.weights.mapping import Descriptor
from chunkflow_compile.weights.shared_ring import SharedRing
from chunkflow_compile.weights.source import DriveBytes, WeightFile

CONTENT = random.Random(0).randbytes(4096)
EIGHT = [(64 * i + i, 64) for i in range(8)]


def unpinned(_: torch.Tensor) -> Callable[[], None]:
    return lambda: None


class Event:
    """An event that another thread reaches."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def synchronize(self) -> None:
        assert self._reached.wait(WITHIN)


def cycle_of(file: WeightFile, spans: Sequence[tuple[int, int]]) -> list[DriveBytes]:
    return [DriveBytes(file, begin, size) for begin, size in spans]


class Rank:
    """A rank: its reader, and its own opening of the file."""

    def __init__(self, number: int, ring: SharedRing, path: str, spans: Sequence[tuple[int, int]], pin: Any) -> None:
        self.number, self.ring = number, ring
        self.file = WeightFile(Descriptor(os.open(path, os.O_RDONLY)), "the file")
        self.cycle = cycle_of(self.file, spans)
        self.reader = ReadAhead(pin)
        self.calls = 0
        self.place = 0
        self.torn = 0  # copies whose bytes changed before they ended

    def start(self, first: int = 0, begin: int = 0, plan: str = "") -> None:
        """A cold start, as one call: it fetches the ``first`` reads of the cycle before those from ``begin`` on."""
        self.calls += 1
        order = Order(self.cycle[:first], self.cycle, begin, plan)
        self.reader.reset(order, call=(self.calls, 0), ring=self.ring)
        for source in order.first:
            self.copy(source)
        self.place = begin

    def call(self) -> None:
        self.calls += 1
        self.reader.on_call((self.calls, 0))

    def copy(self, source: DriveBytes, event: Event | None = None) -> Callable[[], None]:
        """``event``: when the copy ends, which reads the bytes until then.  Returns a function that ends it."""
        reading = Reading(self.reader, source)
        values, _ = reading.acquire()
        expected = CONTENT[source.offset : source.offset + source.nbytes]
        assert bytes(values.tolist()) == expected
        reading.release(event)

        def end() -> None:
            self.torn += bytes(values.tolist()) != expected
            if event is not None:
                event.reach()

        return end

    def begin_copy(self) -> tuple[torch.Tensor, Event]:
        """The bytes that the next copy reads, and the event that ends it."""
        late, reading = Event(), Reading(self.reader, self.cycle[self.place])
        values, _ = reading.acquire()
        reading.release(late)
        self.place = (self.place + 1) % len(self.cycle)
        return values, late

    def copies(self, count: int) -> None:
        for _ in range(count):
            self.copy(self.cycle[self.place])
            self.place = (self.place + 1) % len(self.cycle)

    @property
    def alone(self) -> bool:
        return not self.reader.joined and self.number > 0


@contextmanager
def ranks_of(
    count: int, spans: Sequence[tuple[int, int]], pin: Callable[[torch.Tensor], Callable[[], None]] = unpinned
) -> Iterator[list[Rank]]:
    numbers, ring = tuple(range(count)), SharedRing.made()
    with tempfile.NamedTemporaryFile() as made:
        made.write(CONTENT)
        made.flush()
        rings = [SharedRing(Descriptor(os.dup(ring.number)), number, numbers, WITHIN) for number in numbers]
        found = [Rank(number, rings[number], made.name, spans, pin) for number in numbers]
        try:
            yield found
        finally:
            for rank in found:
                rank.reader.close()
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "chunkflow-read-ahead"])


def in_step(ranks: Sequence[Rank], work: Callable[[Rank], None]) -> None:
    """Let all ranks do something at the same time; fails if one fails, or takes too long."""
    failed: list[BaseException] = []

    def run(rank: Rank) -> None:
        try:
            work(rank)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + WITHIN
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a rank waits for ever"
    if failed:
        raise failed[0]


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def meet(ranks: Sequence[Rank], start: bool = True) -> None:
    """Begin, and go on until the others take what the first rank reads."""
    if start:
        in_step(ranks, Rank.start)

    def together() -> bool:
        in_step(ranks, lambda rank: (rank.copies(len(rank.cycle)), rank.call())[0])
        return not any(rank.alone for rank in ranks)

    eventually(together)
