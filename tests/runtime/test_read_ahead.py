"""Reading the drive ahead of the copies: in their order, through a ring, whatever the sizes."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import OwnClock
from conftest import WITHIN
from hypothesis import given
from hypothesis import strategies as st

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ring import BLOCK, MOST_READ_AHEAD, Ring, RingSlot, ring_bytes, room
from chunkflow_compile.runtime import read_ahead
from chunkflow_compile.runtime.read_ahead import ReadAhead, Reading, ReadOrder
from chunkflow_compile.weights.limits import HostMemory
from chunkflow_compile.weights.mapping import Descriptor
from chunkflow_compile.weights.source import DriveBytes, WeightFile

CONTENT = random.Random(0).randbytes(4096)


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


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def file() -> Iterator[WeightFile]:
    with tempfile.TemporaryFile() as made:
        made.write(CONTENT)
        made.flush()
        yield WeightFile(Descriptor(os.dup(made.fileno())), "the file")


def bytes_of(reader: ReadAhead, source: DriveBytes, event: Event | None = None) -> bytes:
    reading = Reading(reader, source)
    values, _ = reading.acquire()
    assert values.numel() == reading.numel()
    found = bytes(values.tolist())
    reading.release(event)
    if event is not None:
        event.reach()
    return found


def error_of(work: Callable[[], object]) -> str:
    """The error that ends some work, which might wait for ever instead."""
    said: list[str] = []

    def run() -> None:
        try:
            work()
        except ChunkflowError as error:
            said.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WITHIN)
    assert said, "it ended well, or waits"
    return said[0]


@given(st.lists(st.tuples(st.integers(0, 2048), st.integers(1, 2048)), min_size=1, max_size=12), st.data())
def test_every_copy_gets_its_bytes(file: WeightFile, spans: list[tuple[int, int]], data: st.DataObject) -> None:
    """Over several rounds, from any begin, with resets in the middle, whether room comes back at once or by events, and
    whether memory is short, so that the page cache is left as it is."""
    cycle = cycle_of(file, spans)
    reader, patch = ReadAhead(unpinned), pytest.MonkeyPatch()
    patch.setattr(read_ahead, "host_memory", lambda: HostMemory(1 << 40, data.draw(st.sampled_from([0, 1 << 40]))))
    try:
        for _ in range(3):
            begin = data.draw(st.integers(0, len(cycle) - 1))
            first = cycle[: data.draw(st.integers(0, len(cycle)))]
            reader.reset(ReadOrder(first, cycle, begin))
            expected = [*first, *cycle[begin:], *cycle, *cycle]
            for source in expected[: data.draw(st.integers(0, len(expected)))]:
                event = Event() if data.draw(st.booleans()) else None
                assert bytes_of(reader, source, event) == CONTENT[source.offset : source.offset + source.nbytes]
    finally:
        reader.stop()
        patch.undo()
    assert not [t for t in threading.enumerate() if t.name == "chunkflow-read-ahead"]


def in_the_page_cache(number: int, nbytes: int) -> int:
    """Pages of a file there, from its beginning on."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    libc.mincore.argtypes = libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    there, found = libc.mmap(None, nbytes, 1, 1, number, 0), (ctypes.c_ubyte * (nbytes // 4096))()
    assert libc.mincore(there, nbytes, found) == 0
    libc.munmap(there, nbytes, None)
    return sum(entry & 1 for entry in found)


@pytest.mark.parametrize("short", [True, False])
def test_where_memory_is_short_the_page_cache_stays_as_it_is(
    short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight begins at any byte, and the last one ends with the file, in the middle of a block."""
    nbytes, content = 1 << 20, random.Random(1).randbytes((1 << 20) + 1234)
    path = tmp_path / "weights"
    path.write_bytes(content)
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    file = WeightFile(Descriptor(number), "the file")
    if in_the_page_cache(number, nbytes) or file._direct is None:
        pytest.skip("the folder for temporary files is on no drive")
    spans = [(2240, 300_000), (302_240, 400_001), (702_241, len(content) - 702_241)]
    monkeypatch.setattr(read_ahead, "host_memory", lambda: HostMemory(1 << 40, (1 << 19) if short else 1 << 40))
    cycle, reader = cycle_of(file, spans), ReadAhead(unpinned)
    reader.reset(ReadOrder([], cycle, 0))
    for item, (begin, size) in zip([*cycle, *cycle], [*spans, *spans], strict=True):
        assert bytes_of(reader, item) == content[begin : begin + size]
    reader.stop()
    assert (in_the_page_cache(number, nbytes) == 0) == short


def test_a_file_system_that_has_no_such_reads(file: WeightFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so when the file is opened, or in the first read."""
    plain_open, plain_read = os.open, os.preadv
    refused: list[str] = []

    def no_open(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append("open")
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_open(path, flags, *rest)

    def no_read(number: int, *rest: Any) -> int:
        if number != file.descriptor.number:
            refused.append("read")
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_read(number, *rest)

    monkeypatch.setattr(read_ahead, "host_memory", lambda: HostMemory(1 << 40, 0))
    for name, change in (("open", no_open), ("preadv", no_read)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, change)
            again = WeightFile(file.descriptor, "the file")
            cycle, reader = cycle_of(again, [(5, 50), (99, 1000)]), ReadAhead(unpinned)
            reader.reset(ReadOrder([], cycle, 0))
            for item in [*cycle, *cycle]:
                bytes_of(reader, item)
            reader.stop()
    assert refused == ["open", "read"], "asked once for each file"


def test_it_reads_ahead_as_far_as_the_ring_goes(file: WeightFile) -> None:
    cycle = cycle_of(file, [(64 * i, 64) for i in range(16)])
    reader, before = ReadAhead(unpinned), file.read_bytes
    reader.reset(ReadOrder([], cycle, 0))
    (bytes_of(reader, cycle[0]), bytes_of(reader, cycle[1]))
    eventually(lambda: file.read_bytes - before >= 6 * 64)
    reader.stop()
    assert 6 * 64 <= file.read_bytes - before <= (2 + 5) * 64, "a quarter of the step, and room for one more"


def test_a_slot_is_not_written_before_its_copy_has_ended(file: WeightFile) -> None:
    """The copies after it have ended; its own event has not come to pass."""
    cycle = cycle_of(file, [(64 * i, 64) for i in range(16)])
    reader, before, late = ReadAhead(unpinned), file.read_bytes, Event()
    reader.reset(ReadOrder([], cycle, 0))
    slow = Reading(reader, cycle[0])
    values, _ = slow.acquire()
    slow.release(late)
    for reading in cycle[1:4]:
        bytes_of(reader, reading)
    eventually(lambda: file.read_bytes - before == 5 * 64)
    threading.Event().wait(0.1)
    assert bytes(values.tolist()) == CONTENT[:64] and file.read_bytes - before == 5 * 64, "the ring is full"
    late.reach()
    for i, reading in enumerate([*cycle[4:], *cycle]):
        at = 64 * ((i + 4) % 16)
        assert bytes_of(reader, reading) == CONTENT[at : at + 64]
    assert bytes(values.tolist()) != CONTENT[:64], "the slot is in use again"
    reader.stop()


def test_a_device_that_fails_ends_the_wait_for_bytes(file: WeightFile) -> None:
    class Failed:
        def synchronize(self) -> None:
            raise RuntimeError("unspecified launch failure")

    cycle = cycle_of(file, [(64 * i, 64) for i in range(16)])
    reader = ReadAhead(unpinned)
    reader.reset(ReadOrder([], cycle, 0))

    def take_all() -> None:
        for source in cycle:
            reading = Reading(reader, source)
            reading.acquire()
            reading.release(Failed())

    assert error_of(take_all) == "The GPU failed: unspecified launch failure"
    reader.stop()


class NeverWaits(Ring):
    def slot(self, nbytes: int) -> RingSlot:
        return replace(super().slot(nbytes), after=0)


def test_a_ring_that_does_not_wait_shows_wrong_bytes(file: WeightFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the verifier refuses (tests/passes/program/test_reads.py) is one that a copy would see."""
    monkeypatch.setattr(read_ahead, "Ring", NeverWaits)
    cycle, before = cycle_of(file, [(64 * i, 64) for i in range(16)]), file.read_bytes
    reader = ReadAhead(unpinned)
    reader.reset(ReadOrder(cycle[:1], cycle[1:], 0))  # the first is not read again, however far the reader gets
    values, _ = Reading(reader, cycle[0]).acquire()
    eventually(lambda: file.read_bytes - before >= 7 * 64)
    reader.stop()
    assert bytes(values.tolist()) != CONTENT[:64]


def test_a_copy_out_of_order_reads_by_itself(file: WeightFile) -> None:
    cycle = cycle_of(file, [(0, 10), (10, 20), (30, 30)])
    reader = ReadAhead(unpinned)
    assert bytes_of(reader, cycle[1]) == CONTENT[10:30], "before the first reset"
    reader.reset(ReadOrder([], cycle, 0))
    assert bytes_of(reader, cycle[2]) == CONTENT[30:60]
    assert bytes_of(reader, cycle[0]) == CONTENT[:10]
    assert bytes_of(reader, cycle[1]) == CONTENT[10:30]
    reader.stop()


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.long), 10])
def test_a_slow_drive_is_named_once(file: WeightFile, times: int, caplog: pytest.LogCaptureFixture) -> None:
    cycle = cycle_of(file, [(512 * i, 512) for i in range(8)])
    reader = ReadAhead(unpinned, rate=4000, clock=OwnClock().host)
    reader.reset(ReadOrder([], cycle, 0), expected=4000 * times)
    seconds = nbytes = 0.0
    with caplog.at_level(logging.WARNING, "chunkflow_compile"):
        for reading in [*cycle, *cycle]:
            bytes_of(reader, reading)
            took, done = reader.settle()
            seconds, nbytes = seconds + took, nbytes + done
    reader.stop()
    assert nbytes >= 16 * 512 and nbytes / seconds == pytest.approx(4000)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == (times == 10) and all("the file is read at 0.00" in s for s in said)


def test_an_emulated_drive_takes_its_time_after_a_pause(file: WeightFile) -> None:
    """A ring that is full stops the drive; what it reads after that takes as long as before."""
    cycle, rate, clock = cycle_of(file, [(512 * i, 512) for i in range(8)]), 20_000, OwnClock()
    reader, full = ReadAhead(unpinned, rate=rate, clock=clock.host), 512 * (ring_bytes([512] * 8) // room(512))
    reader.reset(ReadOrder([], cycle, 0))
    seconds = nbytes = 0.0

    def has_read(due: int) -> bool:
        nonlocal seconds, nbytes
        took, done = reader.settle()
        seconds, nbytes = seconds + took, nbytes + done
        return nbytes == due

    for i, reading in enumerate([*cycle, *cycle]):
        eventually(lambda i=i: has_read(full + 512 * i))  # type: ignore[misc]
        clock.sleep(2 * 512 / rate)  # the copies are slower than the drive
        bytes_of(reader, reading)
    reader.stop()
    assert nbytes >= 14 * 512 and nbytes / seconds == pytest.approx(rate)


def test_a_file_that_ends(file: WeightFile) -> None:
    cycle = cycle_of(file, [(0, 10), (len(CONTENT) - 5, 10)])
    reader = ReadAhead(unpinned)
    reader.reset(ReadOrder([], cycle, 0))
    bytes_of(reader, cycle[0])
    for _ in range(2):  # it does not wait for a thread that has ended
        with pytest.raises(ChunkflowError, match=r"The file ends at byte 4096: load the model again"):
            Reading(reader, cycle[1]).acquire()
    reader.stop()


def test_a_part_of_the_bytes_of_a_weight(file: WeightFile) -> None:
    """As a part of a tensor: a prefetch may begin with any chunk."""
    weight, content = DriveBytes(file, 100, 1000), CONTENT[100:1100]
    for part in (slice(0, 300), slice(300, 700), slice(700, 2000), slice(2000, 3000)):
        assert bytes(weight[part].read_all().tolist()) == content[part]


def test_a_reader_whose_thread_cannot_start(file: WeightFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies read by themselves, and the next order has a thread again."""

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    cycle, reader = cycle_of(file, [(64 * i, 64) for i in range(4)]), ReadAhead(unpinned)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
        patch.setattr(threading.Thread, "start", no_thread)
        reader.reset(ReadOrder([], cycle, 0))
    assert bytes_of(reader, cycle[2]) == CONTENT[128:192]
    reader.reset(ReadOrder([], cycle, 0))
    assert bytes_of(reader, cycle[0]) == CONTENT[:64]
    reader.close()


def test_a_reader_that_is_dropped_ends_its_thread(file: WeightFile) -> None:
    """A model may be dropped without restore."""
    reader = ReadAhead(unpinned)
    reader.reset(ReadOrder([], cycle_of(file, [(0, 64)]), 0))
    del reader
    gc.collect()
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "chunkflow-read-ahead"])


def test_the_size_of_the_ring() -> None:
    eight = room(8)
    assert eight == 2 * BLOCK and room(BLOCK) == 2 * BLOCK and room(BLOCK + 1) == 3 * BLOCK
    assert ring_bytes([]) == 0 and ring_bytes([8, 8, 8, 8]) == 2 * eight and ring_bytes([8] * 100) == 26 * eight
    assert ring_bytes([MOST_READ_AHEAD] * 100) == 2 * room(MOST_READ_AHEAD)
    assert ring_bytes([2 * MOST_READ_AHEAD, 1]) == 2 * room(2 * MOST_READ_AHEAD), "one is copied while the next is read"


def test_a_ring_that_is_large_enough_is_kept(file: WeightFile) -> None:
    pinned: list[int] = []

    def pin(pages: torch.Tensor) -> Callable[[], None]:
        pinned.append(pages.numel())
        return lambda: pinned.append(-pages.numel())

    reader, cycle = ReadAhead(pin), cycle_of(file, [(0, 64)] * 8)
    for count in (8, 4, 8):
        reader.reset(ReadOrder([], cycle[:count], 0))
        bytes_of(reader, cycle[0])
    assert pinned == [3 * room(64)]
    reader.close()
    assert pinned == [3 * room(64), -3 * room(64)], "the memory is unpinned before it goes"


def test_an_error_of_any_kind_reaches_the_copy(file: WeightFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the copy would wait for ever."""
    told = os.fstat(file.descriptor.number)
    stamped = WeightFile(file.descriptor, "/nfs/file", ((told.st_dev, told.st_ino), told.st_mtime_ns))
    cycle = cycle_of(stamped, [(0, 64)])

    def stale(_: int) -> None:
        raise OSError(116, "Stale file handle")

    def broken(*_: object) -> None:
        raise KeyError("x")

    for change, said in (
        ((os, "fstat", stale), "/nfs/file cannot be looked at: Stale file handle. Check the drive"),
        ((stamped, "read", broken), "Reading ahead of the copies failed: KeyError: 'x'"),
    ):
        reader = ReadAhead(unpinned)
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            reader.reset(ReadOrder([], cycle, 0))
            assert error_of(lambda reader=reader: Reading(reader, cycle[0]).acquire()).startswith(said)
        reader.stop()
