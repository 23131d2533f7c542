"""Pinning of many weights: choosing the weights that fit the limit on pinned memory, and the order of pinning."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .host_buffer import HostBuffer
from .limits import local_ranks
from .peer_pieces import Pieces
from .pinning import HostReader
from .progress import moving


def pin_all(buffers: Sequence[HostBuffer], device: HostReader, budget: int | None) -> bool:
    """Pin the host memory of weights, see :meth:`HostBuffer.pin`.  Returns whether ``device`` can read all weights
    directly.

    ``budget``: the limit on pinned bytes per store; None for as much as the machine allows.
    Ranks that share memory all pin the same weights: the weights at the beginning of ``buffers``, up to the limit.
    Each rank starts with a different weight, because the kernel may fail to pin pages that two ranks pin at the same
    time.
    """
    shared = [buffer.store.rank_and_count for buffer in buffers if buffer.store.rank_and_count is not None]
    place, ranks = min(shared) if shared else (int(os.environ.get("LOCAL_RANK", "0")), local_ranks())
    todo = [buffer for buffer in buffers if not buffer.pinned]
    stores = {buffer.store for buffer in todo} if device.name == "cuda" else ()
    allowances = {store: store.pin_allowance(budget) for store in stores}
    without = {b for b in todo if b.store in allowances and b.should_pin and not allowances[b.store].take(b.nbytes)}
    fit = [buffer for buffer in todo if buffer not in without]
    first = len(fit) * place // ranks
    with moving("pinning", sum(buffer.nbytes for buffer in todo)) as pinned:
        for buffer in (*fit[first:], *fit[:first], *without):
            buffer.pin(device, buffer not in without)
            pinned(buffer.nbytes)
    for buffer in todo:
        if buffer in without and buffer.store.pins:  # true once per store, because the next line sets ``pins`` to False
            buffer.store.disable_pinning(buffer, allowances[buffer.store].why)
    return all(buffer.pinned or isinstance(buffer.bytes_now, Pieces) for buffer in buffers)
