"""Reading the drive into the ring, and copying out of it."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import OwnClock
from hypothesis import given
from hypothesis import strategies as st

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ring import ring_slots, slot_bytes
from chunkflow_compile.runtime import read_ahead
from chunkflow_compile.runtime.read_ahead import DriveReader, InRing
from chunkflow_compile.weights.limits import HostMemory
from chunkflow_compile.weights.mapping import Descriptor
from chunkflow_compile.weights.source import DriveBytes, WeightFile

CONTENT = random.Random(0).randbytes(4096)
# The bytes of the ring in tests where its size does not matter.
RING = 1 << 20


def unpinned(_: torch.Tensor) -> Callable[[], None]:
    return lambda: None


def cycle_of(file: WeightFile, spans: Sequence[tuple[int, int]]) -> list[DriveBytes]:
    return [DriveBytes(file, begin, size) for begin, size in spans]


@pytest.fixture(scope="module")
def file() -> Iterator[WeightFile]:
    with tempfile.TemporaryFile() as made:
        made.write(CONTENT)
        made.flush()
        yield WeightFile(Descriptor(os.dup(made.fileno())), "the file")


def bytes_of(reader: DriveReader, source: DriveBytes, begin: int = 0, ring_bytes: int = RING) -> bytes:
    reader.read(source, begin, ring_bytes)
    return taken(InRing(reader, source, begin))


def taken(source: InRing) -> bytes:
    values = source.values()
    assert values.numel() == source.numel()
    return bytes(values.tolist())


@given(st.lists(st.tuples(st.integers(0, 2048), st.integers(1, 2048)), min_size=1, max_size=12), st.booleans())
def test_every_copy_gets_its_bytes(file: WeightFile, spans: list[tuple[int, int]], short: bool) -> None:
    """Each read as early as it may be, over several steps, and whether memory is short, so that the page cache is left as it
    is."""
    step, reader, patch = cycle_of(file, spans), DriveReader(unpinned), pytest.MonkeyPatch()
    slots, count = ring_slots([size for _, size in spans]), len(spans)
    ring_bytes = max(slot.end for slot in slots)
    patch.setattr(read_ahead, "host_memory", lambda: HostMemory(1 << 40, 0 if short else 1 << 40))
    reader.expect(1, None)
    patch.undo()
    issued = 0
    for copied in range(-1, 3 * count):
        if copied >= 0:
            source = InRing(reader, step[copied % count], slots[copied % count].begin)
            assert issued > copied and taken(source) == CONTENT[source.source.offset :][: source.numel()]
        while issued - issued % count + slots[issued % count].after <= copied:
            reader.read(step[issued % count], slots[issued % count].begin, ring_bytes)
            issued += 1


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
    cycle, reader = cycle_of(file, spans), DriveReader(unpinned)
    reader.expect(nbytes, None)
    for item, (begin, size) in zip([*cycle, *cycle], [*spans, *spans], strict=True):
        assert bytes_of(reader, item) == content[begin : begin + size]
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
            cycle, reader = cycle_of(again, [(5, 50), (99, 1000)]), DriveReader(unpinned)
            reader.expect(1100, None)
            for item in [*cycle, *cycle]:
                assert bytes_of(reader, item) == CONTENT[item.offset : item.offset + item.nbytes]
    assert refused == ["open", "read"], "asked once for each file"


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.long), 10])
def test_a_slow_drive_is_named_once(file: WeightFile, times: int, caplog: pytest.LogCaptureFixture) -> None:
    cycle = cycle_of(file, [(512 * i, 512) for i in range(8)])
    reader = DriveReader(unpinned, rate=4000, clock=OwnClock().host)
    reader.expect(4096, 4000 * times)
    seconds = nbytes = 0.0
    with caplog.at_level(logging.WARNING, "chunkflow_compile"):
        for source in [*cycle, *cycle]:
            bytes_of(reader, source)
            took, done = reader.collect()
            seconds, nbytes = seconds + took, nbytes + done
    assert nbytes == 16 * 512 and nbytes / seconds == pytest.approx(4000)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == (times == 10) and all("the file is read at 0.00" in s for s in said)


def test_an_emulated_drive_takes_its_time_after_a_pause(file: WeightFile) -> None:
    """A ring that is full stops the drive; what it reads after that takes as long as before."""
    cycle, rate, clock = cycle_of(file, [(512 * i, 512) for i in range(8)]), 20_000, OwnClock()
    reader = DriveReader(unpinned, rate=rate, clock=clock.host)
    for source in [*cycle, *cycle]:
        bytes_of(reader, source)
        clock.sleep(2 * 512 / rate)  # the copies are slower than the drive
    seconds, nbytes = reader.collect()
    assert nbytes == 16 * 512 and nbytes / seconds == pytest.approx(rate)


def test_a_file_that_ends(file: WeightFile) -> None:
    cycle = cycle_of(file, [(0, 10), (len(CONTENT) - 5, 10)])
    reader = DriveReader(unpinned)
    bytes_of(reader, cycle[0])
    for _ in range(2):
        with pytest.raises(ChunkflowError, match=r"The file ends at byte 4096: load the model again"):
            bytes_of(reader, cycle[1])


def test_a_part_of_the_bytes_of_a_weight(file: WeightFile) -> None:
    """As a part of a tensor: a prefetch may begin with any chunk."""
    weight, content = DriveBytes(file, 100, 1000), CONTENT[100:1100]
    for part in (slice(0, 300), slice(300, 700), slice(700, 2000), slice(2000, 3000)):
        assert bytes(weight[part].read_all().tolist()) == content[part]


def test_a_ring_that_is_large_enough_is_kept(file: WeightFile) -> None:
    pinned: list[int] = []

    def pin(pages: torch.Tensor) -> Callable[[], None]:
        pinned.append(pages.numel())
        return lambda: pinned.append(-pages.numel())

    reader, source = DriveReader(pin), DriveBytes(file, 0, 64)
    for rooms in (3, 2, 3):
        bytes_of(reader, source, 0, rooms * slot_bytes(64))
    assert pinned == [3 * slot_bytes(64)]
    reader.close()
    assert pinned == [3 * slot_bytes(64), -3 * slot_bytes(64)], "the memory is unpinned before it goes"


def test_an_error_of_any_kind_is_ours(file: WeightFile, monkeypatch: pytest.MonkeyPatch) -> None:
    told = os.fstat(file.descriptor.number)
    stamped = WeightFile(file.descriptor, "/nfs/file", ((told.st_dev, told.st_ino), told.st_mtime_ns))

    def stale(_: int) -> None:
        raise OSError(116, "Stale file handle")

    def broken(*_: object) -> None:
        raise KeyError("x")

    for change, said in (
        ((os, "fstat", stale), "/nfs/file cannot be looked at: Stale file handle. Check the drive"),
        ((stamped, "read", broken), "Reading ahead of the copies failed: KeyError: 'x'"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ChunkflowError, match=said):
            patch.setattr(*change)
            bytes_of(DriveReader(unpinned), DriveBytes(stamped, 0, 64))
