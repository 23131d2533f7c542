"""The executor issues the ops that are proved, in their order, and no others."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from random_cycles import CycleBench, Drawn
from random_programs import Choices, Layer, Spec
from torch.fx import Node

from chunkflow_compile.passes import pieces as geometry
from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.forms import captured
from chunkflow_compile.passes.names import Lane
from chunkflow_compile.passes.ops import PREFETCH
from chunkflow_compile.passes.program.cycle import prefetches
from chunkflow_compile.passes.program.rewrite import issued, source_of
from chunkflow_compile.passes.program.verify import verify
from chunkflow_compile.passes.step import Copy, Evaluate, Evict, Finish, Op, Read, Record, Release, Run, Start, Wait
from chunkflow_compile.runtime import compute_work, instructions
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.runtime.device_base import Device, StepEnd, Waited, Watch
from chunkflow_compile.runtime.read_ahead import InRing
from chunkflow_compile.runtime.target import Cost, RunningStep, Target
from chunkflow_compile.weights.source import Bytes, take

pytestmark = pytest.mark.usefixtures("one_rank")

SPEC = Spec(24, (Layer(20, True, True), Layer(36, False, True, True)), False, False, 3)
DRAWN = ([SPEC], [0, 0], True, Choices(stay=0.2, reach=0, hard=False, seed=11))
# The same without collectives, so that a call may compute several rows.
ALONE = ([replace(SPEC, layers=tuple(replace(layer, exchange=False) for layer in SPEC.layers))], *DRAWN[1:])


class LoggingStream:
    """A stream that runs its work at once.  ``log``: gets what it is given."""

    def __init__(self, name: Any, log: Callable[..., None]) -> None:
        self.name = name
        self.log = log

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        if watch is not None:
            watch.begins(0.0)
        self.log(self.name, "run", name)
        work()
        if watch is not None:
            watch.ends(0.0)

    def record(self, event: object) -> None:
        self.log(self.name, "record", event)

    def wait(self, event: object, waited: Waited | None = None) -> None:
        self.log(self.name, "wait", event)

    def synchronize(self) -> None:
        """It is empty."""

    def recover(self) -> None:
        """Nothing fails."""


class LoggingDevice(Device):
    """A device that lists the ops that it is given.  ``ops``: of the calls of ``executor``, which is set before each."""

    name = "cpu"

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.target: Target | None = None
        self.compute, self.copy, self.collective, self._pull = (
            LoggingStream(name, self._log) for name in ("compute", "copy", "collective", "pull")
        )
        self._reads = LoggingStream("read", self._log)

    def _make_pull(self) -> LoggingStream:
        return self._pull

    def _make_reads(self) -> LoggingStream:
        return self._reads

    def event(self) -> object:
        return object()

    def start(self, marked: bool, consecutive: bool) -> float | None:
        return 0.0 if marked else None

    def finish(self, begun: float | None, over: StepEnd) -> None:
        """Nobody reads the measurements."""

    def close(self) -> None:
        """There are no threads."""

    def copy_bytes(self, target: torch.Tensor, source: Bytes | InRing, moves: Lane = "copy") -> None:
        """Lists the copy, by the bytes that it writes: resident ones if they are of no window."""
        of = self.target
        assert of is not None
        for name, slot in of.binding.slots.items():
            begin = target.data_ptr() - slot.data_ptr()
            if 0 <= begin < slot.numel():
                size = of.program.plan.chunk_bytes
                first, end = begin // size, -(-(begin + target.numel()) // size)
                self.ops.append(Copy(moves, name, first, end, None))
        take(target, source.values() if isinstance(source, InRing) else source)

    def _log(self, stream: Any, kind: str, what: Any) -> None:
        of = self.target
        assert of is not None
        if kind != "run":
            number = next((i for i, event in enumerate(of.events) if event is what), None)
            if number is not None:
                self.ops.append(Record(stream, number) if kind == "record" else Wait(stream, number))
            elif kind == "wait":
                self.ops += [Finish(i) for i, event in enumerate(of.ended) if event is what]
        elif stream == "read":
            if match := re.fullmatch(r"read (.*)\[(\d+):(\d+)\]", what):
                self.ops.append(Read(match[1], int(match[2]), int(match[3]), 0))
        elif stream == "collective":
            self.ops += _started(of, what)
        elif stream == "compute" and what.startswith("region_"):
            self.ops.append(Run(int(what.split()[0].removeprefix("region_"))))


def _started(target: Target, name: str) -> list[Op]:
    """The ops that are due when a node of a collective, given by its source, is issued; none for a completion."""
    found = next(ops for node, ops in issued(target.program) if source_of(node) == name and ops)
    return [op for op in found if isinstance(op, Start | Evaluate)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LoggingDevice:
    """Work on the values of a step is listed, too."""
    made = LoggingDevice()
    monkeypatch.setattr(geometry, "STRIPE", 1536)

    def listed(work: Callable[..., None], op: Callable[[Any], Op], what: Any, *more: Any) -> None:
        made.ops.append(op(what))
        work(what, *more)

    def names() -> list[str]:
        assert made.target is not None
        return [node.name for node in made.target.number]

    def evicted(pieces: list[torch.Tensor]) -> Op:
        assert made.target is not None
        slots = made.target.binding.slots
        begins = {slot.data_ptr() + i: name for name, slot in slots.items() for i in range(slot.numel())}
        return Evict(begins[pieces[0].data_ptr()])

    for name in ("_put", "_call", "_output"):
        work = partial(listed, getattr(compute_work, name), lambda number: Evaluate("compute", names()[number]))
        monkeypatch.setattr(compute_work, name, work)

    def settle(picks: Sequence[tuple[int, int, Any]], drops: Sequence[int], env: list[Any]) -> None:
        made.ops.extend(Evaluate("compute", names()[number]) for number, _, _ in picks)
        if drops:
            made.ops.append(Release(tuple(names()[i] for i in drops)))
        settles(picks, drops, env)

    def region(target: Target, node: Node, index: int, taken: Sequence[int]) -> compute_work.Compute:
        compute = of_region(target, node, index, taken)

        def work(env: list[Any]) -> None:
            assert isinstance(made.ops[-1], Run)  # listed when its work begins, which takes the values first
            if taken:
                made.ops.insert(len(made.ops) - 1, Release(tuple(names()[i] for i in taken)))
            compute.work(env)
            assert all(env[i] is None for i in taken)

        return replace(compute, work=work)

    settles, of_region = compute_work._pick_and_drop, compute_work.region_work
    monkeypatch.setattr(compute_work, "_pick_and_drop", settle)
    monkeypatch.setattr(instructions, "region_work", region)
    monkeypatch.setattr(compute_work, "_poison", partial(listed, compute_work._poison, evicted))
    return made


# An op as a device sees it: the copy has no window there, the wait no weights, and the read no place in the ring.
def _seen(op: Op) -> Op:
    if isinstance(op, Copy):
        return Copy(op.stream, op.weight, op.first, op.end, None)
    if isinstance(op, Read):
        return replace(op, ring=0)
    return Wait(op.stream, op.event) if isinstance(op, Wait) else op


def by_stream(ops: Iterable[Op]) -> dict[str, list[tuple[Op, int]]]:
    """The ops of each stream in their order; with a wait, how many marks of its event there are."""
    marks, found = Counter[int](), defaultdict[str, list[tuple[Op, int]]](list)
    for op in ops:
        if isinstance(op, Record):
            marks[op.event] += 1
        found[op.stream].append((_seen(op), marks[op.event] if isinstance(op, Wait) else 0))
    return dict(found)


class Calls:
    """The calls of a cycle on a device, and the ops that are proved for those that have run."""

    def __init__(self, device: LoggingDevice, drawn: Drawn = DRAWN, files: bool = False) -> None:
        self.device = device
        self.bench = CycleBench((*drawn[:3], replace(drawn[3], peers=True, drive=files)))
        self.cycle = self.bench.cycle
        verify(self.cycle)
        assert len(self.cycle.ops) == 2
        self.arena = Arena(make=lambda *_: device)
        self.bench.join(self.arena, self.cycle.plan)
        self.executors = [self.bench.executor(program, self.arena) for program in self.cycle.calls]
        self.proved: list[Op] = []

    def run(self, number: int, rows: int = 1, **prologue: Any) -> None:
        """Run a call.  ``prologue``: see :meth:`Cycle.prologue`; nothing for a call without one."""
        executor, bench = self.executors[number], self.bench.of[number]
        xs = [torch.randn_like(bench.x) for _ in range(rows)]
        self.device.target = executor.target
        found = executor.run([self.bench.arguments(executor.program, x) for x in xs])
        assert all(torch.equal(row[0], bench.model(x)) for row, x in zip(found, xs, strict=True))
        if prologue:
            self.proved += self.cycle.prologue(number, **prologue)
        self.proved += self.cycle.ops[number]

    def write(self, number: int, weight: str) -> None:
        """Let a call copy a weight again."""
        self.executors[number].copy_again({weight: 1 + self.executors[number].state.versions.get(weight, 0)})


def test_what_is_issued_is_what_is_proved(device: LoggingDevice) -> None:
    """Two passes after a cold start, a jump, a rewritten weight, and a jump with one."""
    calls = Calls(device, files=True)
    weight = next(w.name for w in calls.cycle.plan.streamed if w.first_use < w.last_use)
    calls.run(0, stale=None)
    for number in (1, 0, 1):
        calls.run(number)
    calls.run(1, stale=(), jumps=True)
    calls.write(0, weight)
    calls.run(0, stale={weight})
    calls.write(0, weight)
    calls.run(0, stale={weight}, jumps=True)
    assert by_stream(device.ops) == by_stream(calls.proved)
    assert {type(op) for op in device.ops} == set(Op.__args__)
    assert {op.stream for op in device.ops} == {"compute", "copy", "pull", "collective", "read"}


def test_several_rows_repeat_each_region_before_its_weights_are_evicted(device: LoggingDevice) -> None:
    """In each kind of call: all other ops are issued once, as they are proved."""
    calls = Calls(device, ALONE, files=True)
    weight = next(w.name for w in calls.cycle.plan.streamed if w.first_use < w.last_use)
    calls.run(0, 3, stale=None)
    for number in (1, 0, 1):
        calls.run(number, 3)
    calls.run(1, 3, stale=(), jumps=True)
    calls.write(0, weight)
    calls.run(0, 3, stale={weight})
    once = [op for op in calls.proved if not isinstance(op, Evaluate | Release)]
    expected = [op for op in once for _ in range(3 if isinstance(op, Run) else 1)]
    assert by_stream(op for op in device.ops if not isinstance(op, Evaluate | Release)) == by_stream(expected)
    # an earlier row may come to them before an evict that they follow
    given, proved = (
        Counter(op for op in ops if isinstance(op, Evaluate | Release)) for ops in (device.ops, calls.proved)
    )
    assert given == {op: 3 * count for op, count in proved.items()}
    assert {type(op) for op in device.ops} == set(Op.__args__) - {Start, Finish}


def test_a_captured_call_is_issued_as_it_is_proved(device: LoggingDevice) -> None:
    calls = Calls(device)
    cycle, executor = calls.cycle, calls.executors[0]
    step = captured(cycle.ops[0], cycle.events)
    device.target = target = executor.target
    env = [*calls.bench.arguments(executor.program, calls.bench.of[0].x)]
    running = RunningStep([*env, *[None] * (len(target.number) - len(env))], Cost(), 0)
    for issue in instructions.instructions(target, step, issued(executor.program)):
        issue(running)
    assert by_stream(device.ops) == by_stream(step)


def test_an_op_that_is_issued_and_was_not_proved_is_seen(device: LoggingDevice) -> None:
    calls = Calls(device)
    executor = calls.executors[0]
    more = next(op for op in calls.cycle.ops[0] if isinstance(op, Copy))
    executor.instructions += instructions.instructions(executor.target, (more,))
    calls.run(0, stale=None)
    assert by_stream(device.ops) != by_stream(calls.proved)
    calls.proved.append(more)
    assert by_stream(device.ops) == by_stream(calls.proved)


def test_transfers_that_were_added_after_the_proof_are_not_issued(device: LoggingDevice) -> None:
    calls = Calls(device)
    program = calls.cycle.calls[0]
    node, _ = next(prefetches(program))
    with program.module.graph.inserting_after(node):
        program.module.graph.call_function(PREFETCH, node.args)
    calls.executors[0] = calls.bench.executor(program, calls.arena)
    calls.run(0, stale=None)
    assert by_stream(device.ops) == by_stream(calls.proved)


def reversed_regions(program: Any) -> None:
    graph = program.module.graph
    first, then = [node for node in graph.nodes if node.op == "call_module"][:2]
    first.target, then.target = then.target, first.target
    first.name, then.name = "later", first.name


def forgotten_release(program: Any) -> None:
    program.releases.pop(next(iter(program.releases)))


@pytest.mark.parametrize("change", [reversed_regions, forgotten_release])
def test_a_program_that_was_changed_after_its_proof_is_refused(
    change: Callable[[Any], None], device: LoggingDevice
) -> None:
    calls = Calls(device)
    program = calls.cycle.calls[0]
    change(program)
    with pytest.raises(FindingError, match="changed after its proof"):
        calls.bench.executor(program, calls.arena)
