"""The three transfer ops of a program.

They are nodes that a person reads and the executor runs; they are never dispatched, so calling one directly is an
error.  ``Library.define`` is used rather than ``custom_op``: an op of the latter costs about ten times as much.

``prefetch(weight, first, end, window, next_step)``
    Copies chunks ``[first, end)`` of a weight into its slot.  The copy stream waits for the opening of the window: the
    point of the compute stream at which the first prefetch of that window stands.  With ``next_step`` the copy serves
    the next run of the program (wrap-around).
``wait(weight)``
    The compute stream waits until every chunk of the weight has arrived.
``evict(weight)``
    The last reader of the weight is behind; from here on its slot may be overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

_LIBRARY = torch.library.Library("chunkflow", "DEF")
_LIBRARY.define("prefetch(str weight, int first, int end, int window, bool next_step=False) -> ()")
_LIBRARY.define("wait(str weight) -> ()")
_LIBRARY.define("evict(str weight) -> ()")

PREFETCH = torch.ops.chunkflow.prefetch.default
WAIT = torch.ops.chunkflow.wait.default
EVICT = torch.ops.chunkflow.evict.default


def _never_dispatched(*args: object, **kwargs: object) -> None:
    raise RuntimeError("chunkflow transfer ops run inside a ChunkFlow executor; they cannot be called directly")


for _op in (PREFETCH, WAIT, EVICT):
    _LIBRARY.impl(_op, _never_dispatched, "CompositeExplicitAutograd")
    # An op that returns () is dead code to torch.fx unless it is registered.
    torch.fx.has_side_effect(_op)


@dataclass(frozen=True)
class Prefetch:
    """The arguments of a prefetch node: chunks ``[first, end)`` of ``weight``."""

    weight: str
    first: int
    end: int
    window: int
    next_step: bool = False


def prefetch_of(node: Node) -> Prefetch | None:
    """What a node prefetches, None if it is no prefetch."""
    arguments: Any = node.args
    return Prefetch(*arguments) if node.target is PREFETCH else None
