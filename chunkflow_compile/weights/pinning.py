"""Pinning: which weights a device copies from pinned memory, and in which order they are pinned."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .home import Home
from .limits import Room, local_ranks
from .progress import moving
from .reader import HostReader


def pin_all(homes: Sequence[Home], device: HostReader, budget: int | None) -> bool:
    """Pin the host memory of weights, see :meth:`Home.pin`.  Returns whether all of it is pinned.

    ``budget``: most bytes of a store to pin, None for what the machine leaves.
    Ranks that share memory pin the same weights, the first ones that find room, and begin at different ones: where two pin
    the same pages at once, the kernel may refuse one.
    """
    turns = [home.store.turn for home in homes if home.store.turn is not None]
    place, ranks = min(turns) if turns else (int(os.environ.get("LOCAL_RANK", "0")), local_ranks())
    stores = {id(home.store): home.store for home in homes} if device.name == "cuda" else {}
    rooms = {key: store.room(budget) for key, store in stores.items()}
    todo = [home for home in homes if not home.pinned]
    without = _without_room(todo, rooms)
    fit = [home for home in todo if home not in without]
    first = len(fit) * place // ranks
    with moving("pinning", sum(home.nbytes for home in todo)) as pinned:
        for home in (*fit[first:], *fit[:first], *without):
            home.pin(device, home not in without)
            pinned(home.nbytes)
    for home, error in without.items():
        if home.store.pins:  # said once for each store, of the first of its weights
            home.store.pageable(home, error)
    return all(home.pinned for home in homes)


def _without_room(homes: Sequence[Home], rooms: Mapping[int, Room]) -> dict[Home, OSError]:
    """The weights for which there is no room, and why: the first of a store that does not fit, and all after it."""
    found: dict[Home, OSError] = {}
    full: dict[int, OSError] = {}
    for home in homes:
        key = id(home.store)
        if key in rooms and key not in full and home.pins:
            try:
                rooms[key].take(home.nbytes)
            except OSError as error:
                full[key] = error
        if key in full:
            found[home] = full[key]
    return found
