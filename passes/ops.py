"""The three transfer ops of a program: the ops of a step (step.py) as FX nodes, with their events as arguments.

The listing shows them and the executor runs them.  They are never dispatched, so calling one directly is an error.
``Library.define`` is used because ``custom_op`` takes over ten times as long to define an op.

``prefetch(weight, first, end, window, next_step, lane, after, then)``
    Copy chunks ``[first, end)`` of a weight into its slot.  ``after``: the event that the lane waits for before the copy,
    which is the opening of its window; the first prefetch that names it records it on the compute stream.  None if the lane
    has already waited for it.  ``then``: the event that the lane records after the copy, None if compute awaits a later one.
``wait(event, weights)``
    The compute stream waits for the event.  Then every chunk of the weights has arrived.
``evict(weight)``
    The last reader of the weight has finished; from here on its slot may be overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from .step import Copy, Evict, Op, Record, Step, Wait

_OPS = torch.library.Library("chunkflow", "DEF")
_OPS.define(
    "prefetch(str weight, int first, int end, int window, bool next_step, str lane, *, int? after=None, int? then=None)"
    " -> ()"
)
_OPS.define("wait(int event, str[] weights) -> ()")
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
    """A copy and the events next to it, which are one node: see ``prefetch`` above."""

    copy: Copy
    after: int | None = None
    then: int | None = None


TransferOp = Prefetch | Wait | Evict


def folded(ops: Iterable[Op]) -> Iterator[TransferOp]:
    """Transfer ops as nodes.  ``ops``: those next to a region or a collective, see :func:`step.transfers`."""
    opened: dict[str, int] = {}  # lane -> the opening for which it waits
    prefetch: Prefetch | None = None
    for op in ops:
        if isinstance(op, Record) and prefetch is not None and op.stream == prefetch.copy.stream:
            prefetch = replace(prefetch, then=op.event)
            continue
        if prefetch is not None:
            yield prefetch
            prefetch = None
        if isinstance(op, Copy):
            prefetch = Prefetch(op, opened.pop(op.stream, None))
        elif isinstance(op, Wait) and op.stream != "compute":
            opened[op.stream] = op.event
        elif isinstance(op, Wait | Evict):
            yield op
    if prefetch is not None:
        yield prefetch


def write(graph: Graph, ops: Iterable[Op]) -> None:
    """Write transfer ops to the end of a graph.  ``ops``: as in :func:`folded`."""
    for op in folded(ops):
        if isinstance(op, Prefetch):
            copy, events = op.copy, {"after": op.after, "then": op.then}
            args = (copy.weight, copy.first, copy.end, copy.window, copy.next_step, copy.stream)
            graph.call_function(PREFETCH, args, {name: event for name, event in events.items() if event is not None})
        elif isinstance(op, Wait):
            graph.call_function(WAIT, (op.event, op.weights))
        else:
            graph.call_function(EVICT, (op.weight,))


def transfer_of(node: Node) -> TransferOp | None:
    """What a node moves, waits for or evicts; None if it is no transfer op."""
    if node.target is WAIT:
        event, weights = node.args
        return Wait("compute", event, tuple(weights))  # type: ignore[arg-type]
    if node.target is EVICT:
        return Evict(str(node.args[0]))
    return prefetch_of(node)


def prefetch_of(node: Node) -> Prefetch | None:
    """The copy of a prefetch node with its events, None for any other node."""
    if node.target is not PREFETCH:
        return None
    arguments: Any = node.args
    weight, first, end, window, next_step, lane = arguments
    return Prefetch(Copy(lane, weight, first, end, window, next_step), **node.kwargs)  # type: ignore[arg-type]


def transfer_name(op: TransferOp) -> str:
    """The name of a transfer op in listings."""
    return type(op).__name__.lower()


def transfer_text(op: TransferOp) -> str:
    """A transfer op as one line."""
    if isinstance(op, Evict):
        return f"{transfer_name(op)}({op.weight!r})"
    if not isinstance(op, Prefetch):
        return f"{transfer_name(op)}({', '.join((str(op.event), *map(repr, op.weights)))})"
    copy = op.copy
    said = [repr(copy.weight), f"chunks[{copy.first}:{copy.end}]", f"window={copy.window}"]
    said += ["next_step=True"] if copy.next_step else []
    said += [f"lane={copy.stream!r}"] if copy.stream != "copy" else []
    said += [f"{name}={event}" for name, event in (("after", op.after), ("then", op.then)) if event is not None]
    return f"{transfer_name(op)}({', '.join(said)})"


def unfolded(transfer: TransferOp, opened: set[int]) -> Step:
    """The ops of a node.  ``opened``: the openings that are recorded by the nodes before it, to which this adds its own."""
    if not isinstance(transfer, Prefetch):
        return (transfer,)
    copy, after, then = transfer.copy, transfer.after, transfer.then
    arrival = () if then is None else (Record(copy.stream, then),)
    if after is None:
        return copy, *arrival
    opening = () if after in opened else (Record("compute", after),)
    opened.add(after)
    return *opening, Wait(copy.stream, after), copy, *arrival
