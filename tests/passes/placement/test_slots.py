"""Slots never overlap while their chunks are alive, and the arena is not much larger than the chunks alive."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, groupby, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from chunkflow_compile.passes.placement.slots import Lifetime, LiveRange, assign_slots
from chunkflow_compile.passes.placement.windows import Chunk, fit_slots
from chunkflow_compile.passes.plan import ALIGNMENT, aligned


def whole(start: int, length: int, nbytes: int) -> Lifetime:
    return Lifetime((LiveRange(0, nbytes, start, length),))


def alive(piece: LiveRange, windows: int) -> set[int]:
    return {(piece.start + k) % windows for k in range(piece.length)}


def peak_bytes(lifetimes: list[Lifetime], windows: int) -> int:
    """The most bytes alive in one window, which is a lower bound of any packing."""
    ranges = [p for life in lifetimes for p in life.ranges]
    return max(sum(aligned(p.end) - p.begin for p in ranges if k in alive(p, windows)) for k in range(windows))


@st.composite
def lifetimes(draw: st.DrawFn) -> tuple[list[Lifetime], int]:
    windows = draw(st.integers(1, 12))
    arc = st.tuples(st.integers(0, windows - 1), st.integers(1, windows))
    lives = []
    for _ in range(draw(st.integers(0, 16))):
        arcs = draw(st.lists(arc, min_size=1, max_size=3))
        cuts = [k * ALIGNMENT * draw(st.integers(1, 4)) for k in range(len(arcs))]
        cuts = [sum(cuts[: k + 1]) for k in range(len(cuts))]
        ends = [*cuts[1:], cuts[-1] + draw(st.integers(1, 5000))]
        ranges = [LiveRange(a, b, *arc) for (a, b), arc in zip(zip(cuts, ends, strict=True), arcs, strict=True)]
        lives.append(Lifetime(tuple(ranges)))
    return lives, windows


@settings(max_examples=60)
@given(lifetimes())
def test_chunks_alive_together_never_share_bytes(case: tuple[list[Lifetime], int]) -> None:
    """And the arena is at least what is alive, and at most everything or what fewer tries take."""
    lives, windows = case
    offsets, arena = assign_slots(lives, windows)
    assert peak_bytes(lives, windows) <= arena <= sum(aligned(life.nbytes) for life in lives)
    assert assign_slots(list(lives), windows) == (offsets, arena)
    assert arena <= assign_slots(lives, windows, quick=True)[1]  # who has tried quickly has room for the result
    for life, at in zip(lives, offsets, strict=True):
        assert at % ALIGNMENT == 0
        assert at + life.nbytes <= arena
        assert all(a.end == b.begin for a, b in pairwise(life.ranges))
    check_apart(lives, offsets, windows)


def check_apart(lives: Sequence[Lifetime], offsets: Sequence[int], windows: int) -> None:
    for (a, at), (b, bt) in combinations(zip(lives, offsets, strict=True), 2):
        for p in a.ranges:
            for q in b.ranges:
                together = alive(p, windows) & alive(q, windows)
                assert not together or at + p.end <= bt + q.begin or bt + q.end <= at + p.begin


def test_equal_blocks_pack_without_loss() -> None:
    lives = [whole(k, 2, nbytes) for k in range(12) for nbytes in (1024, 4096, 512)]
    assert assign_slots(lives, 12)[1] == peak_bytes(lives, 12) == 2 * (1024 + 4096 + 512)


def test_bytes_of_chunks_that_come_late_are_lent_until_then() -> None:
    late = Lifetime((LiveRange(0, 256, 0, 4), LiveRange(256, 512, 2, 2)))
    assert assign_slots([late, whole(0, 2, 256)], 6)[1] == 512


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Chunk], list[int | None], int]:
    """Chunks in order of use, and the window that each wants, None for some."""
    count = draw(st.integers(1, 8))
    chunks, wanted = list[Chunk](), list[int | None]()
    for n, first in enumerate(sorted(draw(st.lists(st.integers(0, count - 1), max_size=12)))):
        last = draw(st.integers(first, min(first + 1, count - 1)))
        sizes = [1024] * draw(st.integers(0, 3)) + [draw(st.sampled_from([256, 768, 1024]))]
        chunks += [Chunk(f"w{n}", i, nbytes, 0.0, first, last) for i, nbytes in enumerate(sizes)]
        wanted += draw(
            st.lists(
                st.sampled_from([None, *range(last + 1 - count, first + 1)]), min_size=len(sizes), max_size=len(sizes)
            )
        )
    return chunks, wanted, count


@settings(max_examples=100)
@given(streams(), st.integers(0, 20_000))
def test_windows_that_follow_from_slots_keep_chunks_apart_within_the_limit(
    case: tuple[list[Chunk], list[int | None], int], limit: int
) -> None:
    chunks, wanted, count = case
    assert fit_slots(chunks, wanted, count, sum(c.nbytes for c in chunks)) is not None
    packed = fit_slots(chunks, wanted, count, limit)
    if packed is None:
        return
    lives, offsets, kept = list[Lifetime](), list[int](), 0
    for name, group in groupby(zip(chunks, wanted, packed[0], strict=True), key=lambda g: g[0].weight):
        ranges, streamed, stays = list[LiveRange](), False, 0
        for chunk, earliest, window in group:
            begin = 1024 * chunk.index
            if window is None or earliest is None:
                assert window is earliest
                ranges.append(LiveRange(begin, begin + chunk.nbytes, 0, count))
                stays += chunk.nbytes
                continue
            assert max(earliest, chunk.last + 1 - count) <= window <= chunk.first
            ranges.append(LiveRange(begin, begin + chunk.nbytes, window % count, chunk.last + 1 - window))
            streamed = True
        assert (name in packed[1]) == streamed
        if streamed:
            lives.append(Lifetime(tuple(ranges)))
            offsets.append(packed[1][name])
            kept += stays
    assert all(at % ALIGNMENT == 0 and at >= 0 for at in offsets)
    assert all(at + life.nbytes <= limit + kept for at, life in zip(offsets, lives, strict=True))
    check_apart(lives, offsets, count)
