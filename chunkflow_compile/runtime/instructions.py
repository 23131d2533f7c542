"""Instructions: the functions that issue the ops of a step (step.py) to the streams of a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import getitem, methodcaller
from typing import Any

from torch.fx import Node

from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.forms import without_reads
from chunkflow_compile.passes.graph.discover import completion_of
from chunkflow_compile.passes.step import (
    Copy,
    Evaluate,
    Evict,
    Finish,
    Op,
    Read,
    Record,
    Release,
    Run,
    Start,
    Step,
    Transfer,
    Wait,
)
from chunkflow_compile.passes.step import Stream as StreamName
from chunkflow_compile.weights.peer_pieces import Pieces

from .collective_work import collective_issue, completion_issue, finish_issue, start_issue
from .compute_work import Compute, PicksAndDrops, node_work, poison_work, region_work, run_all, together
from .device_base import NamedCopy
from .measurement import RegionWatch
from .target import Issue, RunningStep, Target


def instructions(target: Target, step: Step, nodes: Iterable[tuple[Node, Step]] = ()) -> list[Issue]:
    """Return the functions that issue the ops of a step, in the order in which they are to be called.

    ``nodes``: the nodes of the program, each with its ops (see :func:`issued`); empty if the step consists of transfers only.

    Each function call takes host time, so one function issues several adjacent ops if possible: a region and the compute ops
    after it, adjacent ops of the lanes (copies, records and waits), or adjacent reads.  If no record and no wait is
    between two copies of a lane, these copies are issued together.

    If the step computes several rows (see :meth:`Executor.run`), a function that issues compute ops issues all of them for
    the first row, then for the second row, and so on.  Evict ops are an exception: they are issued only once, for the last
    row.

    Raises FindingError if the ops of the nodes differ from the ops of the step.
    """
    if not target.on_drive:
        step = without_reads(step, target.cycle.events)
    compiler = _Compiler(target)
    for op, node in _with_nodes(step, nodes):
        compiler.add(op, node)
    compiler.flush()
    return compiler.issues


def _with_nodes(step: Step, nodes: Iterable[tuple[Node, Step]]) -> Iterator[tuple[Op, Node | None]]:
    """Yield each op with the node that it comes from.  A transfer is yielded with None, because it comes from no node.  If a
    node has several ops, its first op and its Run op (if it has one) are yielded with the node, and its other ops are yielded
    with None."""
    work = ((node, [op for op in ops if not _is_transfer(op)]) for node, ops in nodes)
    rest = ((op, node if op is ops[0] or isinstance(op, Run) else None) for node, ops in work for op in ops)
    for op in step:
        if _is_transfer(op):
            yield op, None
            continue
        found, node = next(rest, (None, None))
        if found != op:
            raise FindingError(f"The program was changed after its proof: it has {found} in place of {op}.")
        yield op, node
    for found, _ in rest:
        raise FindingError(f"The program was changed after its proof: {found} is not in it.")


def _is_transfer(op: Op) -> bool:
    return isinstance(op, Transfer)


class _Compiler:
    """Makes the functions that issue a step.  ``issues``: the functions that are complete so far."""

    def __init__(self, target: Target) -> None:
        self.issues: list[Issue] = []
        self._target = target
        self._number = {node.name: i for node, i in target.number.items()}
        self._windows = len(target.program.problem.regions)
        # the index of the window to which stalls are added.  It is the window before the next region, or the last window if
        # no region follows.
        self._window = 0
        self._taken: tuple[int, ...] = ()  # the numbers of the values whose last reader is the next region
        self._computes: list[Compute] = []
        # the newest picks and drops, if the next op may still be added to them; otherwise None
        self._picks_and_drops: PicksAndDrops | None = None
        self._transfers: list[Record | Wait | Copy] = []
        self._reads: list[Read | Record | Wait] = []
        self._completed = set[Node]()  # completions that _start has added, so that _finish must not add them

    def add(self, op: Op, node: Any) -> None:
        """Add an op to the current function.  ``node``: see :func:`_with_nodes`."""
        target = self._target
        match op:
            case Read() | Record(stream="read") | Wait(stream="read"):
                self._read(op)
            case Copy() | Record() | Wait(stream="copy" | "pull"):
                self._transfer(op)
            case Wait():
                window = self._window if op.weights else None
                self._issue(_wait(target, target.events[op.event], window))
            case Run():
                self._compute(region_work(target, node, op.region, self._taken))
                self._taken = ()
                self._window = min(op.region + 1, self._windows - 1)
            case Start():
                self._start(node, op.collective)
            case Finish():
                self._finish(node, op.collective)
            case Evaluate(stream="collective"):
                self._issue(collective_issue(target, node, self._window))
            case Evaluate() if node.target is getitem:
                number = target.number
                self._latest_picks_and_drops().picks.append(
                    (number[node], number[node.all_input_nodes[0]], node.args[1])
                )
            case Evaluate():
                self._compute(Compute(node_work(target, node)))
            case Evict():
                if target.poison:
                    self._compute(Compute(poison_work(target, op.weight), once=True))
            case Release():
                numbers = tuple(self._number[value] for value in op.values)
                if node is not None:  # a Release with a node comes directly before the Run of a region
                    self._taken = numbers
                else:
                    self._latest_picks_and_drops().drops.extend(numbers)

    def _start(self, node: Node, index: int) -> None:
        """Add the start of a collective.  If the device has a stream for completions, also add the completion of the
        collective."""
        target, window = self._target, self._window_of(index)
        self._issue(start_issue(target, collective_issue(target, node, window)))
        completions = target.device.completion
        if completions is not None and (found := completion_of(node)) is not None:
            self._completed.add(found)
            completion = collective_issue(target, found, window, completions)
            self._issue(completion_issue(target, completions, completion, target.ended[index]))

    def _finish(self, node: Node | None, index: int) -> None:
        """Make compute wait for the end of a collective.  ``node``: the completion of the collective, that is, its
        ``wait_tensor`` node; None if no completion is to be issued."""
        target, ended = self._target, self._target.ended[index]
        if node in self._completed:
            self._issue(_wait(target, ended, None))
            return
        completion = None if node is None else collective_issue(target, node, self._window_of(index))
        self._issue(finish_issue(target, completion, ended))

    def _window_of(self, collective: int) -> int:
        """Return the index of the window to which the duration of a collective is added.  This is the window before the
        first region that runs after the end of the collective."""
        return min(self._target.program.problem.collectives[collective].until, self._windows - 1)

    def flush(self) -> None:
        """Complete the current function: make it from the ops that were added, and append it to ``issues``."""
        if self._computes:
            self.issues.append(_compute(self._target, self._computes))
        if self._transfers:
            self.issues.append(_transfers(self._target, self._transfers))
        if self._reads:
            self.issues.append(_reads(self._target, self._reads))
        self._computes, self._transfers, self._reads = [], [], []
        self._picks_and_drops = None

    def _compute(self, compute: Compute) -> None:
        if self._transfers or self._reads or compute.window is not None:
            self.flush()
        self._computes.append(compute)
        self._picks_and_drops = None

    def _latest_picks_and_drops(self) -> PicksAndDrops:
        """Return the work to which the next pick of a region's output, or the next drop of a value, is added.  This is the
        latest work if it contains only picks so far; otherwise, it is new work."""
        if self._picks_and_drops is None or self._picks_and_drops.drops:
            work = PicksAndDrops()
            self._compute(Compute(work.work()))
            self._picks_and_drops = work
        return self._picks_and_drops

    def _transfer(self, op: Record | Wait | Copy) -> None:
        if self._computes or self._reads:
            self.flush()
        self._transfers.append(op)

    def _read(self, op: Read | Record | Wait) -> None:
        if self._computes or self._transfers:
            self.flush()
        self._reads.append(op)

    def _issue(self, issue: Issue) -> None:
        self.flush()
        self.issues.append(issue)


def _compute(target: Target, computes: Sequence[Compute]) -> Issue:
    """Return a function that issues several pieces of compute work as one piece.  Only the first of these pieces may be a
    region."""
    run, window, name = target.device.compute.run, computes[0].window, computes[0].name
    work = together([each.work for each in computes])
    repeated = [each.work for each in computes if not each.once]

    def issue(step: RunningStep) -> None:
        if step.earlier and repeated:
            for env in step.earlier:
                run(partial(run_all, repeated, env), None, name)
        if window is None or (windows := step.cost.windows) is None:
            run(partial(work, step.env), None, name)
        else:
            run(partial(work, step.env), RegionWatch(windows, window), name)

    return issue


@dataclass(frozen=True)
class _Part:
    """Ops that are issued to one stream together: first waits for events, then copies, then records of events."""

    stream: StreamName
    waits: list[Any] = field(default_factory=list)
    copies: list[NamedCopy] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)


def _transfers(target: Target, ops: Sequence[Record | Wait | Copy]) -> Issue:
    """Return a function that issues a sequence of ops.  All ops belong to the lanes, except that Record ops may also
    belong to the compute stream.  The ops are grouped into as few parts as possible (see :class:`_Part`).

    The order of the ops within each stream does not change.  A record that comes before a wait in ``ops`` is also issued
    before this wait, even if the record and the wait are on different streams.
    """
    parts, newest = list[_Part](), dict[StreamName, _Part]()
    for op in ops:
        if isinstance(op, Wait):
            newest.clear()
        part = newest.get(op.stream)
        if part is None or (isinstance(op, Copy) and part.records):
            part = newest[op.stream] = _Part(op.stream)
            parts.append(part)
        match op:
            case Wait():
                part.waits.append(target.events[op.event])
            case Copy():
                part.copies.append(target.copy(op))
            case Record():
                part.records.append(target.events[op.event])
    sources = [source for part in parts for _, source, _ in part.copies]
    nbytes = sum(source.numel() for source in sources)
    pulled = sum(source.from_others for source in sources if isinstance(source, Pieces))
    device, traffic = target.device, target.traffic

    given: list[tuple[Any, list[Any], list[NamedCopy], list[Any]]]
    given = [(part.stream, part.waits, part.copies, part.records) for part in parts]

    def issue(step: RunningStep) -> None:
        measured = step.cost.windows is not None
        for name, waits, copies, records in given:
            stream = device.stream(name)
            for event in waits:
                stream.wait(event)
            if copies and measured:
                for to, source, label in copies:
                    work = partial(device.copy_bytes, to, source, name)
                    stream.run(work, traffic.copy(source.numel(), name), label)
            elif copies:
                device.copy_all(copies, name)
            for event in records:
                stream.record(event)
        if nbytes:
            step.cost.add_copies(nbytes, pulled)

    return issue


def _reads(target: Target, ops: Sequence[Read | Record | Wait]) -> Issue:
    """Return a function that issues ops to the stream of reads."""
    device, calls = target.device, list[methodcaller]()
    for op in ops:
        match op:
            case Wait():
                calls.append(methodcaller("wait", target.events[op.event]))
            case Read():
                calls.append(methodcaller("run", *target.read(op)))
            case Record():
                calls.append(methodcaller("record", target.events[op.event]))

    def issue(_: RunningStep) -> None:
        stream = device.stream("read")
        for call in calls:
            call(stream)

    return issue


def _wait(target: Target, event: Any, window: int | None) -> Issue:
    """Return a function that makes compute wait for an event.

    ``window``: the index of the window to which the stall is added; None if the stall is not counted.
    """
    compute = target.device.compute

    def issue(step: RunningStep) -> None:
        if window is None or (windows := step.cost.windows) is None:
            compute.wait(event)
        else:
            compute.wait(event, partial(_add_stall, windows.exposed_s, window))

    return issue


def _add_stall(stalls_s: MutableSequence[float], window: int, seconds: float) -> None:
    stalls_s[window] += seconds
