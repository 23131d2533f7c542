"""A route is a course on the weights of its calls: the executors of its places, and what they have in the arena."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.pipeline import Settings
from chunkflow_compile.passes.program.arrivals import Arrivals, arrivals_at
from chunkflow_compile.passes.program.course import Call, Course, block_of, rewritten
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.passes.program.verify import verify_call
from chunkflow_compile.weights.home import Home
from chunkflow_compile.weights.source import DriveBytes

from .arena import Arena, Binding
from .executor import KEPT_MEASUREMENTS, Executor
from .measurement import Passes, StepMeasurement, as_one, measured, save

if TYPE_CHECKING:
    from .session import Session

# The homes of the weights of a course, by their names in it.
Homes = Mapping[str, weakref.ref[Home]]


class Key:
    """What a call reads: the homes of its weights.  Calls that read the same weights in the same regions have one key.

    ``session``: the newest with this key, weakly.
    """

    session: Callable[[], Session | None]

    def __init__(self, homes: Iterable[Home]) -> None:
        self._homes = [weakref.ref(home) for home in homes]

    @property
    def lasts(self) -> bool:
        """Whether the weights still exist."""
        return all(ref() is not None for ref in self._homes)


class Route:
    """A course on the weights of its calls.

    ``position``: the call that is expected next.  ``jumps``: those so far.  ``replan_after``: the number of warm passes
    after which to plan it again from their times; 0 for never.  ``settings``: that it was planned with, but for those times.
    ``folder``: where measurements are written, None for nowhere.
    """

    def __init__(
        self,
        arena: Arena,
        keys: tuple[Key, ...],
        calls: Sequence[Call],
        homes: Homes,
        settings: Settings,
        course: Course,
        marks: Arrivals,
    ) -> None:
        self.arena = arena
        self.keys = keys
        self.course = course
        self.position = 0
        self.jumps = 0
        self.replan_after = 0
        self.folder: Path | None = None
        self.calls = calls
        self.homes = homes
        self.settings = settings
        self._versions: dict[str, int] = {}
        self._places = [{id(self.homes[n]()): n for n in call.names.values() if n in self.homes} for call in self.calls]
        self._seen: list[tuple[int, ...] | None] = [None for _ in self.keys]  # as the session of a call has them
        self._passes = Passes(len(self.keys), KEPT_MEASUREMENTS)
        self._begun = 0  # passes
        self._marks = marks
        self._binding: Binding | None = None
        self._executors: list[weakref.WeakKeyDictionary[Session, Executor]] = [
            weakref.WeakKeyDictionary() for _ in self.keys
        ]
        self._proved: weakref.WeakKeyDictionary[GraphModule, str] = (
            weakref.WeakKeyDictionary()
        )  # regions, and their keys

    @property
    def lasts(self) -> bool:
        """Whether all weights of the course still exist where they were."""
        return all((home := ref()) is not None and home.weight is not None for ref in self.homes.values())

    @property
    def ready(self) -> bool:
        """Whether it is bound to the memory, or can be."""
        return self._binding is not None or self.lasts

    @property
    def measurements(self) -> tuple[StepMeasurement, ...]:
        """The newest passes over the calls, oldest first, each as one step; waits for those in flight."""
        return tuple(as_one(calls) for calls in self._measured(wait=True))

    def timings(self, passes: int) -> Timings | None:
        """The times of the warm passes so far and of the time between calls; None if they are fewer than ``passes``."""
        warm = [calls for calls in self._measured() if not any(call.primed_bytes for call in calls)]
        if len(warm) < passes:
            return None
        found = measured(self.course.plan, [as_one(calls) for calls in warm]).timings()
        idle = [0.0] * len(found.compute_s)
        for start, calls in zip(self.course.starts, zip(*warm, strict=True), strict=True):
            idle[start - 1] += median(call.idle_s for call in calls)
        return replace(found, idle_s=tuple(idle))

    def _measured(self, wait: bool = False) -> list[tuple[StepMeasurement, ...]]:
        """The newest passes, each the measurements of its calls."""
        if self._binding is not None:
            self.arena.streams.collect(wait)
        return list(self._passes.whole)

    def predicted(self, keys: Collection[Key | None]) -> float | None:
        """Predicted seconds of those of the calls that have these keys, each until the next one begins."""
        if (found := self.course.plan.predicted) is None:
            return None
        regions = [span.start for span in found.spans if span.lane == "compute"]
        begun = [regions[start - 1] for start in self.course.starts]
        ended = [*begun[1:], begun[0] + found.step_s]
        return sum(e - b for key, b, e in zip(self.keys, begun, ended, strict=True) if key in keys)

    def find(self, key: Key) -> int | None:
        """The place of a call, the expected one first; None if it is not in the course."""
        count = len(self.keys)
        found = (c % count for c in range(self.position, self.position + count) if self.keys[c % count] is key)
        return next(found, None)

    def executor(self, session: Session, call: int) -> Executor:
        """The executor of a session in the place of a call.  Raises ChunkflowError if the arena has no room."""
        self._check_versions(session, call)
        found = self._executors[call].get(session)
        if found is None:
            found = self._executors[call][session] = self._make(session, call)
        self.position = (call + 1) % len(self.keys)
        self._begun += call == 0
        if call == 0 and not self._begun & (self._begun - 1):  # as the steps of a program alone
            self.save()
        return found

    def save(self, wait: bool = False) -> None:
        """Write the measurements to the dump folder, if there are any.  A full disk or a failed device is no error."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError, ChunkflowError):
            save(self.folder, measured(self.course.plan, [as_one(calls) for calls in self._measured(wait)]))

    def unbind(self) -> None:
        """Wait for work in flight and drop every reference to the memory."""
        self.save(wait=True)
        for executors in self._executors:
            for executor in list(executors.values()):
                executor.vacate()
            executors.clear()
        self._end_turn()
        self._binding = None
        self.arena.give_up(self)

    def _end_turn(self) -> None:
        """Let the next call start cold."""
        if self._binding is not None and self.arena.holder is self._binding.occupancy:
            self.arena.holder = None

    def _check_versions(self, session: Session, call: int) -> None:
        """Start cold if a weight of the call was written since the course took over the arena."""
        if self._seen[call] == session.versions:
            return
        names = [self._name(home, call) for home in session.homes.values()]
        known = tuple(self._versions.get(name) for name in names)
        if known != session.versions:
            if self._outdated():
                self.unbind()
            self._end_turn()
            self._versions = {name: home.version for name, ref in self.homes.items() if (home := ref()) is not None}
            self._seen = [None for _ in self.keys]
        self._seen[call] = session.versions

    def _outdated(self) -> bool:
        """Whether a weight was on the drive, and is in host memory now or in another file, or a copy beside the memory is
        of older values."""
        if self._binding is None:
            return False
        hosts, values = self._binding.hosts, self._binding.values
        moved = (isinstance(s, DriveBytes) and self._home(name).drive is not s for name, s in hosts.items())
        return any(moved) or any(self._home(name).on_device is None for name in values.keys() - hosts.keys())

    def _make(self, session: Session, call: int) -> Executor:
        course, marks, placed = self.course, self._marks, self.calls[call]
        names = {name: self._name(home, call) for name, home in session.homes.items()}
        # another graph, such as one for another size, or the same one on weights that have changed places, as those of the
        # projections of queries and keys may
        if session.code.cut is not placed.cut or any(placed.names[name] != names[name] for name in names):
            placed = session.as_call(_names(session) | names)
            program, marks = self._program(session, call, placed)
            course = course.at(call, program)
        session.step_aside()  # its own plan keeps other weights on the device
        binding = replace(self._bound(session.code.pin_bytes), marks=marks)
        file = session.measured.append, partial(self._passes.file, call)
        return Executor(course.calls[call], session.code.regions, binding, session.code.poison, course, file)

    def _program(self, session: Session, call: int, placed: Call) -> tuple[Program, Arrivals]:
        """The program of a call of another graph or for other sizes, and the marks of its transfers."""
        names = [placed.names[w.name] for w in placed.cut.problem.weights]
        known = [(self.course.calls[call], self._marks, self.calls[call].cut)]
        known += [(e.program, e.marks, s.code.cut) for s, e in [*self._executors[call].items()]]
        for program, marks, cut in known:
            # the graph at other sizes: the same ops on the same weights
            if cut.regions is placed.cut.regions and list(program.weight_inputs) == names:
                return replace(program, problem=placed.problem()), marks
        program = rewritten(self.course, call, placed, share="sharing" not in session.code.settings.disabled)
        marks = arrivals_at(self.course, self._marks, call, program)
        if session.code.verified:
            verify_call(self.course, call, program, self._marks, marks, self._proved)
        return program, marks

    def _name(self, home: Home, call: int) -> str:
        """The name in the course of a weight of a call."""
        return self._places[call][id(home)]

    def _bound(self, pin_bytes: int | None) -> Binding:
        """What the course has in the arena's memory.  Raises ChunkflowError if the device has no room."""
        if self._binding is None:
            for tenant in self.arena.tenants:
                if tenant.key in self.keys:
                    tenant.step_aside()
            homes = {name: self._home(name) for name in self.homes}
            self._binding = self.arena.bind(self, self.course.plan, homes, self._marks, pin_bytes=pin_bytes)
        return self._binding

    def _home(self, name: str) -> Home:
        home = self.homes[name]()
        assert home is not None, "the course lasts"
        return home


def calls_of(sessions: Sequence[Session]) -> tuple[list[Call], dict[str, Home]]:
    """The calls of a course, and the homes of its weights by their names in it.

    A weight that two calls read is two weights of the course: it is fetched for each.
    """
    calls = list[Call]()
    homes: dict[str, Home] = {}
    taken = set[str]()
    for session in sessions:
        names: dict[str, str] = {}
        for name, wanted in _names(session).items():
            names[name] = next(n for n in _numbered(wanted) if n not in taken)
            taken.add(names[name])
            if name in session.homes:
                homes[names[name]] = session.homes[name]
        calls.append(session.as_call(names))
    return calls, homes


def _names(session: Session) -> dict[str, str]:
    """The names of a call's weights in their model.  A graph that was compiled for another block has the names of that."""
    found = {name: home.name for name, home in session.homes.items()}
    blocks = {block_of(old): block_of(new) for old, new in found.items()}
    for weight in session.program.problem.weights:
        block = block_of(weight.name)
        found.setdefault(weight.name, blocks.get(block, block) + weight.name.removeprefix(block))
    return found


def _numbered(name: str) -> Iterator[str]:
    """A name, and variants of it."""
    yield name
    yield from (f"{name} ({i})" for i in itertools.count(2))
