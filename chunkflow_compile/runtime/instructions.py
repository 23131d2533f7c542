"""Instructions: the functions that issue the ops of a step (step.py) to the streams of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import getitem, methodcaller
from typing import Any, cast

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.forms import without_reads
from chunkflow_compile.passes.graph.discover import collective_kind
from chunkflow_compile.passes.graph.listing import SLICING
from chunkflow_compile.passes.names import Lane
from chunkflow_compile.passes.plan import runs
from chunkflow_compile.passes.program.lifetimes import over
from chunkflow_compile.passes.program.rewrite import SOURCE
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
from chunkflow_compile.weights.pieces import Pieces

from .device_base import NamedCopy
from .measurement import RegionWatch
from .target import Issue, RunningStep, Target
from .wrapped_calls import LoweredRegion, checked, explained, owning, repeated, tuple_getter, undeclared

# Work on the values of a step.
Work = Callable[[list[Any]], None]
# Reads the positional and the keyword operands of a node from the values of a step.
Reader = Callable[[list[Any]], tuple[Sequence[Any], Mapping[str, Any]]]


def instructions(target: Target, step: Step, nodes: Iterable[tuple[Node, Step]] = ()) -> list[Issue]:
    """The functions that issue the ops of a step, in their order.  ``nodes``: of the program with their ops, see
    :func:`issued`; none if the step has transfers only.

    A region and the ops of compute after it are one function, and so are the copies and the marks between two of these, and
    adjacent reads, because each function costs the host time.  The copies of one lane between two events are one.
    If the step computes several rows, see :meth:`Executor.run`, a function of compute runs all of its ops but Evict for each
    earlier row, and then all of them for the last row.
    Raises FindingError if the nodes have other ops than the step.
    """
    if not target.on_drive:
        step = without_reads(step, target.cycle.events)
    compiler = _Compiler(target)
    for op, node in _with_nodes(step, nodes):
        compiler.add(op, node)
    compiler.flush()
    return compiler.issues


def _with_nodes(step: Step, nodes: Iterable[tuple[Node, Step]]) -> Iterator[tuple[Op, Node | None]]:
    """Each op with its node: None for a transfer, and for all ops of a node but the first and the Run of a region."""
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


@dataclass(frozen=True)
class _Compute:
    """Work on the values of a step, in the order of the compute stream.

    ``window``: where its time counts, or None.  ``name``: of its region.  ``once``: whether it runs for the last row only.
    """

    work: Work
    window: int | None = None
    name: str = ""
    once: bool = False


@dataclass(frozen=True)
class _Settled:
    """Elements that are taken out of what a region returned, and then values that are dropped, as one function.

    ``picks``: for each element, the number of its value, that of the whole, and its place there.  ``drops``: numbers.
    """

    picks: list[tuple[int, int, Any]] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)

    def work(self) -> Work:
        picks, drops = self.picks, self.drops

        def work(env: list[Any]) -> None:
            for number, whole, element in picks:
                env[number] = env[whole][element]
            for number in drops:
                env[number] = None

        return work


class _Compiler:
    """Makes the functions of a step.  ``issues``: those that are complete."""

    def __init__(self, target: Target) -> None:
        self.issues: list[Issue] = []
        self._target = target
        self._number = {node.name: i for node, i in target.number.items()}
        self._windows = len(target.program.problem.regions)
        self._window = 0  # where stalls count: at the region that runs next, after the last one at that
        self._taken: tuple[int, ...] = ()  # the numbers of the values that the next region takes
        self._computes: list[_Compute] = []
        self._settled: _Settled | None = None  # the newest of these, which later ops may join
        self._transfers: list[Record | Wait | Copy] = []
        self._reads: list[Read | Record | Wait] = []

    def add(self, op: Op, node: Any) -> None:
        """Add an op.  ``node``: see :func:`_with_nodes`."""
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
                self._compute(_region(target, node, op.region, self._taken))
                self._taken = ()
                self._window = min(op.region + 1, self._windows - 1)
            case Start():
                self._issue(_start(target, _beside(target, node, self._window)))
            case Finish():
                completes = node is not None
                self._issue(_finish(target, _beside(target, node, self._window) if completes else None))
            case Evaluate(stream="collective"):
                self._issue(_beside(target, node, self._window))
            case Evaluate() if node.target is getitem:
                number = target.number
                self._settle().picks.append((number[node], number[node.all_input_nodes[0]], node.args[1]))
            case Evaluate():
                self._compute(_Compute(_evaluated(target, node)))
            case Evict():
                if target.poison:
                    self._compute(_Compute(partial(_poison, _evicted(target, op.weight)), once=True))
            case Release():
                numbers = tuple(self._number[value] for value in op.values)
                if node is not None:  # the first op of its node is that of a region
                    self._taken = numbers
                else:
                    self._settle(drops=True).drops.extend(numbers)

    def flush(self) -> None:
        """Complete the newest function."""
        if self._computes:
            self.issues.append(_compute(self._target, self._computes))
        if self._transfers:
            self.issues.append(_transfers(self._target, self._transfers))
        if self._reads:
            self.issues.append(_reads(self._target, self._reads))
        self._computes, self._transfers, self._reads = [], [], []
        self._settled = None

    def _compute(self, compute: _Compute) -> None:
        if self._transfers or self._reads or compute.window is not None:
            self.flush()
        self._computes.append(compute)
        self._settled = None

    def _settle(self, drops: bool = False) -> _Settled:
        """Where to add an element that is picked, or a value that is dropped, which come after the picks."""
        if self._settled is None or (self._settled.drops and not drops):
            settled = _Settled()
            self._compute(_Compute(settled.work()))
            self._settled = settled
        return self._settled

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


def _compute(target: Target, computes: Sequence[_Compute]) -> Issue:
    """A function that issues work of compute, of which the first may be a region's, as one."""
    run, window, name = target.device.compute.run, computes[0].window, computes[0].name
    work = _together([each.work for each in computes])
    repeated = [each.work for each in computes if not each.once]

    def issue(step: RunningStep) -> None:
        if step.earlier and repeated:
            for env in step.earlier:
                run(partial(_do, repeated, env), None, name)
        if window is None or (windows := step.cost.windows) is None:
            run(partial(work, step.env), None, name)
        else:
            run(partial(work, step.env), RegionWatch(windows, window), name)

    return issue


def _together(works: Sequence[Work]) -> Work:
    return works[0] if len(works) == 1 else partial(_do, works)


@dataclass(frozen=True)
class _Part:
    """What a stream is given at once: the events that it waits for, copies, and the events that it records after them."""

    stream: StreamName
    waits: list[Any] = field(default_factory=list)
    copies: list[NamedCopy] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)


def _transfers(target: Target, ops: Sequence[Record | Wait | Copy]) -> Issue:
    """A function that issues ops of the lanes, and the marks of compute between them, in few parts.

    The order of each stream stays, and what is recorded before a wait of any stream.
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

    def timed(part: _Part) -> list[tuple[Callable[[], None], int, str]]:
        """Of each copy its work, bytes and label."""
        return [
            (partial(device.copy_bytes, to, source, cast(Lane, part.stream)), source.numel(), label)
            for to, source, label in part.copies
        ]

    given: list[tuple[Any, list[Any], list[NamedCopy], list[tuple[Callable[[], None], int, str]], list[Any]]]
    given = [(part.stream, part.waits, part.copies, timed(part), part.records) for part in parts]

    def issue(step: RunningStep) -> None:
        measured = step.cost.windows is not None
        for name, waits, copies, works, records in given:
            stream = device.stream(name)
            for event in waits:
                stream.wait(event)
            if copies and measured:
                for work, size, label in works:
                    stream.run(work, traffic.copy(size, name), label)
            elif copies:
                device.copy_all(copies, name)
            for event in records:
                stream.record(event)
        if nbytes:
            step.cost.add_copies(nbytes, pulled)

    return issue


def _reads(target: Target, ops: Sequence[Read | Record | Wait]) -> Issue:
    """A function that issues ops of the stream of reads."""
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
    """A function that lets compute wait for an event.  ``window``: where the stall counts, or None."""
    compute = target.device.compute

    def issue(step: RunningStep) -> None:
        if window is None or (windows := step.cost.windows) is None:
            compute.wait(event)
        else:
            compute.wait(event, partial(_add_stall, windows.exposed_s, window))

    return issue


def _add_stall(stalls_s: MutableSequence[float], window: int, seconds: float) -> None:
    stalls_s[window] += seconds


def _region(target: Target, node: Node, index: int, taken: Sequence[int]) -> _Compute:
    """The work of a region.  ``index``: in the problem of the program.  ``taken``: the values that it is the last to read."""
    program, values, module = target.program, target.binding.values, str(node.target)
    read = program.problem.regions[index].weights
    number, take = target.number[node], tuple_getter([target.number[operand] for operand in node.args])
    region = target.regions[module]
    if (slicing := node.meta.get(SLICING)) is not None:
        outputs = sorted(node.users, key=lambda user: cast(int, user.args[1]))
        region = repeated(region, slicing, [output.meta["val"] for output in outputs])
    # one that is recorded was checked
    if not target.device.records and (ops := undeclared(getattr(program.module, module))):
        region = checked(region, {w: values[w] for w in read if w in values}, ops)

    def settled(later: LoweredRegion) -> None:
        nonlocal region
        region = later

    region = owning(region, [values[w] for w in read if w in values], settled)

    def work(env: list[Any]) -> None:
        inputs = [*take(env)]
        for value in taken:
            env[value] = None
        env[number] = region(inputs)

    named = program.plan.regions[program.start + index]
    return _Compute(work, index, " ".join(w for w in (node.name, *named) if w))


def _evaluated(target: Target, node: Node) -> Work:
    """The work of a node that is no region, and no element of what one returns: a constant, another op, or the outputs."""
    place, function = target.number, cast(Any, node.target)
    number = place[node]
    if node.op == "get_attr":
        return partial(_put, number, getattr(target.program.module, str(node.target)))
    if node.op == "output":
        return partial(_output, number, _reader(place, cast(Any, node.args[0])))
    return partial(_call, number, function, _reader(place, node.args, node.kwargs))


def _reader(number: Mapping[Node, int], operands: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Reader:
    """A function from a step's values, by the ``number`` of their nodes, to operands of a node."""
    kwargs = kwargs or {}
    if not kwargs and all(isinstance(a, Node) for a in operands):  # such as those of regions
        take = tuple_getter([number[a] for a in operands])
        return lambda env: (take(env), kwargs)
    nested = list[Node]()
    map_arg([a for a in operands if not isinstance(a, Node)], nested.append)
    if not kwargs and not nested:  # such as those of collectives
        places = [(number[a], None) if isinstance(a, Node) else (-1, a) for a in operands]
        return lambda env: ([constant if n < 0 else env[n] for n, constant in places], kwargs)

    def read(env: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return map_arg((operands, kwargs), lambda n: env[number[n]])

    return read


def _beside(target: Target, node: Node, window: int) -> Issue:
    """A function that issues a collective, its completion, or one of its results to the collective stream."""
    stream, traffic = target.device.collective, target.traffic
    number, read = target.number[node], _reader(target.number, node.args, node.kwargs)
    name, function = str(node.meta.get(SOURCE, node.name)), _explained(target, node)

    def issue(step: RunningStep) -> None:
        env, at = step.env, step.number

        def work() -> None:
            args, kwargs = read(env)
            env[number] = function(at, *args, **kwargs)

        windows = step.cost.windows
        stream.run(work, None if windows is None else traffic.collective(windows, window), name)

    return issue


def _start(target: Target, collective: Issue) -> Issue:
    """A function that starts a collective when compute has reached it."""
    compute, stream, started = target.device.compute, target.device.collective, target.started

    def issue(step: RunningStep) -> None:
        if stream is not compute:
            compute.record(started)
            stream.wait(started)
        collective(step)
        step.cost.add_collective()

    return issue


def _finish(target: Target, completion: Issue | None) -> Issue:
    """A function that lets compute wait for the end of a collective.  ``completion``: issues what completes it, None for one
    that completes itself."""
    compute, stream, ended = target.device.compute, target.device.collective, target.ended

    def issue(step: RunningStep) -> None:
        if completion is not None:
            completion(step)
        if stream is not compute:
            stream.record(ended)
            compute.wait(ended)

    return issue


def _explained(target: Target, node: Node) -> Callable[..., Any]:
    """The op of a node of a collective, see :func:`explained`.  The last completion of it reports the bytes received."""
    collective, function = node, node.target
    while collective_kind(collective) is None:
        collective = collective.all_input_nodes[0]
    name = str(collective.meta.get(SOURCE, collective.name))
    crossing = {c.name: c.nbytes for c in target.program.problem.collectives}
    nbytes = crossing.get(name, 0) if over(collective, target.number) is node else 0
    return explained(
        cast(Callable[..., Any], function), name, partial(target.device.received, nbytes) if nbytes else None
    )


def _evicted(target: Target, weight: str) -> list[torch.Tensor]:
    """The bytes of a weight that are copied in each step.

    To poison them needs no event: the opening of the next window over these bytes comes after it on the compute stream.
    """
    plan = target.program.plan
    placed = next(w for w in plan.streamed if w.name == weight)
    spans = [plan.span(placed, r.first, r.end) for r in runs(placed.windows) if r.window is not None]
    return [target.binding.slots[weight][begin:end] for begin, end in spans]


def _do(works: Sequence[Work], env: list[Any]) -> None:
    for work in works:
        work(env)


def _put(number: int, value: Any, env: list[Any]) -> None:
    env[number] = value


def _call(number: int, function: Callable[..., Any], read: Reader, env: list[Any]) -> None:
    args, kwargs = read(env)
    env[number] = function(*args, **kwargs)


def _output(number: int, read: Reader, env: list[Any]) -> None:
    """Set the outputs of a step, as a tuple."""
    env[number] = tuple(read(env)[0])


def _poison(pieces: Sequence[torch.Tensor], env: list[Any]) -> None:
    """Set all bits, which is NaN in every floating type except the ``fnuz`` variants of float8."""
    for piece in pieces:
        piece.fill_(255)
