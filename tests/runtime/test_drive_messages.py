"""What ranks that read together tell each other, message by message."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator

import pytest
from conftest import WITHIN
from drive_ranks import CONTENT, EIGHT, cycle_of, eventually, unpinned

from chunkflow_compile.passes.ring import ring_bytes
from chunkflow_compile.runtime.drive_messages import AT, FREED, LEFT, OFFER, OVER, READY, TAKES, Message, send
from chunkflow_compile.runtime.drive_runs import Order, OwnRun
from chunkflow_compile.runtime.follower import Follower
from chunkflow_compile.runtime.leader import Leader
from chunkflow_compile.runtime.ring_memory import RingMemory
from chunkflow_compile.weights.links import Links
from chunkflow_compile.weights.mapping import Descriptor
from chunkflow_compile.weights.source import DriveFile


class Wire:
    """The other end of a link, in the hands of the test."""

    def __init__(self, numbers: tuple[int, int]) -> None:
        mine, theirs = socket.socketpair()
        mine.settimeout(WITHIN)
        self.links = Links(numbers[0], (0, 1), {numbers[1]: theirs})
        self._link = mine

    def tell(self, message: Message, descriptor: Descriptor | None = None) -> None:
        send(self._link, message, descriptor)

    def hears(self) -> Message:
        return Message.unpacked(self._link.recv(len(Message(AT).packed()), socket.MSG_WAITALL))

    def silent(self) -> bool:
        self._link.settimeout(0.2)
        try:
            return not self._link.recv(1)
        except TimeoutError:
            return True
        finally:
            self._link.settimeout(WITHIN)


def order_of(file: DriveFile, first: int, begin: int) -> Order:
    cycle = cycle_of(file, EIGHT)
    return Order(cycle[:first], cycle, begin)


def other_rank(wire: Wire, order: Order) -> tuple[RingMemory, Follower, OwnRun]:
    """A ring to offer it, its part, and its own reading."""
    memory = RingMemory.shared(1 << 16, unpinned)
    run = OwnRun(order, 0, RingMemory.own(1 << 16, unpinned), ring_bytes([64] * 8), lambda: memory)
    return memory, Follower(wire.links), run


@pytest.fixture
def file() -> Iterator[DriveFile]:
    with tempfile.TemporaryFile() as made:
        made.write(CONTENT)
        made.flush()
        yield DriveFile(Descriptor(os.dup(made.fileno())), "the file")


def test_what_the_first_rank_offers(file: DriveFile) -> None:
    wire, order = Wire((0, 1)), order_of(file, 3, 2)
    found = Leader(wire.links)
    digest = order.digest(None)

    def asks(call: int, place: int) -> None:
        wire.tell(Message(AT, place=place, call=(call, 0), digest=digest))

    found.begin(order, digest, 1 << 16, unpinned)
    asks(2, 2)
    assert wire.silent(), "it has not come to that call"
    found.reached((1, 0), order, 0)
    assert wire.silent()
    found.reached((2, 0), order, 0)
    told = wire.hears()
    assert (told.kind, told.read, told.place, told.call) == (OFFER, 3, 3, (2, 0)), "not what a start fetches first"
    assert not found.room(4) and found.room(3), "its slots are kept from now on"
    wire.tell(Message(TAKES, told.run, 5))
    eventually(lambda: found.room(5))
    wire.tell(Message(FREED, told.run, 7))
    eventually(lambda: found.room(7))
    found.begins(3)
    found.came(3, 4096, 0.5, 1.5)
    assert wire.silent(), "it has read that by itself"
    found.came(5, 8192, 0.5, 1.5)
    ready = wire.hears()
    assert (ready.kind, ready.read, ready.place, ready.seconds, ready.at) == (READY, 5, 8192, 0.5, 1.5)
    wire.tell(Message(LEFT, told.run))
    eventually(lambda: found.room(1000))
    # another run: what was told of calls before it is of other numbers
    found.begins(11)
    found.end()
    found.begin(order, digest, 1 << 16, unpinned)
    asks(2, 2)
    assert wire.silent()
    found.reached((3, 0), order, 8)
    asks(3, order.place(8) + 1)
    assert wire.silent(), "its copies are at another place"
    asks(3, order.place(8))
    told = wire.hears()
    assert (told.kind, told.read, told.place) == (OFFER, 3, 8)
    found.close()
    assert wire.hears().kind == OVER
    wire.links.close()


def test_what_another_rank_takes(file: DriveFile) -> None:
    wire, order = Wire((1, 0)), order_of(file, 3, 2)
    memory, found, run = other_rank(wire, order)
    found.reached((4, 0), run, 0, b"x" * 16, unpinned)
    at = wire.hears()
    assert (at.kind, at.place, at.call, at.digest) == (AT, 2, (4, 0), b"x" * 16)
    wire.tell(Message(OFFER, 1, read=100, place=100, call=(3, 0)), memory.descriptor)
    assert wire.hears() == Message(LEFT, 1), "of a call in which it has not asked"
    found.reached((5, 0), run, 0, b"x" * 16, unpinned)
    wire.hears()
    eventually(lambda: run.nbytes == 3 * 64)  # the ring is full
    wire.tell(Message(OFFER, 1, read=98, place=100, call=(5, 0)), memory.descriptor)
    told = wire.hears()
    read = run._until
    assert told.kind == TAKES and read is not None and read >= 4, "neither the first reads nor what it has"
    assert told.read == read + 100 - 3
    found.leave()
    assert wire.hears() == Message(LEFT, 1)
    run.stop()
    wire.links.close()


def test_what_another_rank_hears(file: DriveFile) -> None:
    """A message may come in parts; a child process does not get the file of the ring."""
    wire, order = Wire((1, 0)), order_of(file, 0, 0)
    memory, found, run = other_rank(wire, order)
    found.reached((1, 0), run, 0, bytes(16), unpinned)
    wire.hears()
    over = Message(OVER, 7).packed()
    wire._link.sendall(over[:10])
    time.sleep(0.1)
    wire._link.sendall(over[10:])
    wire.tell(Message(OFFER, 1, call=(1, 0)), memory.descriptor)
    assert wire.hears().kind == TAKES
    assert found._memory is not None and found._memory.descriptor is not None
    assert fcntl.fcntl(found._memory.descriptor.number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    found.leave()
    run.stop()
    wire.links.close()


def test_an_offer_after_a_failed_call_is_not_taken(file: DriveFile) -> None:
    wire, order = Wire((1, 0)), order_of(file, 0, 0)
    memory, found, run = other_rank(wire, order)
    found.reached((1, 0), run, 0, bytes(16), unpinned)
    wire.hears()
    found.alone()
    wire.tell(Message(OFFER, 1, call=(1, 0)), memory.descriptor)
    assert wire.hears() == Message(LEFT, 1)
    run.stop()
    wire.links.close()
