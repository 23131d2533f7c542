"""Reading together: ranks as readers of one process, with a ring between them and copies of their own pace."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import WITHIN
from drive_ranks import EIGHT, Event, Rank, eventually, in_step, meet, ranks_of, unpinned
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ring import ring_bytes, room
from chunkflow_compile.runtime.read_ahead import ReadAhead
from chunkflow_compile.runtime.read_thread import ReadThread
from chunkflow_compile.weights import shared_ring
from chunkflow_compile.weights.shared_ring import RingMemory, SharedRing


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """Two ranks that read together."""
    with ranks_of(2, EIGHT) as found:
        meet(found)
        yield found


def calls(ranks: Sequence[Rank], count: int) -> None:
    """Calls of eight copies each."""
    for _ in range(count):
        in_step(ranks, lambda rank: (rank.copies(8), rank.call())[0])


@pytest.mark.parametrize("count", [2, 3])
def test_the_drive_is_read_once(count: int) -> None:
    with ranks_of(count, EIGHT) as ranks:
        meet(ranks)
        before = [rank.file.read_bytes for rank in ranks]
        for rank in ranks:
            rank.reader.settle()
        calls(ranks, 20)
        read = [rank.file.read_bytes - old for rank, old in zip(ranks, before, strict=True)]
        ring = ring_bytes([64] * 8) // room(64) * 64
        assert read[1:] == [0] * (count - 1) and 20 * 8 * 64 - ring <= read[0] <= 20 * 8 * 64 + ring
        said = [rank.reader.settle()[1] for rank in ranks]
        assert all(20 * 8 * 64 - ring <= nbytes <= 20 * 8 * 64 + ring for nbytes in said), "the same figures on all"


spans = st.lists(st.tuples(st.integers(0, 2048), st.integers(1, 2048)), min_size=1, max_size=10)
acts = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("alone"), st.integers(0, 1), st.integers(0, 9)),
        st.tuples(st.just("copies"), st.integers(1, 30), st.integers(0, 1)),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(spans, acts)
def test_every_copy_gets_its_bytes(spans: list[tuple[int, int]], acts: list[tuple[str, int, int]]) -> None:
    """Whatever the sizes, and whether ranks start together, or one of them alone."""
    size = len(spans)
    with pytest.MonkeyPatch.context() as patch, ranks_of(2, spans) as ranks:
        patch.setattr(shared_ring, "_LEAVING_S", 0.02)
        in_step(ranks, Rank.start)
        for kind, one, two in acts:
            if kind == "start":
                in_step(ranks, lambda rank, a=one, b=two: rank.start(a % (size + 1), b % size))
            elif kind == "alone":  # the other one goes on in its own order, in the same call

                def work(rank: Rank, who: int = one, begin: int = two % size) -> None:
                    if rank.number == who:
                        rank.start(0, begin)
                    else:
                        rank.call()

                in_step(ranks, work)
            else:
                in_step(ranks, lambda rank, a=one: (rank.call(), rank.copies(a))[0])


def test_a_slot_is_not_written_before_the_last_rank_has_copied(ranks: list[Rank]) -> None:
    first, other = ranks
    values, late = other.begin_copy()
    held, read = bytes(values.tolist()), first.file.read_bytes
    runs = threading.Thread(target=lambda: first.copies(24), daemon=True)
    runs.start()
    others = threading.Thread(target=lambda: other.copies(23), daemon=True)
    others.start()
    time.sleep(0.3)
    assert bytes(values.tolist()) == held and first.file.read_bytes - read <= 4 * 64
    assert runs.is_alive() and others.is_alive()
    late.reach()
    runs.join(WITHIN)
    others.join(WITHIN)
    assert not runs.is_alive() and not others.is_alive()


def test_a_reader_that_does_not_wait_shows_wrong_bytes(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: another rank sees the fault too."""

    def no_wait(thread: ReadThread, number: int, nbytes: int) -> object:
        return thread._filling.memory.bytes[: room(nbytes)]

    monkeypatch.setattr(ReadThread, "_room", no_wait)
    with pytest.raises(AssertionError):
        in_step(ranks, lambda rank: rank.copies(200))


def test_one_that_starts_alone_reads_alone_and_comes_back(ranks: list[Rank]) -> None:
    in_step(ranks, lambda rank: rank.start(3, 2, plan="its own") if rank.number else rank.call())
    calls(ranks, 3)
    assert ranks[1].alone, "another plan"
    before = ranks[1].file.read_bytes
    in_step(ranks, lambda rank: rank.start(2, 5))
    meet(ranks, start=False)
    assert ranks[1].file.read_bytes > before
    # the first one alone, as after a write: the place of its copies is another, until both start again
    in_step(ranks, lambda rank: rank.call() if rank.number else rank.start(0, (rank.place + 1) % 8))
    in_step(ranks, lambda rank: rank.copies(20))
    assert ranks[1].alone
    in_step(ranks, Rank.start)
    meet(ranks, start=False)


def test_one_that_starts_again_at_the_same_place_comes_back(ranks: list[Rank]) -> None:
    """By other numbers than those of the first rank, and by other first reads; not under another plan."""
    for who in (1, 0):
        for first in (0, 3):
            in_step(ranks, lambda rank, w=who, f=first: rank.start(f, rank.place) if rank.number == w else rank.call())
            meet(ranks, start=False)
            in_step(ranks, lambda rank: rank.copies(30))
    in_step(ranks, lambda rank: rank.start(0, rank.place, plan=str(rank.number)))
    calls(ranks, 5)
    assert ranks[1].alone


def test_no_rank_waits_for_one_that_is_late() -> None:
    """The first rank is many calls ahead: each one reads alone until they are in the same call again."""
    with ranks_of(2, EIGHT) as ranks:
        first, other = ranks
        for _ in range(3):
            in_step([first], lambda rank: (rank.start(), rank.copies(24))[0])
        for _ in range(3):
            in_step([other], lambda rank: (rank.start(), rank.copies(24))[0])
        meet(ranks, start=False)


def test_a_failed_call_waits_for_nobody(ranks: list[Rank]) -> None:
    first, other = ranks
    first.reader.alone()
    in_step([first], lambda rank: rank.copies(40))
    in_step([other], lambda rank: rank.copies(40))
    assert other.alone
    in_step(ranks, Rank.start)
    meet(ranks, start=False)
    other.reader.alone()
    in_step([other], lambda rank: rank.copies(40))
    assert other.alone
    in_step([first], lambda rank: rank.copies(40))


def test_a_rank_that_is_stuck_is_waited_for_as_long_as_by_a_collective(caplog: pytest.LogCaptureFixture) -> None:
    with ranks_of(2, EIGHT) as ranks:
        for rank in ranks:
            rank.ring.seconds = 0.3
        meet(ranks)
        first, other = ranks
        in_step([first], lambda rank: rank.copies(40))
        assert "another rank has copied nothing from the drive for too long" in caplog.text
        in_step([other], lambda rank: rank.copies(40))
        assert other.alone
        in_step(ranks, Rank.start)
        meet(ranks, start=False)
        in_step([other], lambda rank: rank.copies(40))
        assert "the first rank has read nothing from the drive for too long" in caplog.text
        in_step([first], lambda rank: rank.copies(40))


def test_a_drive_that_fails_ends_the_first_rank_and_not_the_others(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = ranks

    def fails(*_: object) -> None:
        raise ChunkflowError("the file cannot be read at byte 7")

    monkeypatch.setattr(first.file, "read", fails)

    def work(rank: Rank) -> None:
        if rank is other:
            rank.copies(40)
            return
        with pytest.raises(ChunkflowError, match="byte 7"):
            rank.copies(40)
        rank.reader.stop()

    in_step(ranks, work)
    assert other.alone


def test_the_ring_is_pinned_once_on_each_rank_and_goes_with_the_readers() -> None:
    pinned: list[int] = []

    def pin(pages: torch.Tensor) -> Callable[[], None]:
        pinned.append(1)
        return lambda: pinned.append(-1)

    with ranks_of(2, EIGHT, pin) as ranks:
        meet(ranks)
        eventually(lambda: sum(pinned) == 2)  # the ring that the other rank began with is gone
        for _ in range(3):
            in_step(ranks, Rank.start)
            meet(ranks, start=False)
        eventually(lambda: sum(pinned) == 2)
        assert len(pinned) == 2 + 2 * 4, "the common ring stays; one of its own for each start of the other rank"
    assert sum(pinned) == 0


def test_a_ring_that_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with ranks_of(2, EIGHT) as ranks:
        mapped = SharedRing._mapped

        def refused(ring: SharedRing, which: int, nbytes: int, pin: Any) -> RingMemory:
            if not ring.leads:
                raise ChunkflowError("A ring of 9 bytes cannot be mapped: Cannot allocate memory.")
            return mapped(ring, which, nbytes, pin)

        monkeypatch.setattr(SharedRing, "_mapped", refused)
        in_step(ranks, Rank.start)
        calls(ranks, 4)
        assert ranks[1].alone and "this rank reads the drive for itself: A ring of 9 bytes cannot" in caplog.text


def test_another_reader_of_the_same_weights_reads_alone(ranks: list[Rank]) -> None:
    second = Rank(0, ranks[0].ring, "/dev/null", EIGHT, unpinned)
    second.file = ranks[0].file
    second.cycle = ranks[0].cycle
    second.start()
    second.copies(20)
    in_step(ranks, lambda rank: rank.copies(20))
    assert not ranks[1].alone
    second.reader.close()


def test_readers_come_and_go() -> None:
    """An arena that is freed has another reader when it is made again, with the same ring."""
    with ranks_of(2, EIGHT) as ranks:
        for _ in range(3):
            meet(ranks)
            for rank in ranks:
                before, rank.reader = rank.reader, ReadAhead(unpinned)
                before.close()
                rank.place = 0
                rank.kept = before  # type: ignore[attr-defined]  # the collector has not come to it


def test_readers_that_are_dropped_end_their_threads() -> None:
    """A model may be dropped without restore; what it leaves is looked for at the end of ``ranks_of``."""
    with ranks_of(2, EIGHT) as ranks:
        meet(ranks)
        for rank in ranks:
            rank.reader = ReadAhead(unpinned)
        gc.collect()


def test_copies_that_are_still_out_do_not_hold_up_a_start(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank starts anew, and the other one still copies out of the ring: it gets another ring."""
    monkeypatch.setattr(shared_ring, "_LEAVING_S", 0.1)
    first, other = ranks
    values, late = other.begin_copy()
    held = bytes(values.tolist())
    in_step([first], lambda rank: (rank.start(), rank.copies(30))[0])
    assert bytes(values.tolist()) == held
    late.reach()
    in_step([other], lambda rank: rank.copies(30))
    assert other.alone


def test_random_paces() -> None:
    """Copies that end late on either rank, over several starts."""
    dice = random.Random(0)
    sizes = [(dice.randrange(2048), dice.randrange(1, 2048)) for _ in range(12)]
    with ranks_of(3, sizes) as ranks:
        for start in range(3):

            def work(rank: Rank, seed: int = start) -> None:
                counts, mine = random.Random(seed), random.Random(10 * seed + rank.number)
                rank.start(seed, seed)
                for _ in range(40):
                    for _ in range(counts.randrange(12)):
                        end = rank.copy(rank.cycle[rank.place], Event())
                        rank.place = (rank.place + 1) % 12
                        threading.Timer(mine.random() / 500, end).start()
                    rank.call()

            in_step(ranks, work)
        assert not any(rank.torn for rank in ranks)
