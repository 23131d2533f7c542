"""Slots: offsets in the arena for lifetimes on a circular time axis.

A step is a circle of windows, because the last windows of a step prefetch the first weights of the next.  A lifetime is
an arc on it; two arcs that meet must not share bytes.  First fit by offset, tried in a few orders, the smallest arena
wins; ties go to the earlier order, so that the result depends on the input alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .plan import align


@dataclass(frozen=True)
class Lifetime:
    """Windows ``start .. start + length - 1``, modulo the number of windows; ``nbytes`` of the arena."""

    start: int
    length: int
    nbytes: int


def assign_slots(lifetimes: Sequence[Lifetime], windows: int) -> tuple[tuple[int, ...], int]:
    """Offsets in bytes (multiples of 256), one a lifetime, and the size of the arena that holds them."""
    orders: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda i: (lifetimes[i].start, -lifetimes[i].nbytes, i),
        lambda i: (-lifetimes[i].nbytes, lifetimes[i].start, i),
        lambda i: (-lifetimes[i].length, -lifetimes[i].nbytes, i),
    )
    packings = (_first_fit(lifetimes, windows, sorted(range(len(lifetimes)), key=order)) for order in orders)
    return min(packings, key=lambda packing: packing[1])


def _first_fit(lifetimes: Sequence[Lifetime], windows: int, order: Sequence[int]) -> tuple[tuple[int, ...], int]:
    offsets = [0] * len(lifetimes)
    occupants: list[list[int]] = [[] for _ in range(windows)]
    arena = 0
    for i in order:
        life = lifetimes[i]
        covered = [(life.start + k) % windows for k in range(min(life.length, windows))]
        neighbours = sorted({j for k in covered for j in occupants[k]}, key=lambda j: offsets[j])
        offset = 0
        for j in neighbours:
            if offset + align(life.nbytes) <= offsets[j]:
                break
            offset = max(offset, offsets[j] + align(lifetimes[j].nbytes))
        offsets[i] = offset
        arena = max(arena, offset + align(life.nbytes))
        for k in covered:
            occupants[k].append(i)
    return tuple(offsets), arena
