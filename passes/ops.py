"""The three transfer ops of a program.

They are FX nodes: the listing shows them and the executor runs them.  They are never dispatched, so calling one
directly is an error.  ``Library.define`` is used because ``custom_op`` takes over ten times as long to define an op.

``prefetch(weight, first, end, window, next_step)``
    Copy chunks ``[first, end)`` of a weight into its slot.  The copy stream waits until the window opens: until the
    compute stream reaches the first prefetch of that window.  With ``next_step`` the copy serves the next run of the
    program (wrap-around).
``wait(weight)``
    The compute stream waits until every chunk of the weight has arrived.
``evict(weight)``
    The last reader of the weight has finished; from here on its slot may be overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

_OPS = torch.library.Library("chunkflow", "DEF")
_OPS.define("prefetch(str weight, int first, int end, int window, bool next_step=False) -> ()")
_OPS.define("wait(str weight) -> ()")
_OPS.define("evict(str weight) -> ()")

PREFETCH = torch.ops.chunkflow.prefetch.default
WAIT = torch.ops.chunkflow.wait.default
EVICT = torch.ops.chunkflow.evict.default


def _never_dispatched(*args: object, **kwargs: object) -> None:
    raise RuntimeError("chunkflow transfer ops run inside a ChunkFlow executor; they cannot be called directly")


for _op in (PREFETCH, WAIT, EVICT):
    _OPS.impl(_op, _never_dispatched, "CompositeExplicitAutograd")
    # torch.fx treats an op that returns () as dead code unless it is registered as having a side effect.
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
    """The arguments of a prefetch node, None for any other node."""
    arguments: Any = node.args
    return Prefetch(*arguments) if node.target is PREFETCH else None
