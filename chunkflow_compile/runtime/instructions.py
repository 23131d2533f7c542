"""Instructions: for each node of a program, the function that issues it to the streams of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem, itemgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import collective_kind, is_wait_tensor, list_of
from chunkflow_compile.passes.ops import EVICT, WAIT, Prefetch, prefetch_of
from chunkflow_compile.passes.plan import runs
from chunkflow_compile.passes.program.arrivals import Arrivals
from chunkflow_compile.passes.program.lifetimes import over
from chunkflow_compile.passes.program.rewrite import SOURCE, Program
from chunkflow_compile.weights.source import DriveBytes, Source

from .arena import Binding, SlotState
from .first_call import owning, reading, undeclared
from .host_flag import HostFlag
from .measurement import RegionWatch, WindowSeconds
from .read_ahead import Reading
from .traffic import Traffic


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


class Issuer:
    """Makes the instructions of one program.

    ``traffic``: the transfers that they issue.  ``flag``: holds copies back beside collectives, in the policy that does so.
    ``on_drive``: weights that the arena's reader brings from the drive.  ``number``: of each node, its place in a step.
    """

    def __init__(
        self,
        program: Program,
        regions: Mapping[str, Callable[..., Sequence[Any]]],
        binding: Binding,
        *,
        state: SlotState,
        arrivals: Arrivals,
        poison: bool,
    ) -> None:
        """``binding``, ``state``: the memory of the program, and what lies in it.  ``arrivals``: of its cycle.

        ``poison``: whether to overwrite the bytes of an evicted weight, so a late reader sees NaN.
        """
        self.binding = binding
        self.traffic = Traffic()
        self.flag = HostFlag() if program.plan.policy == "host-yield" else None
        # checked chunk by chunk, copies read the drive themselves
        held = {} if self.flag is not None else binding.hosts
        self.on_drive = frozenset(name for name, source in held.items() if isinstance(source, DriveBytes))
        self.number = {n: i for i, n in enumerate(program.module.graph.nodes)}
        self._program = program
        self._regions = regions
        self._device = device = binding.arena.streams
        self._state = state
        self._arrivals = arrivals
        self._poison = poison
        self._opening, self._started, self._ended = device.event(), device.event(), device.event()
        self._crossing = {c.name: c.nbytes for c in program.problem.collectives}

    def instructions(self) -> Iterator[Issue]:
        """The functions that issue the nodes of the program, in their order.

        A region, what takes its outputs apart, and what drops values after it are one, because each costs the host time.
        """
        taken = list[Compute]()
        for found in self._in_order():
            if taken and not (isinstance(found, Compute) and found.window is None):
                yield self._compute(taken)
                taken = []
            if isinstance(found, Compute):
                taken.append(found)
            else:
                yield found
        if taken:
            yield self._compute(taken)

    def _in_order(self) -> Iterator[Issue | Compute]:
        """For each node, what issues it, or its work; after it, work that drops the values no longer needed.

        After the last region all of them go with the step.
        """
        module, windows = self._program.module, len(self._program.problem.regions)
        number = {node.name: i for node, i in self.number.items()}
        opened: int | None = None
        window = 0  # the region that runs next
        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            issue = self._issue(module, node, min(window, windows - 1))
            window += node.op == "call_module"
            if (prefetch := prefetch_of(node)) is not None:
                assert issue is not None and not isinstance(issue, Compute)
                if prefetch.window != opened:
                    issue = partial(self._open, issue)
                opened = prefetch.window
            found = (issue,) if self.flag is None else self._flagged(self.flag, issue, node)
            yield from (each for each in found if each is not None)
            if window < windows and (values := self._program.releases.get(node.name)):
                yield Compute(partial(_drop, tuple(number[value] for value in values)))

    def _flagged(self, flag: HostFlag, issue: Issue | Compute | None, node: Node) -> Iterator[Issue | Compute | None]:
        """What issues a node, between what sets and clears the flag."""
        if collective_kind(node) is not None:
            yield lambda step: flag.set()
        if node.target is WAIT and issue is not None:
            yield (
                lambda step: flag.drop()
            )  # no deadlock: compute beside a collective would wait for a copy that is held
        yield issue
        if self._ends(node):
            yield lambda step: flag.clear()

    def _compute(self, taken: Sequence[Compute]) -> Issue:
        """A function that issues works, of which the first may be a region's, as one."""
        run, window, name = self._device.compute.run, taken[0].window, taken[0].name
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

    def _issue(self, module: GraphModule, node: Node, window: int) -> Issue | Compute | None:
        """What issues a node, or its work; None if another event, or the order of a stream, does its work."""
        function: Any = node.target
        if (prefetch := prefetch_of(node)) is not None:
            return self.prefetch(prefetch, node)
        if node.target is WAIT:
            awaited = self._arrivals.awaited.get(node)
            return None if awaited is None else partial(self._wait, self._state.arrived[awaited], window)
        if node.target is EVICT:
            return self._evict(str(node.args[0]))
        if node.op == "get_attr":
            constant = getattr(module, str(node.target))
            return self._call(node, lambda: constant)
        if node.op == "output":
            return self._output(node)
        if node.op == "call_module":
            return self._call(node, self._region(module, str(node.target), window), window)
        # an element of a collective's results is taken on the collective stream; of awaited results, on compute
        if list_of(node) is not None or collective_kind(node) is not None or is_wait_tensor(node):
            return self._collective(node, window)
        if function is getitem:
            return Compute(partial(_pick, self.number[node], self.number[node.all_input_nodes[0]], node.args[1]))
        return self._call(node, function)

    def _region(self, module: GraphModule, name: str, window: int) -> Callable[..., Sequence[Any]]:
        read, values = self._program.problem.regions[window].weights, self.binding.values
        region = owning(self._regions[name], [values[w] for w in read if w in values])
        if ops := undeclared(getattr(module, name)):
            region = reading(region, {w: values[w] for w in read if w in values}, ops)
        return region

    def mark(self, copied: Node | str) -> None:
        """Record the arrival after a copy, if a region waits for it."""
        if (number := self._arrivals.marked.get(copied)) is not None:
            self._device.copy.record(self._state.arrived[number])

    def prefetch(self, prefetch: Prefetch, node: Node) -> Issue:
        """A function that issues the copies of a prefetch, and marks their arrival."""
        weight = prefetch.weight
        slot, host, size = self.binding.slots[weight], self.binding.hosts[weight], self._program.plan.chunk_bytes
        first, end = prefetch.first * size, prefetch.end * size
        nbytes = host[first:end].numel()
        # adjacent chunks of one window are one copy, unless the flag is checked before each chunk
        length = size if self.flag is not None else end - first
        parts = [slice(begin, min(begin + length, end)) for begin in range(first, end, length)]
        reading = weight in self.on_drive
        copies = [(slot[part], self.reading(prefetch) if reading else host[part]) for part in parts]
        name = f"prefetch {weight}[{prefetch.first}:{prefetch.end}] window {prefetch.window}"

        def issue(step: Step) -> None:
            for target, source in copies:
                self.copy(step, target, source, name)
            self.mark(node)
            step.cost.moved += nbytes

        return issue

    def copy(self, step: Step, target: torch.Tensor, source: Source | Reading, name: str) -> None:
        """Enqueue a copy of a step on the copy stream."""
        if self.flag is not None:
            self._device.copy.run(self.flag.hold)
        work = partial(self._device.copy_bytes, target, source)
        watch = None if step.cost.windows is None else self.traffic.copy(source.numel())
        self._device.copy.run(work, watch, name)

    def reading(self, op: Prefetch) -> Reading:
        """The bytes of a prefetch as the reader of the drive brings them."""
        source, size = self.binding.hosts[op.weight], self._program.plan.chunk_bytes
        assert isinstance(source, DriveBytes)
        return Reading(self.binding.arena.reader, source[op.first * size : op.end * size])

    def _open(self, issue: Issue, step: Step) -> None:
        self._device.compute.record(self._opening)
        self._device.copy.wait(self._opening)
        issue(step)

    def _wait(self, arrival: Any, window: int, step: Step) -> None:
        if (windows := step.cost.windows) is None:
            self._device.compute.wait(arrival)
            return

        def waited(seconds: float) -> None:
            windows.exposed_s[window] += seconds

        self._device.compute.wait(arrival, waited)

    def _call(self, node: Node, function: Callable[..., Any], window: int | None = None) -> Compute:
        """The work of a node.  ``window``: where its compute time counts, or None."""
        number, read = self.number[node], self._reader(node.args, node.kwargs)
        name = (
            ""
            if window is None
            else " ".join(w for w in (node.name, *self._program.plan.regions[self._program.start + window]) if w)
        )

        def work(env: list[Any]) -> None:
            args, kwargs = read(env)
            env[number] = function(*args, **kwargs)

        return Compute(work, window, name)

    def _output(self, node: Node) -> Compute:
        """Work that sets the outputs of a step, as a tuple."""
        outputs: Any = node.args[0]
        number, read = self.number[node], self._reader(outputs)

        def work(env: list[Any]) -> None:
            env[number] = tuple(read(env)[0])

        return Compute(work)

    def _reader(
        self, operands: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Callable[[list[Any]], tuple[Sequence[Any], Mapping[str, Any]]]:
        """A function from a step's values to operands of a node."""
        number, kwargs = self.number, kwargs or {}
        if not kwargs and all(isinstance(a, Node) for a in operands):  # such as those of regions
            take = tuple_getter([number[a] for a in operands])
            return lambda env: (take(env), kwargs)
        if not kwargs and not any(isinstance(a, (list, tuple, dict, slice)) for a in operands):
            places = [(number[a], None) if isinstance(a, Node) else (-1, a) for a in operands]
            return lambda env: ([constant if n < 0 else env[n] for n, constant in places], kwargs)

        def read(env: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
            return map_arg((operands, kwargs), lambda n: env[number[n]])

        return read

    def _collective(self, node: Node, window: int) -> Issue:
        """A function that issues a collective, its completion, or one of its results on the collective stream.

        A collective starts when compute has reached it.  After its completion, compute continues when the collective
        stream has reached that.
        """
        compute, stream, started, ended = self._device.compute, self._device.collective, self._started, self._ended
        number, function, read = self.number[node], self._told(node), self._reader(node.args, node.kwargs)
        begins, ends = collective_kind(node) is not None, self._ends(node)
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
            stream.run(work, None if windows is None else self.traffic.collective(windows, window), name)
            step.cost.collectives += begins
            if ends and stream is not compute:
                stream.record(ended)
                compute.wait(ended)

        return issue

    def _ends(self, node: Node) -> bool:
        """Whether a node completes a collective."""
        return is_wait_tensor(node) or (collective_kind(node) is not None and over(node, self.number) is node)

    def _told(self, node: Node) -> Callable[..., Any]:
        """The op of a node of a collective, which gets the number of the step too, with errors that name the collective and
        the fix.  The last completion of the collective reports the bytes received.
        """
        function: Any = node.target
        collective = node
        while collective_kind(collective) is None:
            collective = collective.all_input_nodes[0]
        name = str(collective.meta.get(SOURCE, collective.name))
        brought = self._crossing.get(name, 0) if over(collective, self.number) is node else 0

        def call(step: int, *args: Any, **kwargs: Any) -> Any:
            try:
                result = function(*args, **kwargs)
                if brought:
                    self._device.received(brought)
                return result
            except RuntimeError as error:
                raise ChunkflowError(
                    f"The collective {name} failed in step {step}: a rank died or did not arrive in time ({error}). The "
                    "model is intact: restore(model) brings its weights back."
                ) from error

        return call

    def _evict(self, weight: str) -> Compute | None:
        """Work that poisons the evicted bytes, if asked to.

        It needs no event: the opening of the next window over these bytes comes after it on the compute stream.
        """
        if not self._poison:
            return None
        plan = self._program.plan
        found = next(w for w in plan.streamed if w.name == weight)
        spans = [plan.span(found, r.first, r.end) for r in runs(found.windows) if r.window is not None]
        pieces = [self.binding.slots[weight][begin:end] for begin, end in spans]
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
