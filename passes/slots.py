"""Slots: offsets in the arena for weights whose chunks come and go on a circular time axis.

A step is a circle of windows, because the last windows of a step prefetch the first weights of the next.  A weight lies
in one piece, but its chunks arrive in different windows: each run of chunks is an arc on the circle, and two arcs that
meet must not share bytes.  First fit by offset, tried in a few orders, the smallest arena wins; ties go to the earlier
order, so that the result depends on the input alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .plan import align

# Lifetimes placed an order: forty rounds for the 300 weights of a large model, a few tenths of a second.
_WORK = 12_000


@dataclass(frozen=True)
class Piece:
    """Bytes ``[begin, end)`` of a weight, alive in windows ``start .. start + length - 1`` modulo their number."""

    begin: int
    end: int
    start: int
    length: int


@dataclass(frozen=True)
class Lifetime:
    """The pieces of one weight, ascending, without gaps between them."""

    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.pieces[-1].end

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def length(self) -> int:
        return max(p.length for p in self.pieces)


def assign_slots(lifetimes: Sequence[Lifetime], windows: int) -> tuple[tuple[int, ...], int]:
    """Offsets in bytes (multiples of 256), one a lifetime, and the size of the arena that holds them."""
    if not lifetimes:
        return (), 0
    resident = [any(p.length >= windows for p in life.pieces) for life in lifetimes]
    orders: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda i: (not resident[i], lifetimes[i].start, -lifetimes[i].nbytes, i),
        lambda i: (not resident[i], -lifetimes[i].nbytes, lifetimes[i].start, i),
    )
    least = _most_alive(lifetimes, windows)
    packings = (_lifted(lifetimes, windows, sorted(range(len(lifetimes)), key=order), least) for order in orders)
    return min(packings, key=lambda packing: packing[1])


def _lifted(
    lifetimes: Sequence[Lifetime], windows: int, order: Sequence[int], least: int
) -> tuple[tuple[int, ...], int]:
    """First fit, again and again with those that stuck out at the top placed first; the best of all rounds."""
    best: tuple[tuple[int, ...], int] | None = None
    for _ in range(max(4, _WORK // len(lifetimes))):
        offsets, arena = _first_fit(lifetimes, windows, order)
        if best is None or arena < best[1]:
            best = offsets, arena
        if arena == least:
            break
        top = [i for i in order if offsets[i] + align(lifetimes[i].nbytes) == arena]
        order = [*top, *(i for i in order if i not in top)]
    assert best is not None
    return best


def _most_alive(lifetimes: Sequence[Lifetime], windows: int) -> int:
    """The most bytes alive in one window: no arena is smaller."""
    alive = [0] * windows
    for life in lifetimes:
        for piece in life.pieces:
            for k in _covered(piece, windows):
                alive[k] += align(piece.end) - piece.begin
    return max(alive)


def _first_fit(lifetimes: Sequence[Lifetime], windows: int, order: Sequence[int]) -> tuple[tuple[int, ...], int]:
    offsets = [0] * len(lifetimes)
    occupants: list[set[tuple[int, int]]] = [set() for _ in range(windows)]
    arena = 0
    for i in order:
        life = lifetimes[i]
        offset = 0
        for low, high in sorted(_forbidden(life, windows, occupants)):
            if low < offset < high:
                offset = high
        offsets[i] = offset
        arena = max(arena, offset + align(life.nbytes))
        for piece in life.pieces:
            taken = (offset + piece.begin, offset + align(piece.end))
            for k in _covered(piece, windows):
                occupants[k].add(taken)
    return tuple(offsets), arena


def _forbidden(life: Lifetime, windows: int, occupants: Sequence[set[tuple[int, int]]]) -> set[tuple[int, int]]:
    """Open intervals of offsets at which a piece of ``life`` would meet an occupant."""
    return {
        (begin - align(piece.end), end - piece.begin)
        for piece in life.pieces
        for k in _covered(piece, windows)
        for begin, end in occupants[k]
    }


def _covered(piece: Piece, windows: int) -> list[int]:
    return [(piece.start + k) % windows for k in range(min(piece.length, windows))]
