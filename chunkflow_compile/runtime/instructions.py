"""Instructions: for each node of a program, the function that issues it to the streams of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import collective_kind, is_wait_tensor, list_of
from chunkflow_compile.passes.ops import EVICT, WAIT, Prefetch, prefetch_of
from chunkflow_compile.passes.plan import runs
from chunkflow_compile.passes.program.lifetimes import over
from chunkflow_compile.passes.program.rewrite import SOURCE
from chunkflow_compile.weights.source import DriveBytes

from .first_call import checked, owning, undeclared
from .host_flag import HostFlag
from .measurement import RegionWatch, WindowSeconds
from .read_ahead import Reading

if TYPE_CHECKING:
    from .executor import Executor


@dataclass
class Cost:
    """What a step has cost so far.  ``windows``: None if it is not measured.  ``moved``: bytes copied.  ``primed``: bytes
    copied before a cold step."""

    windows: WindowSeconds | None = None
    primed: int = 0
    collectives: int = 0
    moved: int = 0


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


def instructions(executor: Executor) -> Iterator[Issue]:
    """The functions that issue the nodes of an executor's program, in their order.

    A region, what takes its outputs apart, and what drops values after it are one, because each costs the host time.
    """
    taken = list[Compute]()
    for found in _in_order(executor):
        if taken and not (isinstance(found, Compute) and found.window is None):
            yield _compute(executor, taken)
            taken = []
        if isinstance(found, Compute):
            taken.append(found)
        else:
            yield found
    if taken:
        yield _compute(executor, taken)


def _in_order(executor: Executor) -> Iterator[Issue | Compute]:
    """For each node, what issues it, or its work; after it, work that drops the values no longer needed.

    After the last region all of them go with the step.
    """
    program, flag = executor.program, executor.flag
    windows = len(program.problem.regions)
    number = {node.name: i for node, i in executor.number.items()}
    opened: int | None = None
    window = 0  # the region that runs next
    for node in program.module.graph.nodes:
        if node.op == "placeholder":
            continue
        issue = _issue(executor, node, min(window, windows - 1))
        window += node.op == "call_module"
        if (op := prefetch_of(node)) is not None:
            assert issue is not None and not isinstance(issue, Compute)
            if op.window != opened:
                issue = partial(_open, executor, issue)
            opened = op.window
        found = (issue,) if flag is None else _flagged(executor, flag, issue, node)
        yield from (each for each in found if each is not None)
        if window < windows and (values := program.releases.get(node.name)):
            yield Compute(partial(_drop, tuple(number[value] for value in values)))


def _flagged(
    executor: Executor, flag: HostFlag, issue: Issue | Compute | None, node: Node
) -> Iterator[Issue | Compute | None]:
    """What issues a node, between what sets and clears the flag."""
    if collective_kind(node) is not None:
        yield lambda step: flag.set()
    if node.target is WAIT and issue is not None:
        # no deadlock: compute beside a collective would wait for a copy that is held
        yield lambda step: flag.drop()
    yield issue
    if _ends(executor, node):
        yield lambda step: flag.clear()


def _compute(executor: Executor, taken: Sequence[Compute]) -> Issue:
    """A function that issues works, of which the first may be a region's, as one."""
    run, window, name = executor.device.compute.run, taken[0].window, taken[0].name
    first, rest = taken[0].work, [each.work for each in taken[1:]]

    def issue(step: Step) -> None:
        env = step.env

        def work() -> None:
            first(env)
            for each in rest:
                each(env)

        windows = step.cost.windows
        run(work, None if window is None or windows is None else RegionWatch(windows, window), name)

    return issue


def _issue(executor: Executor, node: Node, window: int) -> Issue | Compute | None:
    """What issues a node, or its work; None if another event, or the order of a stream, does its work."""
    function: Any = node.target
    if (op := prefetch_of(node)) is not None:
        return prefetch(executor, op, node)
    if node.target is WAIT:
        awaited = executor.marks.awaited.get(node)
        return None if awaited is None else partial(_wait, executor, executor.state.arrived[awaited], window)
    if node.target is EVICT:
        return _evict(executor, str(node.args[0]))
    if node.op == "get_attr":
        constant = getattr(executor.program.module, str(node.target))
        return _call(executor, node, lambda: constant)
    if node.op == "output":
        return _output(executor, node)
    if node.op == "call_module":
        return _call(executor, node, _region(executor, str(node.target), window), window)
    # an element of a collective's results is taken on the collective stream; of awaited results, on compute
    if list_of(node) is not None or collective_kind(node) is not None or is_wait_tensor(node):
        return _collective(executor, node, window)
    if function is getitem:
        number = executor.number
        return Compute(partial(_pick, number[node], number[node.all_input_nodes[0]], node.args[1]))
    return _call(executor, node, function)


def _region(executor: Executor, name: str, window: int) -> Callable[..., Sequence[Any]]:
    read, values = executor.program.problem.regions[window].weights, executor.binding.values
    region = owning(executor.regions[name], [values[w] for w in read if w in values])
    if ops := undeclared(getattr(executor.program.module, name)):
        region = checked(region, {w: values[w] for w in read if w in values}, ops)
    return region


def prefetch(executor: Executor, op: Prefetch, node: Node) -> Issue:
    """A function that issues the copies of a prefetch, and marks their arrival."""
    slot, host = executor.binding.slots[op.weight], executor.binding.hosts[op.weight]
    size = executor.program.plan.chunk_bytes
    first, end = op.first * size, op.end * size
    nbytes = host[first:end].numel()
    # adjacent chunks of one window are one copy, unless the flag is checked before each chunk
    length = size if executor.flag is not None else end - first
    parts = [slice(begin, min(begin + length, end)) for begin in range(first, end, length)]
    ahead = op.weight in executor.on_drive
    copies = [(slot[part], reading(executor, op) if ahead else host[part]) for part in parts]
    name = f"prefetch {op.weight}[{op.first}:{op.end}] window {op.window}"

    def issue(step: Step) -> None:
        for target, source in copies:
            executor.copy(step, target, source, name)
        executor.mark(node)
        step.cost.moved += nbytes

    return issue


def reading(executor: Executor, op: Prefetch) -> Reading:
    """The bytes of a prefetch as the reader of the drive brings them."""
    source, size = executor.binding.hosts[op.weight], executor.program.plan.chunk_bytes
    assert isinstance(source, DriveBytes)
    return Reading(executor.binding.arena.reader, source[op.first * size : op.end * size])


def _open(executor: Executor, issue: Issue, step: Step) -> None:
    executor.device.compute.record(executor.opening)
    executor.device.copy.wait(executor.opening)
    issue(step)


def _wait(executor: Executor, arrival: Any, window: int, step: Step) -> None:
    if (windows := step.cost.windows) is None:
        executor.device.compute.wait(arrival)
        return

    def waited(seconds: float) -> None:
        windows.exposed_s[window] += seconds

    executor.device.compute.wait(arrival, waited)


def _call(executor: Executor, node: Node, function: Callable[..., Any], window: int | None = None) -> Compute:
    """The work of a node.  ``window``: where its compute time counts, or None."""
    number, read, name = executor.number[node], _reader(executor.number, node.args, node.kwargs), ""
    if window is not None:
        region = executor.program.plan.regions[executor.program.start + window]
        name = " ".join(w for w in (node.name, *region) if w)

    def work(env: list[Any]) -> None:
        args, kwargs = read(env)
        env[number] = function(*args, **kwargs)

    return Compute(work, window, name)


def _output(executor: Executor, node: Node) -> Compute:
    """Work that sets the outputs of a step, as a tuple."""
    outputs: Any = node.args[0]
    number, read = executor.number[node], _reader(executor.number, outputs)

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


def _collective(executor: Executor, node: Node, window: int) -> Issue:
    """A function that issues a collective, its completion, or one of its results on the collective stream.

    A collective starts when compute has reached it.  After its completion, compute continues when the collective
    stream has reached that.
    """
    compute, stream = executor.device.compute, executor.device.collective
    started, ended, traffic = executor.started, executor.ended, executor.traffic
    number, read = executor.number[node], _reader(executor.number, node.args, node.kwargs)
    function = _explained(executor, node)
    begins, ends = collective_kind(node) is not None, _ends(executor, node)
    name = str(node.meta.get(SOURCE, node.name))

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
        step.cost.collectives += begins
        if ends and stream is not compute:
            stream.record(ended)
            compute.wait(ended)

    return issue


def _ends(executor: Executor, node: Node) -> bool:
    """Whether a node completes a collective."""
    return is_wait_tensor(node) or (collective_kind(node) is not None and over(node, executor.number) is node)


def _explained(executor: Executor, node: Node) -> Callable[..., Any]:
    """The op of a node of a collective, which gets the number of the step too, with errors that name the collective and
    the fix.  The last completion of the collective reports the bytes received.
    """
    function: Any = node.target
    collective = node
    while collective_kind(collective) is None:
        collective = collective.all_input_nodes[0]
    name = str(collective.meta.get(SOURCE, collective.name))
    crossing = {c.name: c.nbytes for c in executor.program.problem.collectives}
    received = crossing.get(name, 0) if over(collective, executor.number) is node else 0

    def call(step: int, *args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            if received:
                executor.device.received(received)
            return result
        except RuntimeError as error:
            raise ChunkflowError(
                f"The collective {name} failed in step {step}: a rank died or did not arrive in time ({error}). The "
                "model is intact: restore(model) brings its weights back."
            ) from error

    return call


def _evict(executor: Executor, weight: str) -> Compute | None:
    """Work that poisons the evicted bytes, if asked to.

    It needs no event: the opening of the next window over these bytes comes after it on the compute stream.
    """
    if not executor.poison:
        return None
    plan = executor.program.plan
    found = next(w for w in plan.streamed if w.name == weight)
    spans = [plan.span(found, r.first, r.end) for r in runs(found.windows) if r.window is not None]
    pieces = [executor.binding.slots[weight][begin:end] for begin, end in spans]
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


def tuple_getter(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function from a sequence to its elements at ``positions``: one call into C, if there are several."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple(values[position] for position in positions)
