"""Instructions: for each node of a program, the function that issues it to the streams of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem
from typing import Any, cast

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from chunkflow_compile.passes.graph.discover import collective_kind, is_wait_tensor, list_of
from chunkflow_compile.passes.names import Moves
from chunkflow_compile.passes.ops import Prefetch, transfer_of
from chunkflow_compile.passes.plan import runs
from chunkflow_compile.passes.program.cycle import Cycle
from chunkflow_compile.passes.program.lifetimes import over
from chunkflow_compile.passes.program.rewrite import SOURCE, Program, issued
from chunkflow_compile.passes.step import Copy as CopyOp
from chunkflow_compile.passes.step import Evict, Record
from chunkflow_compile.passes.step import Wait as WaitOp
from chunkflow_compile.weights.pieces import Pieces
from chunkflow_compile.weights.source import DriveBytes

from .arena import Binding
from .arena_contents import ArenaContents
from .device_base import Copy, Device
from .measurement import RegionWatch, WindowSeconds
from .read_ahead import Reading
from .traffic import Traffic
from .wrapped_calls import checked, explained, owning, tuple_getter, undeclared


@dataclass
class Cost:
    """What a step has cost so far.  ``windows``: None if it is not measured.  ``moved``: bytes copied, ``pulled``: from other
    ranks among them.  ``primed``: bytes copied before a cold step.  ``issue_s``: seconds of the host."""

    windows: WindowSeconds | None = None
    primed: int = 0
    collectives: int = 0
    moved: int = 0
    pulled: int = 0
    issue_s: float = 0.0

    def add_copies(self, nbytes: int, pulled: int = 0) -> None:
        """Copies were issued."""
        self.moved += nbytes
        self.pulled += pulled

    def add_collective(self) -> None:
        """A collective was issued."""
        self.collectives += 1

    def end_priming(self) -> None:
        """All copies so far were issued before the step."""
        self.primed, self.moved, self.pulled = self.moved, 0, 0

    def end_issue(self, seconds: float) -> None:
        """The host has issued the step in ``seconds``."""
        self.issue_s = seconds


@dataclass
class Step:
    """One run: the values of the program's nodes by number, and its cost, which is complete later than its outputs.

    ``number``: that of the step.
    """

    env: list[Any]
    cost: Cost
    number: int

    @property
    def outputs(self) -> Any:
        """The program's outputs; valid after :meth:`Device.deliver`."""
        return self.env[-1]


Issue = Callable[[Step], None]


@dataclass(frozen=True)
class Compute:
    """Work on the values of a step, in the order of the compute stream.

    ``window``: where its time counts, or None.  ``name``: of its region.
    """

    work: Callable[[list[Any]], None]
    window: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Fetch:
    """The copies of a prefetch, in the lane ``moves``.  ``after``: the event for which the lane waits before them, or None.
    ``then``: the event that it records after them, or None.  ``opens``: whether compute records ``after`` before."""

    copies: Sequence[Copy]
    moves: Moves
    after: int | None = None
    then: int | None = None
    opens: bool = False


class OnDevice:
    """A program on the memory and the streams of a device: what its instructions refer to.

    ``traffic``: the transfers that they issue.  ``records``: whether the device records the call.  ``on_drive``: weights that
    the arena's reader brings from the drive.  ``number``: of each node, its place in a step.
    """

    def __init__(
        self,
        program: Program,
        regions: Mapping[str, Callable[..., Sequence[Any]]],
        binding: Binding,
        poison: bool,
        cycle: Cycle,
        device: Device | None = None,
    ) -> None:
        """``poison``: whether to overwrite the bytes of an evicted weight, so a late reader sees NaN.  ``cycle``: that of
        which the program is a call.  ``device``: another one than the arena's, which records the call."""
        self.program = program
        self.regions = regions
        self.cycle = cycle
        self.records = device is not None
        self.device = device = device or binding.arena.streams
        self.binding = binding
        self.poison = poison
        self.state = binding.state or ArenaContents(device, cycle.event_count)
        self.traffic = Traffic()
        pulled = program.plan.pulled  # one of them that has no pieces any more is read as it is copied
        self.on_drive = frozenset(
            n for n, source in binding.hosts.items() if isinstance(source, DriveBytes) and n not in pulled
        )
        if pulled:
            device.lane("pull")  # now, because a step makes no stream
        self.number = {n: i for i, n in enumerate(program.module.graph.nodes)}
        self.started, self.ended = device.event(), device.event()

    def copy(self, step: Step, copies: Sequence[Copy], moves: Moves) -> None:
        """Enqueue copies of a step in a lane."""
        if step.cost.windows is None:
            self.device.copy_all(copies, moves)
            return
        lane = self.device.lane(moves)
        for target, source, name in copies:
            work = partial(self.device.copy_bytes, target, source, moves)
            lane.run(work, self.traffic.copy(source.numel(), moves), name)

    def arrived(self, event: int, moves: Moves) -> None:
        """Record an arrival after a copy in a lane."""
        self.device.lane(moves).record(self.state.events[event])


def instructions(on: OnDevice) -> Iterator[Issue]:
    """The functions that issue the nodes of a program, in their order.

    A region, what takes its outputs apart, and what drops values after it are one, and so are the copies of a window,
    because each costs the host time.
    """
    works, fetches = list[Compute](), list[Fetch]()
    for issue in _in_order(on):
        if works and not (isinstance(issue, Compute) and issue.window is None):
            yield _compute(on, works)
            works = []
        if fetches and not (isinstance(issue, Fetch) and not issue.opens):
            yield fetched(on, fetches)
            fetches = []
        if isinstance(issue, Compute):
            works.append(issue)
        elif isinstance(issue, Fetch):
            fetches.append(issue)
        else:
            yield issue
    if works:
        yield _compute(on, works)
    if fetches:
        yield fetched(on, fetches)


def _in_order(on: OnDevice) -> Iterator[Issue | Compute | Fetch]:
    """For each node, what issues it, or its work or copies; after it, work that drops the values no longer needed.

    After the last region all of them go with the step.
    """
    program = on.program
    windows = len(program.problem.regions)
    number = {node.name: i for node, i in on.number.items()}
    window = 0  # the region that runs next
    for node, ops in issued(program):
        if node.op == "placeholder":
            continue
        issue = _issue(on, node, min(window, windows - 1))
        window += node.op == "call_module"
        if isinstance(issue, Fetch):
            issue = replace(issue, opens=isinstance(ops[0], Record))
        if issue is not None:
            yield issue
        if window < windows and (values := program.releases.get(node.name)):
            yield Compute(partial(_drop, tuple(number[value] for value in values)))


def _compute(on: OnDevice, taken: Sequence[Compute]) -> Issue:
    """A function that issues works, of which the first may be a region's, as one."""
    run, window, name = on.device.compute.run, taken[0].window, taken[0].name
    works = [each.work for each in taken]

    def work(env: list[Any]) -> None:
        for each in works:
            each(env)

    if window is None:
        return lambda step: run(partial(work, step.env), None, name)

    def issue(step: Step) -> None:
        windows = step.cost.windows
        run(partial(work, step.env), None if windows is None else RegionWatch(windows, window), name)

    return issue


def _issue(on: OnDevice, node: Node, window: int) -> Issue | Compute | Fetch | None:
    """What issues a node, or its work or copies; None if another event, or the order of a stream, does its work."""
    function: Any = node.target
    transfer = transfer_of(node)
    if isinstance(transfer, Prefetch):
        return prefetch(on, transfer)
    if isinstance(transfer, WaitOp):
        return partial(_wait, on, on.state.events[transfer.event], window)
    if isinstance(transfer, Evict):
        return _evict(on, transfer.weight)
    if node.op == "get_attr":
        constant = getattr(on.program.module, str(node.target))
        return _call(on, node, lambda: constant)
    if node.op == "output":
        return _output(on, node)
    if node.op == "call_module":
        return _region(on, node, window)
    # an element of a collective's results is taken on the collective stream; of awaited results, on compute
    if list_of(node) is not None or collective_kind(node) is not None or is_wait_tensor(node):
        return _collective(on, node, window)
    if function is getitem:
        number = on.number
        return Compute(partial(_pick, number[node], number[node.all_input_nodes[0]], node.args[1]))
    return _call(on, node, function)


def _region(on: OnDevice, node: Node, window: int) -> Compute:
    """The work of a region.  ``window``: where its compute time counts."""
    read, values, module = on.program.problem.regions[window].weights, on.binding.values, str(node.target)
    number, take = on.number[node], tuple_getter([on.number[operand] for operand in node.args])
    region = on.regions[module]
    if not on.records and (ops := undeclared(getattr(on.program.module, module))):  # one that is recorded was checked
        region = checked(region, {w: values[w] for w in read if w in values}, ops)

    def settled(later: Callable[..., Sequence[Any]]) -> None:
        nonlocal region
        region = later

    region = owning(region, [values[w] for w in read if w in values], settled)

    def work(env: list[Any]) -> None:
        env[number] = region(*take(env))

    named = on.program.plan.regions[on.program.start + window]
    return Compute(work, window, " ".join(w for w in (node.name, *named) if w))


def prefetch(on: OnDevice, op: Prefetch) -> Fetch:
    """The copies of a prefetch, with their events."""
    chunks = op.copy
    slot, host = on.binding.slots[chunks.weight], on.binding.hosts[chunks.weight]
    size = on.program.plan.chunk_bytes
    span = slice(chunks.first * size, chunks.end * size)  # adjacent chunks of one window are one copy
    source = reading(on, chunks) if chunks.weight in on.on_drive else host[span]
    name = f"prefetch {chunks.weight}[{chunks.first}:{chunks.end}] window {chunks.window}"
    return Fetch([(slot[span], source, name)], chunks.stream, op.after, op.then)


def fetched(on: OnDevice, fetches: Sequence[Fetch]) -> Issue:
    """A function that issues the copies of a window, each run of them in a lane between two events as one."""
    parts, begun = list[Fetch](), dict[Moves, Fetch]()
    for fetch in fetches:
        if fetch.after is not None and (before := begun.pop(fetch.moves, None)) is not None:
            parts.append(before)
        before = begun.get(fetch.moves, replace(fetch, copies=()))
        begun[fetch.moves] = replace(before, copies=(*before.copies, *fetch.copies), then=fetch.then)
        if fetch.then is not None:
            parts.append(begun.pop(fetch.moves))
    parts += begun.values()
    first = fetches[0]
    opening = on.state.events[first.after] if first.opens and first.after is not None else None
    moved = [copy for part in parts for copy in part.copies]
    nbytes = sum(target.numel() for target, _, _ in moved)
    pulled = sum(source.from_others for _, source, _ in moved if isinstance(source, Pieces))

    def issue(step: Step) -> None:
        if opening is not None:
            on.device.compute.record(opening)
        for part in parts:
            if part.after is not None:
                on.device.lane(part.moves).wait(on.state.events[part.after])
            on.copy(step, part.copies, part.moves)
            if part.then is not None:
                on.arrived(part.then, part.moves)
        step.cost.add_copies(nbytes, pulled)

    return issue


def reading(on: OnDevice, op: CopyOp) -> Reading:
    """The bytes of a copy as the reader of the drive brings them."""
    source, size = on.binding.hosts[op.weight], on.program.plan.chunk_bytes
    assert isinstance(source, DriveBytes)
    return Reading(on.binding.arena.reader, source[op.first * size : op.end * size])


def _wait(on: OnDevice, arrival: Any, window: int, step: Step) -> None:
    if (windows := step.cost.windows) is None:
        on.device.compute.wait(arrival)
        return

    def waited(seconds: float) -> None:
        windows.exposed_s[window] += seconds

    on.device.compute.wait(arrival, waited)


def _call(on: OnDevice, node: Node, function: Callable[..., Any]) -> Compute:
    """The work of a node that is no region."""
    number, read = on.number[node], _reader(on.number, node.args, node.kwargs)

    def work(env: list[Any]) -> None:
        args, kwargs = read(env)
        env[number] = function(*args, **kwargs)

    return Compute(work)


def _output(on: OnDevice, node: Node) -> Compute:
    """Work that sets the outputs of a step, as a tuple."""
    outputs: Any = node.args[0]
    number, read = on.number[node], _reader(on.number, outputs)

    def work(env: list[Any]) -> None:
        env[number] = tuple(read(env)[0])

    return Compute(work)


def _reader(
    number: Mapping[Node, int], operands: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Callable[[list[Any]], tuple[Sequence[Any], Mapping[str, Any]]]:
    """A function from a step's values, by the ``number`` of their nodes, to operands of a node."""
    kwargs = kwargs or {}
    if not kwargs and all(isinstance(a, Node) for a in operands):  # such as those of regions
        take = tuple_getter([number[a] for a in operands])
        return lambda env: (take(env), kwargs)
    if not kwargs and not any(isinstance(a, (list, tuple, dict, slice)) for a in operands):
        places = [(number[a], None) if isinstance(a, Node) else (-1, a) for a in operands]
        return lambda env: ([constant if n < 0 else env[n] for n, constant in places], kwargs)

    def read(env: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return map_arg((operands, kwargs), lambda n: env[number[n]])

    return read


def _collective(on: OnDevice, node: Node, window: int) -> Issue:
    """A function that issues a collective, its completion, or one of its results on the collective stream.

    A collective starts when compute has reached it.  After its completion, compute continues when the collective
    stream has reached that.
    """
    compute, stream = on.device.compute, on.device.collective
    started, ended, traffic = on.started, on.ended, on.traffic
    number, read = on.number[node], _reader(on.number, node.args, node.kwargs)
    begins, ends = collective_kind(node) is not None, _ends(on, node)
    name, function = str(node.meta.get(SOURCE, node.name)), _op(on, node)

    def issue(step: Step) -> None:
        env, at = step.env, step.number

        def work() -> None:
            args, kwargs = read(env)
            env[number] = function(at, *args, **kwargs)

        if begins and stream is not compute:
            compute.record(started)
            stream.wait(started)
        windows = step.cost.windows
        stream.run(work, None if windows is None else traffic.collective(windows, window), name)
        if begins:
            step.cost.add_collective()
        if ends and stream is not compute:
            stream.record(ended)
            compute.wait(ended)

    return issue


def _ends(on: OnDevice, node: Node) -> bool:
    """Whether a node completes a collective."""
    return is_wait_tensor(node) or (collective_kind(node) is not None and over(node, on.number) is node)


def _op(on: OnDevice, node: Node) -> Callable[..., Any]:
    """The op of a node of a collective, see :func:`explained`.  The last completion of it reports the bytes received."""
    collective, function = node, node.target
    while collective_kind(collective) is None:
        collective = collective.all_input_nodes[0]
    name = str(collective.meta.get(SOURCE, collective.name))
    crossing = {c.name: c.nbytes for c in on.program.problem.collectives}
    nbytes = crossing.get(name, 0) if over(collective, on.number) is node else 0
    return explained(cast(Callable[..., Any], function), name, partial(on.device.received, nbytes) if nbytes else None)


def _evict(on: OnDevice, weight: str) -> Compute | None:
    """Work that poisons the evicted bytes, if asked to.

    It needs no event: the opening of the next window over these bytes comes after it on the compute stream.
    """
    if not on.poison:
        return None
    plan = on.program.plan
    placed = next(w for w in plan.streamed if w.name == weight)
    spans = [plan.span(placed, r.first, r.end) for r in runs(placed.windows) if r.window is not None]
    pieces = [on.binding.slots[weight][begin:end] for begin, end in spans]
    return Compute(partial(_poison, pieces))


def _pick(number: int, whole: int, element: Any, env: list[Any]) -> None:
    env[number] = env[whole][element]


def _drop(numbers: Sequence[int], env: list[Any]) -> None:
    for number in numbers:
        env[number] = None


def _poison(pieces: Sequence[torch.Tensor], env: list[Any]) -> None:
    """Set all bits, which is NaN in every floating type except the ``fnuz`` variants of float8."""
    for piece in pieces:
        piece.fill_(255)
