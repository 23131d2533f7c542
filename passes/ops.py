"""Transfer ops: the copies, reads, waits and evicts of a step (step.py) as FX nodes, with their events as arguments.

The executor runs these ops, and listings show them. torch never dispatches them: calling one of them directly raises an
error.  ``Library.define`` is used because defining an op with ``custom_op`` takes more than ten times as long.

``prefetch(weight, first, end, window, next_step, lane, after, then, ring, read)``
    Copy chunks ``[first, end)`` of a weight into its slot.  ``after``: the opening of the window, an event that the lane
    waits for before the copy, or None if the lane has already waited for it.  The first prefetch that names an opening
    records this event on the compute stream.  ``then``: the event that the lane records after the copy, or None if nothing
    waits for the copy.  ``ring``, ``read``: for a weight in a file, the offset in the ring at which the chunks begin, and the
    event of the read that stores them there.
``read(weight, first, end, ring, after, then)``
    Read chunks ``[first, end)`` of a weight from its file into the ring, at offset ``ring``.  ``after``: the event of the
    copy that frees these bytes of the ring, or None if the previous read waits for the same copy.  ``then``: the event that
    the stream of reads records after the read.
``wait(event, weights)``
    The compute stream waits for the event.  Then all chunks of the weights have arrived.
``evict(weight)``
    The last reader of the weight has finished, so its slot may be overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from .step import Copy, Evict, Op, Read, Record, Step, Wait

_OPS = torch.library.Library("chunkflow", "DEF")
_OPS.define(
    "prefetch(str weight, int first, int end, int window, bool next_step, str lane, *, int? after=None, int? then=None,"
    " int? ring=None, int? read=None) -> ()"
)
_OPS.define("read(str weight, int first, int end, int ring, *, int? after=None, int? then=None) -> ()")
_OPS.define("wait(int event, str[] weights) -> ()")
_OPS.define("evict(str weight) -> ()")

PREFETCH = torch.ops.chunkflow.prefetch.default
READ = torch.ops.chunkflow.read.default
WAIT = torch.ops.chunkflow.wait.default
EVICT = torch.ops.chunkflow.evict.default


def _never_dispatched(*args: object, **kwargs: object) -> None:
    raise RuntimeError("chunkflow transfer ops run inside a ChunkFlow executor; they cannot be called directly")


for _op in (PREFETCH, READ, WAIT, EVICT):
    _OPS.impl(_op, _never_dispatched, "CompositeExplicitAutograd")
    # torch.fx removes an op that returns () as dead code unless it is registered as having a side effect
    torch.fx.has_side_effect(_op)


@dataclass(frozen=True)
class Prefetch:
    """A copy with its events: the contents of a ``prefetch`` node, see the module docstring."""

    copy: Copy
    after: int | None = None
    then: int | None = None
    read: int | None = None


@dataclass(frozen=True)
class ReadAhead:
    """A read with its events: the contents of a ``read`` node, see the module docstring."""

    read: Read
    after: int | None = None
    then: int | None = None


TransferOp = Prefetch | ReadAhead | Wait | Evict


def folded(ops: Iterable[Op]) -> Iterator[TransferOp]:
    """Combine the copies and reads of a step with their events; each result becomes one node.  ``ops``: transfer ops
    directly before or after a region or a collective, see :func:`step.transfers`."""
    waits: dict[str, list[int]] = {}  # for each stream, the events that it waits for before its next op
    newest: Prefetch | ReadAhead | None = None
    for op in ops:
        if isinstance(op, Record) and newest is not None and op.stream == _moved(newest).stream:
            newest = replace(newest, then=op.event)
            continue
        if newest is not None:
            yield newest
            newest = None
        if isinstance(op, Copy):
            events = waits.pop(op.stream, [])
            read = None if op.ring is None else events.pop()
            newest = Prefetch(op, next(iter(events), None), read=read)
        elif isinstance(op, Read):
            newest = ReadAhead(op, next(iter(waits.pop(op.stream, [])), None))
        elif isinstance(op, Wait) and op.stream != "compute":
            waits.setdefault(op.stream, []).append(op.event)
        elif isinstance(op, Wait | Evict):
            yield op
    if newest is not None:
        yield newest


def _moved(op: Prefetch | ReadAhead) -> Copy | Read:
    return op.copy if isinstance(op, Prefetch) else op.read


def write(graph: Graph, ops: Iterable[Op]) -> None:
    """Write transfer ops to the end of a graph.  ``ops``: as in :func:`folded`."""
    for op in folded(ops):
        if isinstance(op, Prefetch):
            copy, named = op.copy, {"after": op.after, "then": op.then, "ring": op.copy.ring, "read": op.read}
            args = (copy.weight, copy.first, copy.end, copy.window, copy.next_step, copy.stream)
            graph.call_function(PREFETCH, args, _given(named))
        elif isinstance(op, ReadAhead):
            read, named = op.read, {"after": op.after, "then": op.then}
            graph.call_function(READ, (read.weight, read.first, read.end, read.ring), _given(named))
        elif isinstance(op, Wait):
            graph.call_function(WAIT, (op.event, op.weights))
        else:
            graph.call_function(EVICT, (op.weight,))


def _given(named: Mapping[str, int | None]) -> dict[str, Any]:
    return {name: number for name, number in named.items() if number is not None}


def transfer_of(node: Node) -> TransferOp | None:
    """Return the transfer op of a node, or None if the node is not a transfer."""
    if node.target is WAIT:
        event, weights = node.args
        return Wait("compute", event, tuple(weights))  # type: ignore[arg-type]
    if node.target is EVICT:
        return Evict(str(node.args[0]))
    if node.target is READ:
        return ReadAhead(Read(*node.args), **node.kwargs)  # type: ignore[arg-type]
    return prefetch_of(node)


def prefetch_of(node: Node) -> Prefetch | None:
    """Return the copy of a prefetch node with its events, or None if the node is not a prefetch."""
    if node.target is not PREFETCH:
        return None
    arguments: Any = node.args
    weight, first, end, window, next_step, lane = arguments
    named: Any = dict(node.kwargs)
    return Prefetch(Copy(lane, weight, first, end, window, next_step, named.pop("ring", None)), **named)


def transfer_name(op: TransferOp) -> str:
    """Return the name of a transfer op in listings."""
    return "read" if isinstance(op, ReadAhead) else type(op).__name__.lower()


def transfer_text(op: TransferOp) -> str:
    """Return a transfer op as one line of text."""
    if isinstance(op, Evict):
        return f"{transfer_name(op)}({op.weight!r})"
    if isinstance(op, Wait):
        return f"{transfer_name(op)}({', '.join((str(op.event), *map(repr, op.weights)))})"
    moved, named = _moved(op), {"after": op.after, "then": op.then}
    said = [repr(moved.weight), f"chunks[{moved.first}:{moved.end}]"]
    if isinstance(op, Prefetch):
        copy, named = op.copy, {**named, "read": op.read}
        said += [f"window={copy.window}"]
        said += ["next_step=True"] if copy.next_step else []
        said += [f"lane={copy.stream!r}"] if copy.stream != "copy" else []
    said += [f"ring={moved.ring}"] if moved.ring is not None else []
    said += [f"{name}={event}" for name, event in _given(named).items()]
    return f"{transfer_name(op)}({', '.join(said)})"


def unfolded(transfer: TransferOp, opened: set[int]) -> Step:
    """Return the ops of a step that a transfer op of the graph stands for; the inverse of :func:`folded`.  ``opened``: the
    events of the window openings that earlier transfer ops record.  If this transfer op records an opening, the event of the
    opening is added."""
    if isinstance(transfer, Wait | Evict):
        return (transfer,)
    moved, after = _moved(transfer), transfer.after
    ops: list[Op] = []
    if after is not None:
        if isinstance(transfer, Prefetch) and after not in opened:
            opened.add(after)
            ops.append(Record("compute", after))
        ops.append(Wait(moved.stream, after))
    if isinstance(transfer, Prefetch) and transfer.read is not None:
        ops.append(Wait(moved.stream, transfer.read))
    ops.append(moved)
    if transfer.then is not None:
        ops.append(Record(moved.stream, transfer.then))
    return tuple(ops)
