"""The executor: issues the nodes of a program, in program order, to the streams of a device.

Only these events order the streams:

* the opening of a window, recorded on the compute stream after the last reader of the bytes that its chunks overwrite
  (``verify`` proves that); the chunks wait for it;
* the arrival of a region's weights, recorded on the copy stream after the newest chunk issued for any of them; the
  region waits for it;
* the handover of the arena, recorded on the compute stream after whatever ran in the arena before; the first copies of
  a cold start or a jump wait for it; if a jump leads between the wait for a weight and its last reader, compute waits for
  these copies;
* the start and the end of a collective, if collectives have a stream of their own: the collective waits for its start,
  recorded on the compute stream, and compute waits for its end where the program awaits the collective.

A value is dropped on the compute stream where the program says so (``Program.releases``).  ``verify`` proves that no
later op reads it, and that compute has waited for every collective that uses it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import collective_kind, is_wait_tensor, list_of
from chunkflow_compile.passes.ops import EVICT, WAIT, Prefetch, prefetch_of
from chunkflow_compile.passes.plan import runs
from chunkflow_compile.passes.program.arrivals import arrivals
from chunkflow_compile.passes.program.course import Course, border
from chunkflow_compile.passes.program.lifetimes import over
from chunkflow_compile.passes.program.reads import Reads, reads_from
from chunkflow_compile.passes.program.rewrite import SOURCE, Program
from chunkflow_compile.weights.source import DriveBytes, Source

from .arena import Occupancy
from .binding import Binding, Cost, Step
from .host_flag import HostFlag
from .measurement import RegionWatch, StepMeasurement, no_seconds
from .outputs import owning
from .read_ahead import Reading
from .traffic import Traffic

# An hour of steps of one second; older measurements are dropped.
KEPT_MEASUREMENTS = 3600


_Issue = Callable[[Step], None]


@dataclass(frozen=True)
class _Cold:
    """What a cold start copies: ``kept`` chunks as weight, slot bytes and host bytes, then ``prefetches``.

    ``waits``: whether compute waits for all of it.  ``reads``: what the drive brings from this call on.
    """

    kept: Sequence[tuple[str, torch.Tensor, Source]]
    prefetches: Sequence[_Issue]
    waits: bool
    reads: Reads


class Executor:
    """Runs a program on a device, one step at a time.  Not thread-safe: the caller holds the lock of the arena."""

    def __init__(
        self,
        program: Program,
        regions: Mapping[str, Callable[..., Sequence[Any]]],
        binding: Binding,
        poison: bool = False,
        course: Course | None = None,
        measurements: Sequence[deque[StepMeasurement]] = (),
    ) -> None:
        """``poison``: whether to overwrite the bytes of an evicted weight, so a late reader sees NaN.

        ``course``: that of which the program is a call.  ``measurements``: where to write those of the steps.
        """
        self.program = program
        self.course = course or Course.of(program)
        self.call = next(i for i, call in enumerate(self.course.calls) if call is program)
        self._poison = poison
        self.device = device = binding.arena.streams
        self.binding = binding
        self._measurements = measurements
        self._steps = 0
        self.traffic = Traffic()
        self._flag = HostFlag() if program.plan.policy == "host-yield" else None
        self._regions = regions
        self._handover, self._opening, self._primed = device.event(), device.event(), device.event()
        self._started, self._ended = device.event(), device.event()
        self._windows = len(program.problem.regions)
        self._crossing = {c.name: c.nbytes for c in program.problem.collectives}
        self._number = {n: i for i, n in enumerate(program.module.graph.nodes)}
        names = {placeholder: weight for weight, placeholder in program.weight_inputs.items()}
        self._inputs = [names.get(n.name) for n in self._number if n.op == "placeholder"]
        self._arrivals = binding.marks or arrivals(self.course)
        self.occupancy = binding.occupancy or Occupancy(device, len(self._arrivals.marked))
        self._streams = bool(program.plan.streamed)
        # checked chunk by chunk, copies read the drive themselves
        held = {} if self._flag is not None else binding.hosts
        self._on_drive = frozenset(name for name, source in held.items() if isinstance(source, DriveBytes))
        self._cold: _Cold | None = None  # made when it is needed: few calls of a course ever begin a turn
        self._instructions = list(self._prepare(program.module))

    def run(self, args: Sequence[Any]) -> Any:
        """Run one step on the inputs of the traced graph; return its outputs.

        Raises ChunkflowError if a copy or a collective fails; the next call then starts cold.
        """
        try:
            step = self.enqueue(args)
            self.device.deliver()
        except BaseException:
            self.forget()
            raise
        return step.outputs

    def enqueue(self, args: Sequence[Any]) -> Step:
        """Issue one step.  Its outputs are valid after the device has delivered; more steps may be issued before."""
        values = self.binding.values
        inputs = [a if w is None else values.get(w, a) for a, w in zip(args, self._inputs, strict=True)]
        step = Step(inputs + [None] * (len(self._number) - len(inputs)), Cost(no_seconds(self._windows)))
        begun = self.device.start(self._steps)
        self._steps += 1
        ready = self.binding.arena.holder is self.occupancy and self.occupancy.next == self.call
        # a program that streams nothing leaves the arena to the others
        step.cost.primed = 0 if ready or not self._streams else self._prime()
        self.occupancy.next = None
        for issue in self._instructions:
            issue(step)
        self.occupancy.next = (self.call + 1) % len(self.course.calls)
        # not the step: its values would live too long
        self.device.finish(begun, partial(self._finish, step.cost, self.occupancy.turns))
        self.occupancy.turns += 1
        return step

    def _reading(self, op: Prefetch) -> Reading:
        source, size = self.binding.hosts[op.weight], self.program.plan.chunk_bytes
        assert isinstance(source, DriveBytes)
        part = source[op.first * size : op.end * size]
        return Reading(self.binding.arena.reader, (op.weight, op.first, op.end), part)

    def _finish(self, cost: Cost, turn: int, begin: float, end: float, whole: bool) -> None:
        before, self.occupancy.ended = self.occupancy.ended, (turn, end)
        copied = self.traffic.settle(end)
        if not whole:
            return
        read_s, read_bytes = self.binding.arena.reader.settle() if self._on_drive else (0.0, 0)
        found = StepMeasurement(
            step_s=end - begin,
            exposed_h2d_s=sum(cost.windows.exposed_s),
            collective_s=sum(cost.windows.collective_s),
            copy_s=copied.seconds,
            alone_s=copied.alone_s,
            alone_bytes=copied.alone_bytes,
            collectives=cost.collectives,
            moved_bytes=cost.moved,
            primed_bytes=cost.primed,
            windows=cost.windows,
            read_s=read_s,
            read_bytes=read_bytes,
            idle_s=max(0.0, begin - before[1]) if before is not None and before[0] == turn - 1 else 0.0,
        )
        for measurements in self._measurements:
            measurements.append(found)

    def forget(self) -> None:
        """Wait for work in flight and discard the chunks in the arena: the next step starts cold."""
        holds = self.binding.arena.holder is self.occupancy
        if holds:
            self.binding.arena.holder = None
        self.occupancy.writes.clear()
        if self._flag is not None:
            self._flag.drop()  # an error in a collective left it set
        for stream in (self.device.compute, self.device.collective, self.device.copy):
            with contextlib.suppress(ChunkflowError):  # raised already where the failed work was awaited
                stream.synchronize()
        with contextlib.suppress(ChunkflowError):
            self.device.collect(True)
        if self._on_drive and holds:
            self.binding.arena.reader.stop()
        self.traffic.forget()

    def vacate(self) -> None:
        """Wait for work in flight and drop every reference to the memory.  The executor cannot run again."""
        self.forget()
        self._instructions, self._cold = [], None
        self.binding = Binding(self.binding.arena, {}, {}, {})

    def intact_slots(self) -> dict[str, torch.Tensor]:
        """Streamed weights that are complete in their slots now: weight -> slot, uint8.

        Waits for copies in flight.  A weight is complete until a newer prefetch over any of its bytes is issued.
        """
        try:
            self.device.copy.synchronize()
        except ChunkflowError:
            self.forget()
            raise
        if self.binding.arena.holder is not self.occupancy:
            return {}
        plan = self.program.plan
        plans = {w.name: w for w in plan.streamed}
        broken = {op.weight for _, _, op in self.course.prefetches if op not in self.occupancy.writes}
        newer: list[tuple[str, int, int]] = []
        for op in reversed(self.occupancy.writes):
            begin, end = ((plans[op.weight].offset or 0) + b for b in plan.span(plans[op.weight], op.first, op.end))
            if any(name != op.weight and a < end and begin < b for name, a, b in newer):
                broken.add(op.weight)
            newer.append((op.weight, begin, end))
        return {name: slot for name, slot in self.binding.slots.items() if name not in broken}

    def _prime(self) -> int:
        """Take over the arena, or jump to this call of the course: copy the chunks that stay, and those that are on their way
        or in use here in a pass without jumps.

        Returns the bytes copied.
        """
        compute, copy, arena = self.device.compute, self.device.copy, self.binding.arena
        jumps = arena.holder is self.occupancy  # then the chunks that stay are there
        arena.holder = None  # if this is interrupted, the chunks of no program are complete
        cold = self._cold = self._cold or self._make_cold()
        step = Step([], Cost(no_seconds(self._windows)))
        self.occupancy.writes.clear()
        compute.record(self._handover)
        copy.wait(self._handover)
        if cold.reads.cycle:
            copy.run(partial(self._read, cold.reads))
        for weight, target, source in () if jumps else cold.kept:
            self._copy(target, source, f"keep {weight}")
            self._mark(weight)
            step.cost.moved += source.numel()
        for issue in cold.prefetches:
            issue(step)
        if cold.waits:
            copy.record(self._primed)
            compute.wait(self._primed)
        arena.holder = self.occupancy
        return step.cost.moved

    def _make_cold(self) -> _Cold:
        found = border(self.course, self.call)
        ops = [(p, n) for n in found.prefetches if (p := prefetch_of(n))]
        reads = reads_from(self.course, self.call, self._on_drive)
        return _Cold(list(self._kept()), [self._prefetch(p, n) for p, n in ops], found.waits, reads)

    def _read(self, reads: Reads) -> None:
        """Let the drive be read in the order of the copies from this call on."""
        first, cycle = ([(r.key, r.source) for r in map(self._reading, ops)] for ops in (reads.first, reads.cycle))
        self.binding.arena.reader.restart(first, cycle, reads.begin, self.course.plan.drive_rate)

    def _kept(self) -> Iterator[tuple[str, torch.Tensor, Source]]:
        """Weight, slot bytes and host bytes of the chunks that stay in their slots until the arena is handed over."""
        plan = self.program.plan
        for weight in plan.streamed:
            for run in runs(weight.windows):
                if run.window is None:
                    begin, end = plan.span(weight, run.first, run.end)
                    slot, host = self.binding.slots[weight.name], self.binding.hosts[weight.name]
                    yield weight.name, slot[begin:end], host[begin:end]

    def _prepare(self, module: GraphModule) -> Iterator[_Issue]:
        """One function for each node, which issues it; after it, one that drops the values no longer needed."""
        number = {node.name: i for node, i in self._number.items()}
        opened: int | None = None
        window = 0  # the region that runs next
        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            issue = self._issue(module, node, min(window, self._windows - 1))
            window += node.op == "call_module"
            if (prefetch := prefetch_of(node)) is not None:
                if prefetch.window != opened:
                    issue = partial(self._open, issue)
                opened = prefetch.window
            yield issue
            if values := self.program.releases.get(node.name):
                yield partial(self._drop, tuple(number[value] for value in values))

    def _drop(self, numbers: tuple[int, ...], step: Step) -> None:
        env = step.env

        def work() -> None:
            for number in numbers:
                env[number] = None

        self.device.compute.run(work)

    def _issue(self, module: GraphModule, node: Node, window: int) -> _Issue:
        function: Any = node.target
        if (prefetch := prefetch_of(node)) is not None:
            return self._prefetch(prefetch, node)
        if node.target is WAIT:
            awaited = self._arrivals.awaited.get(node)
            return _nothing if awaited is None else partial(self._wait, self.occupancy.arrived[awaited], window)
        if node.target is EVICT:
            return self._evict(str(node.args[0]))
        if node.op == "get_attr":
            constant = getattr(module, str(node.target))
            return self._call(node, lambda: constant)
        if node.op == "output":
            return self._call(node, lambda outputs: outputs)
        if node.op == "call_module":
            return self._call(node, owning(self._regions[str(node.target)], self.binding.slots), window)
        # an element of a collective's results is taken on the collective stream; of awaited results, on compute
        if list_of(node) is not None or collective_kind(node) is not None or is_wait_tensor(node):
            return self._collective(node, window)
        return self._call(node, function)

    def _mark(self, copied: Node | str) -> None:
        """Record the arrival after a copy, if a region waits for it."""
        if (number := self._arrivals.marked.get(copied)) is not None:
            self.device.copy.record(self.occupancy.arrived[number])

    def _prefetch(self, prefetch: Prefetch, node: Node) -> _Issue:
        weight = prefetch.weight
        slot, host, size = self.binding.slots[weight], self.binding.hosts[weight], self.program.plan.chunk_bytes
        first, end = prefetch.first * size, prefetch.end * size
        nbytes = host[first:end].numel()
        # adjacent chunks of one window are one copy, unless the flag is checked before each chunk
        length = size if self._flag is not None else end - first
        parts = [slice(begin, min(begin + length, end)) for begin in range(first, end, length)]
        reading = weight in self._on_drive
        copies = [(slot[part], self._reading(prefetch) if reading else host[part]) for part in parts]
        stream, flag, writes = self.device.copy, self._flag, self.occupancy.writes
        name = f"prefetch {weight}[{prefetch.first}:{prefetch.end}] window {prefetch.window}"

        def issue(step: Step) -> None:
            for target, source in copies:
                if flag is not None:
                    stream.run(flag.hold)
                self._copy(target, source, name)
            self._mark(node)
            step.cost.moved += nbytes
            writes.pop(prefetch, None)
            writes[prefetch] = None

        return issue

    def _copy(self, target: torch.Tensor, source: Source | Reading, name: str) -> None:
        """Enqueue a copy on the copy stream."""
        work = partial(self.device.copy_bytes, target, source)
        self.device.copy.run(work, self.traffic.copy(source.numel()), name)

    def _open(self, issue: _Issue, step: Step) -> None:
        self.device.compute.record(self._opening)
        self.device.copy.wait(self._opening)
        issue(step)

    def _wait(self, arrival: Any, window: int, step: Step) -> None:
        exposed = step.cost.windows.exposed_s

        def waited(seconds: float) -> None:
            exposed[window] += seconds

        if self._flag is not None:
            self._flag.drop()  # no deadlock: compute beside a collective would wait for a copy that the flag holds
        self.device.compute.wait(arrival, waited)

    def _call(self, node: Node, function: Callable[..., Any], window: int | None = None) -> _Issue:
        """A function that issues a node on the compute stream.  ``window``: where its compute time counts, or None."""
        number, run, read = self._number[node], self.device.compute.run, self._reader(node)
        name = (
            ""
            if window is None
            else " ".join(w for w in (node.name, *self.program.plan.regions[self.program.start + window]) if w)
        )

        def issue(step: Step) -> None:
            env = step.env

            def work() -> None:
                args, kwargs = read(env)
                env[number] = function(*args, **kwargs)

            run(work, None if window is None else RegionWatch(step.cost.windows, window), name)

        return issue

    def _reader(self, node: Node) -> Callable[[list[Any]], tuple[Sequence[Any], Mapping[str, Any]]]:
        """A function from a step's values to a node's operands.  Fast for regions, whose operands are all values."""
        number = self._number
        if node.op == "call_module":
            numbers = [number[n] for n in node.args]
            return lambda env: ([env[n] for n in numbers], {})

        def read(env: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
            return map_arg((node.args, node.kwargs), lambda n: env[number[n]])

        return read

    def _collective(self, node: Node, window: int) -> _Issue:
        """A function that issues a collective, its completion, or one of its results on the collective stream.

        A collective starts when compute has reached it.  After its completion, compute continues when the collective
        stream has reached that.
        """
        compute, stream, started, ended = self.device.compute, self.device.collective, self._started, self._ended
        number, function, read = self._number[node], self._told(node), self._reader(node)
        begins = collective_kind(node) is not None
        ends = is_wait_tensor(node) or (begins and over(node, self._number) is node)
        name = str(node.meta.get(SOURCE, node.name))

        def issue(step: Step) -> None:
            env = step.env

            def work() -> None:
                args, kwargs = read(env)
                env[number] = function(*args, **kwargs)

            if begins and self._flag is not None:
                self._flag.set()
            if begins and stream is not compute:
                compute.record(started)
                stream.wait(started)
            stream.run(work, self.traffic.collective(step.cost.windows, window), name)
            step.cost.collectives += begins
            if ends and stream is not compute:
                stream.record(ended)
                compute.wait(ended)
            if ends and self._flag is not None:
                self._flag.clear()

        return issue

    def _told(self, node: Node) -> Callable[..., Any]:
        """The op of a node of a collective, with errors that name the collective and the fix.

        The last completion of the collective reports the bytes received.
        """
        function: Any = node.target
        collective = node
        while collective_kind(collective) is None:
            collective = collective.all_input_nodes[0]
        name = str(collective.meta.get(SOURCE, collective.name))
        brought = self._crossing.get(name, 0) if over(collective, self._number) is node else 0

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = function(*args, **kwargs)
                if brought:
                    self.device.received(brought)
                return result
            except RuntimeError as error:
                cause = self.binding.arena.disagreement() or "a rank died or did not arrive in time"
                raise ChunkflowError(
                    f"The collective {name} failed in step {self._steps - 1}: {cause.rstrip('.')} ({error}). The model is "
                    "intact: restore(model) brings its weights back."
                ) from error

        return call

    def _evict(self, weight: str) -> _Issue:
        """A function that poisons the evicted bytes, if asked to.

        It needs no event: the opening of the next window over these bytes comes after it on the compute stream.
        """
        if not self._poison:
            return _nothing
        plan = self.program.plan
        found = next(w for w in plan.streamed if w.name == weight)
        spans = [plan.span(found, r.first, r.end) for r in runs(found.windows) if r.window is not None]
        pieces = [self.binding.slots[weight][begin:end] for begin, end in spans]
        return lambda step: self.device.compute.run(partial(_poison, pieces))


def _nothing(step: Step) -> None:
    """Issue nothing: another event, or the order of a stream, does the work of this node."""


def _poison(pieces: Sequence[torch.Tensor]) -> None:
    """Set all bits, which is NaN in every floating type except the ``fnuz`` variants of float8."""
    for piece in pieces:
        piece.fill_(255)
