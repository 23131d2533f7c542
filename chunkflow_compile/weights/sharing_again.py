"""Sharing again what all ranks have written to the weights that they shared."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from torch import nn

from .filling import Filling, as_they_are
from .home import home_of
from .host_store import HostStore
from .leaves import named_leaves
from .meeting import WRITING
from .peers import peers_of

_log = logging.getLogger(__name__)


def share_again(store: HostStore, share: Any) -> None:
    """Share the weights that this rank has written since they were shared.  All ranks that share must call it.

    No program of the model may run.  Raises ChunkflowError if another rank ends or fails; the weights are right then, and
    not all of them are shared.
    """
    lost = {h.name: h for h in store.homes if h.was_shared and not h.shares}
    on_drive = {name for name, home in lost.items() if home.cell.scratch}
    peers = peers_of(share, store.device, WRITING)
    if peers is None:
        return
    weights, device = [(name, home.host) for name, home in lost.items()], store.device
    filling = Filling(device, weights, as_they_are, pages=True, peers=peers, on_drive=on_drive, again=True)
    try:
        found = [(home, filling.place(name, home.host)) for name, home in lost.items()]
        filling.finish()
        left = {name: home.left for name, home in lost.items() if home.left is not None}
        for home, placed in found:
            home.share(placed)
            if home.shares:
                home.left = None
        # now every rank has left them, or says that it has not; after an error, ranks may have left other places
        told = peers.gather([[name, *place.told] for name, place in left.items() if not place.seen])
        for name, *_ in set.intersection(*(set(map(tuple, each)) for each in told)) if peers.leads else ():
            left[name].clear()
    except BaseException as error:
        filling.close(error)
        raise
    filling.close()
    store.drive = None  # the file ends with the last weight in it


def name_replaced(root: nn.Module, shared: Collection[str]) -> None:
    """Say which of the weights of these names got other memory."""
    if new := sorted(name for name, t in named_leaves(root) if name in shared and home_of(t) is None):
        more = f" and {len(new) - 5} more" if len(new) > 5 else ""
        _log.warning(
            "%s%s got new memory inside writing, and ranks do not share it: write into the weights, without assign=True, "
            ".to(dtype) or p.data = ..., or call restore and offload again",
            ", ".join(new[:5]),
            more,
        )
