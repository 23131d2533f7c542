"""Pinning: which weights a device copies from pinned memory, and in which order they are pinned."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .host_buffer import HostBuffer
from .limits import Room, local_ranks
from .progress import moving
from .reader import HostReader


def pin_all(buffers: Sequence[HostBuffer], device: HostReader, budget: int | None) -> bool:
    """Pin the host memory of weights, see :meth:`HostBuffer.pin`.  Returns whether all of it is pinned.

    ``budget``: most bytes of a store to pin, None for what the machine leaves.
    Ranks that share memory pin the same weights, the first ones that find room, and begin at different ones: where two pin
    the same pages at once, the kernel may refuse one.
    """
    turns = [buffer.store.turn for buffer in buffers if buffer.store.turn is not None]
    place, ranks = min(turns) if turns else (int(os.environ.get("LOCAL_RANK", "0")), local_ranks())
    stores = {id(buffer.store): buffer.store for buffer in buffers} if device.name == "cuda" else {}
    rooms = {key: store.room(budget) for key, store in stores.items()}
    todo = [buffer for buffer in buffers if not buffer.pinned]
    without = _without_room(todo, rooms)
    fit = [buffer for buffer in todo if buffer not in without]
    first = len(fit) * place // ranks
    with moving("pinning", sum(buffer.nbytes for buffer in todo)) as pinned:
        for buffer in (*fit[first:], *fit[:first], *without):
            buffer.pin(device, buffer not in without)
            pinned(buffer.nbytes)
    for buffer, error in without.items():
        if buffer.store.pins:  # said once for each store, of the first of its weights
            buffer.store.pageable(buffer, error)
    return all(buffer.pinned for buffer in buffers)


def _without_room(buffers: Sequence[HostBuffer], rooms: Mapping[int, Room]) -> dict[HostBuffer, OSError]:
    """The weights for which there is no room, and why: the first of a store that does not fit, and all after it."""
    found: dict[HostBuffer, OSError] = {}
    full: dict[int, OSError] = {}
    for buffer in buffers:
        key = id(buffer.store)
        if key in rooms and key not in full and buffer.pins:
            try:
                rooms[key].take(buffer.nbytes)
            except OSError as error:
                full[key] = error
        if key in full:
            found[buffer] = full[key]
    return found
