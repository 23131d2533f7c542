"""Slots: assigns each streamed weight an offset in the arena.

A step is treated as a circle of windows, because its last windows prefetch the first weights of the next step.  The chunks of
a weight may be copied in different windows.  Consecutive chunks with the same window are live in the same arc of the circle,
their *live range*.  Two live ranges must not share bytes in the same window.  :func:`assign_slots` looks for the
smallest arena: it tries first fit in several orders, and then a ring buffer.  Of several equally small arenas, it takes the
first one that it finds, so equal inputs give equal results.  :class:`ArenaSpace` assigns slots in an arena of given size,
before windows are chosen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chunkflow_compile.passes.plan import ALIGNMENT, aligned

# The maximum number of pairs of live ranges to compare for one order of the weights.  With 500 live ranges, this limit
# permits a dozen rounds of first fit, which take a few tenths of a second.
_MOST_WORK = 3_000_000
_MOST_ROUNDS = 40
# Sizes of a ring buffer are tried from the peak of live bytes upward, in steps of 1 %.  For each size, the order of the
# weights in the ring buffer is rotated _RING_TURNS times.
_RING_SIZES = 100
_RING_TURNS = 8
# Placed live ranges are indexed by spans of 16 windows; _SPAN is the bit mask of a span.  A live range in more than
# _MANY_SPANS spans is compared with all others.
_SPAN = (1 << 16) - 1
_MANY_SPANS = 6
_LEAST_ROUNDS = 2


# The offset of each weight, and the size of the arena.
_Layout = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class LiveRange:
    """Bytes ``[begin, end)`` of a weight.  These bytes are live in ``length`` windows, beginning with window ``start`` and
    continuing at window 0 after the last window."""

    begin: int
    end: int
    start: int
    length: int


@dataclass(frozen=True)
class Lifetime:
    """The live ranges of one weight, in ascending order and without gaps."""

    ranges: tuple[LiveRange, ...]

    @property
    def nbytes(self) -> int:
        return self.ranges[-1].end

    @property
    def start(self) -> int:
        return self.ranges[0].start

    @property
    def length(self) -> int:
        return max(p.length for p in self.ranges)


def assign_slots(lifetimes: Sequence[Lifetime], windows: int, quick: bool = False) -> tuple[tuple[int, ...], int]:
    """Return the offset of each weight in bytes (multiples of 256), and the size of the arena.

    ``lifetimes``: one per weight.  ``windows``: number of windows per step.  ``quick``: whether to make only few tries, for a
    caller that calls this function hundreds of times.
    """
    if not lifetimes:
        return (), 0
    masks = [[_mask(p, windows) for p in life.ranges] for life in lifetimes]
    resident = [any(p.length >= windows for p in life.ranges) for life in lifetimes]
    orders: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda i: (not resident[i], lifetimes[i].start, -lifetimes[i].nbytes, i),
        lambda i: (not resident[i], -lifetimes[i].nbytes, lifetimes[i].start, i),
    )
    least = _most_alive(lifetimes, windows)
    ranges = sum(len(life.ranges) for life in lifetimes)
    rounds = _LEAST_ROUNDS if quick else max(_LEAST_ROUNDS, min(_MOST_ROUNDS, _MOST_WORK // ranges**2))
    layouts = [_lifted(lifetimes, masks, sorted(range(len(lifetimes)), key=o), least, rounds) for o in orders]
    best = min(layouts, key=lambda layout: layout[1])
    for turns in (
        (_LEAST_ROUNDS,) if quick else (_LEAST_ROUNDS, _RING_TURNS)
    ):  # the tries that ``quick`` makes come first, so that the result without ``quick`` is never worse
        best = _ring(lifetimes, masks, windows, least, best, turns)
    return best


def _lifted(
    lifetimes: Sequence[Lifetime], masks: Sequence[Sequence[int]], order: Sequence[int], least: int, rounds: int
) -> _Layout:
    """Run several rounds of first fit, and return the layout with the smallest arena.  Each round places those weights first
    that were at the top of the arena in the previous round."""
    best: _Layout | None = None
    for _ in range(rounds):
        offsets, arena = _first_fit(lifetimes, masks, order)
        if best is None or arena < best[1]:
            best = offsets, arena
        if arena == least:
            break
        top = [i for i in order if offsets[i] + aligned(lifetimes[i].nbytes) == arena]
        order = [*top, *(i for i in order if i not in top)]
    assert best is not None
    return best


def _ring(
    lifetimes: Sequence[Lifetime], masks: Sequence[Sequence[int]], windows: int, least: int, best: _Layout, turns: int
) -> _Layout:
    """Place the weights one after the other in a ring buffer, and return the smallest arena in which this succeeds, or
    ``best`` if no such arena is smaller.  Partly resident weights are placed below the ring buffer."""
    stay = [i for i, life in enumerate(lifetimes) if any(p.length >= windows for p in life.ranges)]
    offsets, base = [0] * len(lifetimes), 0
    for i in stay:
        offsets[i], base = base, base + aligned(lifetimes[i].nbytes)
    ends = {i: (life.start + life.ranges[0].length) % windows for i, life in enumerate(lifetimes)}
    order = sorted(set(range(len(lifetimes))) - set(stay), key=lambda i: (ends[i], i))
    step = aligned(max(least // _RING_SIZES, ALIGNMENT))
    sizes = [aligned(life.nbytes) for life in lifetimes]
    for size in range(max(least - base, step), best[1] - base + step, step):
        for turn in range(0, len(order), max(1, -(-len(order) // turns))):
            turned, position = [*order[turn:], *order[:turn]], 0
            for i in turned:
                if position + sizes[i] > size:
                    position = 0
                offsets[i], position = base + position, position + sizes[i]
            end = max(o + n for o, n in zip(offsets, sizes, strict=True))
            if end < best[1] and _disjoint(lifetimes, masks, offsets):
                return tuple(offsets), end
    return best


def _disjoint(lifetimes: Sequence[Lifetime], masks: Sequence[Sequence[int]], offsets: Sequence[int]) -> bool:
    """Return whether no two live ranges share bytes in the same window.  ``masks``: for each live range, a bit mask of its
    windows."""
    ranges = sorted(
        (offset + part.begin, offset + aligned(part.end), mask)
        for offset, life, mine in zip(offsets, lifetimes, masks, strict=True)
        for part, mask in zip(life.ranges, mine, strict=True)
    )
    present: list[tuple[int, int]] = []
    for begin, end, mask in ranges:
        present = [(e, m) for e, m in present if e > begin]
        if any(m & mask for _, m in present):
            return False
        present.append((end, mask))
    return True


def _most_alive(lifetimes: Sequence[Lifetime], windows: int) -> int:
    """Return the maximum, over all windows, of live bytes.  No arena can be smaller."""
    alive = [0] * windows
    for life in lifetimes:
        for part in life.ranges:
            for k in range(min(part.length, windows)):
                alive[(part.start + k) % windows] += aligned(part.end) - part.begin
    return max(alive)


def _first_fit(lifetimes: Sequence[Lifetime], masks: Sequence[Sequence[int]], order: Sequence[int]) -> _Layout:
    offsets = [0] * len(lifetimes)
    placed = _PlacedRanges()
    arena = 0
    for i in order:
        life = lifetimes[i]
        forbidden = [  # open intervals of offsets at which a live range would share bytes with a placed one
            (begin - aligned(part.end), end - part.begin)
            for part, mask in zip(life.ranges, masks[i], strict=True)
            for windows, begin, end in placed.near(mask)
            if windows & mask
        ]
        offset = 0
        for low, high in sorted(forbidden):
            if low < offset < high:
                offset = high
        offsets[i] = offset
        arena = max(arena, offset + aligned(life.nbytes))
        for part, mask in zip(life.ranges, masks[i], strict=True):
            placed.add((mask, offset + part.begin, offset + aligned(part.end)))
    return tuple(offsets), arena


class _PlacedRanges:
    """Live ranges that have been placed in the arena, as (mask of windows, begin, end), indexed by spans of windows."""

    def __init__(self) -> None:
        self.all: list[tuple[int, int, int]] = []
        self.spans: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, part: tuple[int, int, int]) -> None:
        self.all.append(part)
        for span in self._spans(part[0]):
            self.spans.setdefault(span, []).append(part)

    def near(self, mask: int) -> list[tuple[int, int, int]]:
        """Return all live ranges that share a window with ``mask``, and perhaps some that do not.  A live range may occur
        more than once."""
        spans = self._spans(mask)
        if len(spans) > _MANY_SPANS:
            return self.all
        return [part for span in spans for part in self.spans.get(span, ())]

    def _spans(self, mask: int) -> list[int]:
        spans, span = [], 0
        while mask:
            if mask & _SPAN:
                spans.append(span)
            mask >>= _SPAN.bit_length()
            span += 1
        return spans


def _mask(part: LiveRange, windows: int) -> int:
    """Return a bit mask of the windows of a live range."""
    arc = (1 << min(part.length, windows)) - 1
    turned = arc << part.start
    return (turned | turned >> windows) & ((1 << windows) - 1)


class ArenaSpace:
    """A part of the arena with a given size.  Weights are placed in it in order of first use, and each weight occupies its
    bytes until its last reader has finished.

    ``stretches``: adjacent intervals (begin, end, free) that cover this part of the arena.  ``free``: window from which the
    bytes of the interval are free.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        """``nbytes``: size of this part of the arena in bytes.  ``count``: number of windows per step.  Initially, all bytes
        have been free since the beginning of the previous step."""
        self.nbytes = nbytes - nbytes % ALIGNMENT
        self.stretches = [(0, self.nbytes, -count)]

    def offset(self, nbytes: int, first: int, wanted: int) -> int | None:
        """Return the best offset for a weight of ``nbytes`` bytes.  Return None if there is no offset at which all of the
        weight's bytes are free before its first reader, region ``first``.

        ``wanted``: window in which the copy of the weight should start.  At the best offset, the last of the weight's bytes
        becomes free earliest; all windows up to ``wanted`` count as equally early.  Of several such offsets, the one with the
        smallest total delay is chosen: the delay of a byte is the number of windows from ``wanted`` until the byte is free.
        Of several offsets with equal totals, the lowest is chosen.
        """
        best: tuple[int, int, int] | None = None
        ends = {at for begin, end, _ in self.stretches for at in (begin, end - nbytes)}
        for at in sorted(at for at in ends if 0 <= at <= self.nbytes - nbytes):
            soonest, late = wanted, 0
            for begin, end, free in self._across(at, at + nbytes):
                if free > (first if best is None else best[0]):
                    break
                if free > wanted:
                    soonest = max(soonest, free)
                    late += (min(end, at + nbytes) - max(begin, at)) * (free - wanted)
            else:
                if best is None or (soonest, late) < best[:2]:
                    best = soonest, late, at
                if not late:
                    break
        return None if best is None else best[2]

    def free(self, begin: int, end: int) -> int:
        """Return the first window from which bytes ``[begin, end)`` are free."""
        return max(free for _, _, free in self._across(begin, end))

    def take(self, at: int, nbytes: int, free: int) -> None:
        """Reserve ``nbytes`` bytes at offset ``at`` for a weight, until window ``free``."""
        end = at + nbytes
        low, high = self._bounds(at, end)
        below, above = self.stretches[low], self.stretches[high - 1]
        parts = (below[0], at, below[2]), (at, end, free), (end, above[1], above[2])
        self.stretches[low:high] = [p for p in parts if p[0] < p[1]]

    def _across(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        low, high = self._bounds(begin, end)
        return self.stretches[low:high]

    def _bounds(self, begin: int, end: int) -> tuple[int, int]:
        return bisect_left(self.stretches, (begin + 1,)) - 1, bisect_left(self.stretches, (end,))
