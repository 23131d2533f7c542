"""Reading the drive ahead of the copies: in their order, through a ring, whatever the sizes."""

from __future__ import annotations

import logging
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ring import MOST_READ_AHEAD, Ring, RingSlot, ring_bytes
from chunkflow_compile.runtime import read_ahead
from chunkflow_compile.runtime.read_ahead import ReadAhead, Reading
from chunkflow_compile.weights.mapping import Descriptor
from chunkflow_compile.weights.source import DriveBytes, DriveFile

CONTENT = random.Random(0).randbytes(4096)


class Event:
    """An event that another thread reaches."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def synchronize(self) -> None:
        self._reached.wait(10)


@pytest.fixture(scope="module")
def file() -> Iterator[DriveFile]:
    with tempfile.TemporaryFile() as made:
        made.write(CONTENT)
        made.flush()
        yield DriveFile(Descriptor(os.dup(made.fileno())), "the file")


def cycle_of(file: DriveFile, spans: list[tuple[int, int]]) -> list[tuple[tuple[str, int, int], DriveBytes]]:
    return [((str(i), 0, 1), DriveBytes(file, begin, size)) for i, (begin, size) in enumerate(spans)]


def bytes_of(reader: ReadAhead, key: tuple[str, int, int], source: DriveBytes, event: Event | None = None) -> bytes:
    reading = Reading(reader, key, source)
    values, _ = reading.take()
    assert values.numel() == reading.numel()
    found = bytes(values.tolist())
    reading.free(event)
    if event is not None:
        event.reach()
    return found


@given(st.lists(st.tuples(st.integers(0, 2048), st.integers(1, 2048)), min_size=1, max_size=12), st.data())
def test_every_copy_gets_its_bytes(file: DriveFile, spans: list[tuple[int, int]], data: st.DataObject) -> None:
    """Over several rounds, from any begin, with restarts in the middle, whether room comes back at once or by events."""
    cycle = cycle_of(file, spans)
    reader = ReadAhead(lambda n: torch.empty(n, dtype=torch.uint8))
    try:
        for _ in range(3):
            begin = data.draw(st.integers(0, len(cycle) - 1))
            first = cycle[: data.draw(st.integers(0, len(cycle)))]
            reader.restart(first, cycle, begin)
            expected = [*first, *cycle[begin:], *cycle, *cycle]
            for key, source in expected[: data.draw(st.integers(0, len(expected)))]:
                offset, size = spans[int(key[0])]
                event = Event() if data.draw(st.booleans()) else None
                assert bytes_of(reader, key, source, event) == CONTENT[offset : offset + size]
    finally:
        reader.stop()
    assert not [t for t in threading.enumerate() if t.name == "chunkflow-read-ahead"]


def test_it_reads_ahead_as_far_as_the_ring_goes(file: DriveFile) -> None:
    cycle = cycle_of(file, [(64 * i, 64) for i in range(16)])
    reader, before = ReadAhead(lambda n: torch.empty(n, dtype=torch.uint8)), file.read_bytes
    reader.restart([], cycle, 0)
    (bytes_of(reader, *cycle[0]), bytes_of(reader, *cycle[1]))
    deadline = 200
    while file.read_bytes - before < 6 * 64 and deadline:
        threading.Event().wait(0.01)
        deadline -= 1
    reader.stop()
    assert 6 * 64 <= file.read_bytes - before <= (2 + 5) * 64, "a quarter of the step, and room for one more"


def test_a_slot_is_not_written_before_its_copy_has_ended(file: DriveFile) -> None:
    """The copies after it have ended; its own event has not come to pass."""
    cycle = cycle_of(file, [(64 * i, 64) for i in range(16)])
    reader, before, late = ReadAhead(lambda n: torch.empty(n, dtype=torch.uint8)), file.read_bytes, Event()
    reader.restart([], cycle, 0)
    slow = Reading(reader, *cycle[0])
    values, _ = slow.take()
    slow.free(late)
    for reading in cycle[1:4]:
        bytes_of(reader, *reading)
    threading.Event().wait(0.3)
    assert bytes(values.tolist()) == CONTENT[:64] and file.read_bytes - before == 5 * 64, "the ring is full"
    late.reach()
    for i, reading in enumerate([*cycle[4:], *cycle]):
        at = 64 * ((i + 4) % 16)
        assert bytes_of(reader, *reading) == CONTENT[at : at + 64]
    assert bytes(values.tolist()) != CONTENT[:64], "the slot is in use again"
    reader.stop()


def test_a_device_that_fails_ends_the_wait_for_bytes(file: DriveFile) -> None:
    class Failed:
        def synchronize(self) -> None:
            raise RuntimeError("unspecified launch failure")

    cycle = cycle_of(file, [(64 * i, 64) for i in range(16)])
    reader = ReadAhead(lambda n: torch.empty(n, dtype=torch.uint8))
    reader.restart([], cycle, 0)
    failed: list[str] = []

    def take_all() -> None:
        try:
            for key, source in cycle:
                reading = Reading(reader, key, source)
                reading.take()
                reading.free(Failed())
        except ChunkflowError as error:
            failed.append(str(error))

    copies = threading.Thread(target=take_all, daemon=True)
    copies.start()
    copies.join(10)
    assert failed == ["The GPU failed: unspecified launch failure"]
    reader.stop()


class NeverWaits(Ring):
    def slot(self, nbytes: int) -> RingSlot:
        return replace(super().slot(nbytes), after=0)


def test_a_ring_that_does_not_wait_shows_wrong_bytes(file: DriveFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the verifier refuses (tests/passes/program/test_reads.py) is one that a copy would see."""
    monkeypatch.setattr(read_ahead, "Ring", NeverWaits)
    cycle, before = cycle_of(file, [(64 * i, 64) for i in range(16)]), file.read_bytes
    reader = ReadAhead(lambda n: torch.empty(n, dtype=torch.uint8))
    reader.restart(cycle[:1], cycle[1:], 0)  # the first is not read again, however far the reader gets
    values, _ = Reading(reader, *cycle[0]).take()
    while file.read_bytes - before < 7 * 64:
        threading.Event().wait(0.01)
    reader.stop()
    assert bytes(values.tolist()) != CONTENT[:64]


def test_a_copy_out_of_order_reads_by_itself(file: DriveFile) -> None:
    cycle = cycle_of(file, [(0, 10), (10, 20), (30, 30)])
    reader = ReadAhead(lambda n: torch.empty(n, dtype=torch.uint8))
    assert bytes_of(reader, *cycle[1]) == CONTENT[10:30], "before the first restart"
    reader.restart([], cycle, 0)
    assert bytes_of(reader, *cycle[2]) == CONTENT[30:60]
    assert bytes_of(reader, *cycle[0]) == CONTENT[:10]
    assert bytes_of(reader, *cycle[1]) == CONTENT[10:30]
    reader.stop()


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.long), 10])
def test_a_slow_drive_is_named_once(file: DriveFile, times: int, caplog: pytest.LogCaptureFixture) -> None:
    cycle = cycle_of(file, [(512 * i, 512) for i in range(8)])
    reader = ReadAhead(lambda n: torch.empty(n, dtype=torch.uint8), rate=4000)
    reader.restart([], cycle, 0, expected=4000 * times)
    seconds = nbytes = 0.0
    with caplog.at_level(logging.WARNING, "chunkflow_compile"):
        for reading in [*cycle, *cycle]:
            bytes_of(reader, *reading)
            took, done = reader.settle()
            seconds, nbytes = seconds + took, nbytes + done
    reader.stop()
    assert nbytes >= 16 * 512 and nbytes / seconds == pytest.approx(4000, rel=0.2)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == (times == 10) and all("the file is read at 0.00" in s for s in said)


def test_an_emulated_drive_takes_its_time_after_a_pause(file: DriveFile) -> None:
    """A ring that is full stops the drive; what it reads after that takes as long as before."""
    cycle, rate = cycle_of(file, [(512 * i, 512) for i in range(8)]), 20_000
    reader = ReadAhead(lambda n: torch.empty(n, dtype=torch.uint8), rate=rate)
    reader.restart([], cycle, 0)
    seconds = nbytes = 0.0
    for reading in [*cycle, *cycle]:
        threading.Event().wait(2 * 512 / rate)  # the copies are slower than the drive
        bytes_of(reader, *reading)
        took, done = reader.settle()
        seconds, nbytes = seconds + took, nbytes + done
    reader.stop()
    assert nbytes >= 14 * 512 and nbytes / seconds == pytest.approx(rate, rel=0.25)


def test_a_file_that_ends(file: DriveFile) -> None:
    cycle = cycle_of(file, [(0, 10), (len(CONTENT) - 5, 10)])
    reader = ReadAhead(lambda n: torch.empty(n, dtype=torch.uint8))
    reader.restart([], cycle, 0)
    bytes_of(reader, *cycle[0])
    for _ in range(2):  # it does not wait for a thread that has ended
        with pytest.raises(ChunkflowError, match=r"The file the file ends at byte 4096: load the model again"):
            Reading(reader, *cycle[1]).take()
    reader.stop()


def test_the_size_of_the_ring() -> None:
    assert ring_bytes([]) == 0 and ring_bytes([8, 8, 8, 8]) == 16 and ring_bytes([8] * 100) == 208
    assert ring_bytes([MOST_READ_AHEAD] * 100) == 2 * MOST_READ_AHEAD
    assert ring_bytes([2 * MOST_READ_AHEAD, 1]) == 4 * MOST_READ_AHEAD, "one is copied while the next is read"


def test_a_ring_that_is_large_enough_is_kept(file: DriveFile) -> None:
    sizes: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    reader, cycle = ReadAhead(allocate), cycle_of(file, [(0, 64)] * 8)
    for count in (8, 4, 8):
        reader.restart([], cycle[:count], 0)
        bytes_of(reader, *cycle[0])
    reader.stop()
    assert sizes == [128 + 64]


def test_an_error_of_any_kind_reaches_the_copy(file: DriveFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the copy would wait for ever."""
    told = os.fstat(file.descriptor.number)
    stamped = DriveFile(file.descriptor, "/nfs/file", ((told.st_dev, told.st_ino), told.st_mtime_ns))
    cycle = cycle_of(stamped, [(0, 64)])

    def stale(_: int) -> None:
        raise OSError(116, "Stale file handle")

    def broken(*_: object) -> None:
        raise KeyError("x")

    for change, said in (
        ((os, "fstat", stale), "/nfs/file cannot be looked at: Stale file handle. Check the drive"),
        ((stamped, "read", broken), "Reading ahead of the copies failed: KeyError: 'x'"),
    ):
        reader = ReadAhead(lambda n: torch.empty(n, dtype=torch.uint8))
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            reader.restart([], cycle, 0)
            found: list[object] = []

            def take(reader: ReadAhead = reader, found: list[object] = found) -> None:
                try:
                    found.append(Reading(reader, *cycle[0]).take())
                except ChunkflowError as error:
                    found.append(str(error))

            waits = threading.Thread(target=take, daemon=True)
            waits.start()
            waits.join(10)
        assert len(found) == 1 and str(found[0]).startswith(said), found
        reader.stop()
