"""Cycles: the order in which the programs of an arena run, learnt while they run, and planned as one when it repeats.

Every call is recorded by what it reads: a *key* stands for the weights of its regions.  When the keys repeat, another
thread plans the calls between as one cycle.  From the next border on, each call runs the program of its place in the
cycle.  A call other than the expected one is a *jump*: it finds its place in the cycle, or in another that is known, or
runs its own program.  Whatever ran before, it then fetches what it needs.

A cycle is planned from the rates of the hardware profile, and the time between its calls is taken as none.  With
``replan_after``, it is planned once more from the times of its regions and of the time between its calls.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.pace import give_way
from chunkflow_compile.passes.pipeline import Settings, make_cycle
from chunkflow_compile.passes.program.arrivals import Arrivals, arrivals
from chunkflow_compile.passes.program.cycle import Call, Cycle
from chunkflow_compile.weights.host_buffer import HostBuffer

from .arena import Arena
from .bound_cycle import BoundCycle, BufferRefs
from .call_site import CallKey, CallSite, bare, calls_of, common, folder_of, sites_of
from .executor import Executor

_log = logging.getLogger(__name__)

# Calls and regions of the longest cycle: 128 blocks of two models, twice a step.  Planning time grows with them.
MOST_CALLS = 512
MOST_REGIONS = 4096
# Earlier calls of the same weights at which a period may begin; a step cache calls a block in several patterns.
_TRIES = 4
# Cycles that an arena remembers.  Each keeps its plan, and its programs, but no device memory.
_MOST_CYCLES = 8


@dataclass(eq=False)
class _Job:
    """A cycle that is being planned on another thread.

    ``settings``: without measured times.  ``folder``: of the dump of one of its calls, if there is one.  ``instead``: the
    cycle that runs on these calls now, if it is planned again, from ``timings``.  ``result``: None until it ends, and if the
    process exits.  ``hurried``: whether another thread waits for it.
    """

    keys: tuple[CallKey, ...]
    calls: Sequence[Call]
    buffers: BufferRefs
    settings: Settings
    folder: Path | None
    instead: BoundCycle | None = None
    timings: Timings | None = None
    result: tuple[Cycle, Arrivals] | ChunkflowError | None = None
    hurried: bool = False

    def __post_init__(self) -> None:
        # Not a daemon: Python would stop it inside C++ code when the process exits, which aborts the process.
        self.thread = threading.Thread(target=self._plan, name="chunkflow-plan")
        self.thread.start()

    def _plan(self) -> None:
        give_way(self._hurried)
        try:
            cycle = make_cycle(self.calls, replace(self.settings, timings=self.timings))
            self.result = cycle, arrivals(cycle)
        except ChunkflowError as error:
            self.result = error.with_traceback(None)

    def _hurried(self) -> bool:
        if not threading.main_thread().is_alive():
            raise SystemExit  # the process exits, and waits for this thread
        return self.hurried


class Cycles:
    """What an arena has learnt of the order in which its programs run."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._keys: weakref.WeakValueDictionary[object, CallKey] = weakref.WeakValueDictionary()
        self._history: deque[CallKey] = deque(maxlen=2 * MOST_CALLS + 1)
        self._job: _Job | None = None
        self._refused: deque[tuple[CallKey, ...]] = deque(maxlen=4 * _MOST_CYCLES)
        self._unexpected = 0
        self._fresh: BoundCycle | None = None  # planned, and not yet asked whether it has the call that comes
        self.known: list[BoundCycle] = []
        self.current: BoundCycle | None = None

    @staticmethod
    def of(arena: Arena) -> Cycles:
        """Those of an arena, which end with its last program.  The caller holds the arena's lock."""
        if not isinstance(arena.cycles, Cycles):
            arena.cycles = Cycles(arena)
        return arena.cycles

    def key(self, buffers: Sequence[Sequence[HostBuffer]], collectives: object, settings: Settings) -> CallKey:
        """The key of the calls that read ``buffers``, region by region, with these collectives between."""
        found = tuple(tuple(sorted(id(buffer) for buffer in region)) for region in buffers), collectives
        key = self._keys.get(found)
        if key is None or not key.lasts:
            key = self._keys[found] = CallKey((buffer for region in buffers for buffer in region), settings)
        elif bare(key.settings) != bare(settings):
            self._start_anew(key, settings)  # it was planned again for another goal
        key.settings = settings
        return key

    def forget(self, buffers: Iterable[HostBuffer]) -> None:
        """Forget the cycles of these weights: the user has chosen another placement for them."""
        chosen = {id(buffer) for buffer in buffers}
        for bound in list(self.known):
            if any(id(ref()) in chosen for ref in bound.buffers.values()):
                self._forget(bound)

    def executor(self, site: CallSite) -> Executor | None:
        """The executor for the call that follows; None for that of the program alone.  The caller holds the arena's lock."""
        key = site.key
        assert key is not None
        previous = self._history[-1] if self._history else None
        self._history.append(key)
        bound = self.current
        if bound is not None and not bound.ready:
            self.prune()
            bound = self.current
        if bound is not None and bound.keys[bound.position] is key:
            self._unexpected = 0
            return self._run(bound, site, bound.position)
        if bound is None and key is previous and not site.part:
            return None  # a whole model, again and again
        return self._unforeseen(key, previous, site)

    def wait_planned(self) -> None:
        """Wait for a cycle that is being planned; the next call runs in it."""
        if self._job is not None:
            self._job.hurried = True
            self._job.thread.join()

    def replan(self, bound: BoundCycle) -> None:
        """Plan a cycle again from its times so far; the next pass runs it.  Raises ChunkflowError if there are none."""
        self.wait_planned()
        bound.replan_after = 0
        if not self._replan(bound, 1):
            raise ChunkflowError("No pass over the calls of this cycle was measured yet: call the model again.")
        self.wait_planned()
        if self._job is not None and isinstance(self._job.result, ChunkflowError):
            raise self._job.result

    def release(self) -> None:
        """Release all cycles, and forget those whose weights no longer exist."""
        self.prune()
        for bound in self.known:
            bound.release()

    def prune(self) -> None:
        """Forget the cycles whose weights no longer exist."""
        for bound in [r for r in self.known if not r.lasts]:
            self._forget(bound)

    def close(self) -> None:
        self.release()
        self.known.clear()
        self.current = self._job = self._fresh = None

    def _unforeseen(self, key: CallKey, previous: CallKey | None, site: CallSite) -> Executor | None:
        """A call that the current cycle does not expect, or that no cycle runs."""
        self.prune()
        self._unexpected += 1
        made, self._fresh = self._finished() or self._fresh, None
        if made is not None and made in self.known and (begin := made.find(key)) is not None:
            self.current, self._unexpected, made.position = made, 0, begin
        elif self.current is not None and self._unexpected > len(self.current.keys):
            self.current = None
        self._learn(key)
        for bound in [r for r in (self.current, *self.known) if r is not None]:
            call = bound.find(key)
            if call is None or (bound is not self.current and not site.part and bound.keys[call - 1] is not previous):
                continue
            off = bound is not self.current or call != bound.position
            bound.jumps += off
            site.counts.off_cycle += off
            self.current = bound
            return self._run(bound, site, call)
        return None

    def _run(self, bound: BoundCycle, site: CallSite, call: int) -> Executor | None:
        if call == 0 and self._job is not None:
            again = self._job.instead is bound
            made = self._finished()
            if again:
                self.current = bound = made or bound
            else:
                self._fresh = made or self._fresh
        if call == 0 and bound.replan_after and self._job is None:
            self._replan(bound, bound.replan_after)
        try:
            return bound.begin(site, call)
        except ChunkflowError as error:  # the program alone still runs
            _log.warning("%s calls do not run as a cycle: %s", len(bound.keys), error)
            self._refused.append(bound.keys)
            self._forget(bound)
            return None

    def _forget(self, bound: BoundCycle) -> None:
        bound.release()
        self.known.remove(bound)
        if self.current is bound:
            self.current = None
        if self._job is not None and self._job.instead is bound:
            self._job = None

    def _start_anew(self, key: CallKey, settings: Settings) -> None:
        """Forget what is known of the cycles of a call, but for those that are as good for its new settings."""
        found = [r for r in self.known if key in r.keys]
        gone = [r for r in found if not r.serves(settings)]
        for bound in gone:
            self._forget(bound)
        if found and not gone and (self._job is None or key not in self._job.keys):
            return
        self._job = self._fresh = None
        self._refused.clear()
        self._history.clear()

    def _learn(self, key: CallKey) -> None:
        """Plan the calls since an earlier one of the same weights: at once if no cycle runs, else when they have repeated
        and are more than those of the cycle that runs."""
        current = self.current
        if self._job is not None or (current is not None and len(self.known) >= _MOST_CYCLES):
            return
        for keys, repeated in self._periods(key):
            known = itertools.chain(self._refused, (bound.keys for bound in self.known))
            if any(_turned(keys, others) for others in known):
                continue
            if (current is None or (repeated and len(keys) > len(current.keys))) and self._plan(keys):
                return

    def _periods(self, key: CallKey) -> Iterator[tuple[tuple[CallKey, ...], bool]]:
        """The calls since each of the newest earlier calls of ``key``, and whether the same calls came before them."""
        history = list(self._history)
        end = len(history) - 1
        earlier = (i for i in range(end - 1, max(-1, end - MOST_CALLS - 1), -1) if history[i] is key)
        for begin in itertools.islice(earlier, _TRIES):
            length, keys = end - begin, history[begin:end]
            repeated = begin >= length and history[begin - length : begin] == keys
            once = _once(tuple(keys))
            yield once, repeated or len(once) < length

    def _plan(self, keys: tuple[CallKey, ...]) -> bool:
        """Plan a cycle on another thread.  Returns whether it can be one."""
        sites = sites_of(keys)
        if sites is None:
            return False
        settings = common(sites)
        regions = sum(len(s.code.program.problem.regions) for s in sites)
        again = any(a is b and not s.part for a, b, s in zip(keys, (*keys[1:], keys[0]), sites, strict=True))
        if settings is None or regions > MOST_REGIONS or again:  # again: a whole model, which is a cycle already
            self._refused.append(keys)
            return False
        calls, buffers = calls_of(sites)
        refs = {name: weakref.ref(buffer) for name, buffer in buffers.items()}
        self._job = _Job(keys, calls, refs, settings, folder_of(sites))
        return True

    def _replan(self, bound: BoundCycle, passes: int) -> bool:
        """Plan a cycle again on another thread, if at least ``passes`` warm passes were measured.  Returns whether."""
        sites, timings = sites_of(bound.keys), bound.timings(passes)
        settings = None if sites is None else common(sites)
        if sites is None or settings is None or timings is None:
            return False
        self._job = _Job(bound.keys, bound.calls, bound.buffers, settings, folder_of(sites), bound, timings)
        return True

    def _finished(self) -> BoundCycle | None:
        """The cycle that has been planned since the last call."""
        job = self._job
        if job is None or job.thread.is_alive():
            return None
        self._job = None
        if not isinstance(job.result, tuple):
            self._not_planned(job)
            return None
        cycle, marks = job.result
        made = BoundCycle(self._arena, job.calls, job.buffers, job.settings, cycle, marks, keys=job.keys)
        if not made.lasts:
            return None
        if (before := job.instead) is None:
            made.replan_after = max((s.code.replan_after for s in sites_of(job.keys) or ()), default=0)
        elif before.replan_after and before.cycle.plan.placement == cycle.plan.placement:
            before.replan_after = 0
            return None
        else:
            made.jumps = before.jumps
            self._forget(before)
        for old in [r for r in self.known if r is not self.current][: max(0, len(self.known) + 1 - _MOST_CYCLES)]:
            self._forget(old)
        self.known.append(made)
        if job.folder is not None:
            with contextlib.suppress(OSError):  # a full disk is no error
                _write(made, job.folder)
        _log.info("%s calls repeat and run as a cycle: %s bytes on the device", len(job.keys), cycle.plan.device_bytes)
        return made

    def _not_planned(self, job: _Job) -> None:
        """There is no plan: the calls run as they do now."""
        if job.instead is not None:
            job.instead.replan_after = 0
            _log.warning("the current plan of %s calls is kept: %s", len(job.keys), job.result)
            return
        self._refused.append(job.keys)
        if job.result is not None:
            _log.warning(
                "%s calls repeat, but each runs under its own plan and fetches its weights when it starts: %s",
                len(job.keys),
                job.result,
            )


def _write(bound: BoundCycle, dump: Path) -> None:
    """Write the plan and the calls of a cycle into a folder of its own, beside ``dump``, that of one of its calls."""
    plan, rank = bound.cycle.plan, dump.name.partition("_")[0]
    folder = dump.parent / f"{rank}_cycle_of_{len(bound.keys)}_{plan.digest}"
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(plan.to_json())
    calls = (
        f"# call {number}: {plan.regions[call.start].block}\n{call}" for number, call in enumerate(bound.cycle.calls)
    )
    (folder / "calls.txt").write_text("\n\n".join(calls))
    bound.folder = folder


def _once(keys: tuple[CallKey, ...]) -> tuple[CallKey, ...]:
    """The shortest cycle that these calls are repetitions of."""
    length = len(keys)
    return next(keys[:n] for n in range(1, length + 1) if length % n == 0 and keys == keys[:n] * (length // n))


def _turned(keys: tuple[CallKey, ...], others: tuple[CallKey, ...]) -> bool:
    """Whether two cycles are the same, wherever they begin."""
    if len(keys) != len(others):
        return False
    return any(keys == (*others[i:], *others[:i]) for i, key in enumerate(others) if key is keys[0])
