"""Cycles: the order in which the programs of an arena run, learnt while they run, and planned as one when it repeats.

Every call is recorded by what it reads: a *key* stands for the weights of its regions.  When the same keys have come
twice in the same order, the third pass is planned as one cycle, once, and runs as it: each call runs the program of its
place in the cycle.  Ranks that call the same programs plan them in the same pass.  A call other than the expected one is a
*jump*: it finds its place in the cycle, or in another that is known, or runs its own program.  Whatever ran before, it then
fetches what it needs.

A cycle is planned from the rates of the hardware profile, and the time between its calls is taken as none.  With
``replan_after``, it is planned once more from the times of its regions and of the time between its calls.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.pipeline import Settings, make_cycle
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.program.arrivals import arrivals
from chunkflow_compile.passes.program.cycle import Call
from chunkflow_compile.weights.host_buffer import HostBuffer
from chunkflow_compile.weights.progress import planning

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


class Cycles:
    """What an arena has learnt of the order in which its programs run."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._keys: weakref.WeakValueDictionary[object, CallKey] = weakref.WeakValueDictionary()
        self._history: deque[CallKey] = deque(maxlen=2 * MOST_CALLS + 1)
        self._refused: deque[tuple[CallKey, ...]] = deque(maxlen=4 * _MOST_CYCLES)
        self._unexpected = 0
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

    def plan_again(self, bound: BoundCycle, timings: Timings) -> tuple[Plan, Callable[[], None]]:
        """A plan of a cycle from measured times, and what makes its next pass run it.

        Raises ChunkflowError if there is none.
        """
        if (sites := sites_of(bound.keys)) is None or (settings := common(sites)) is None:
            raise ChunkflowError("A program of this cycle has ended since it was measured: call the model again.")
        again = self._planned(bound.keys, bound.calls, bound.buffers, settings, timings)
        again.position, again.jumps = bound.position, bound.jumps

        def swap() -> None:
            if bound in self.known:
                in_turn = bound is self.current
                self._forget(bound)
                self._add(again, folder_of(sites))
                self.current = again if in_turn else self.current

        return again.cycle.plan, swap

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
        self.current = None

    def _unforeseen(self, key: CallKey, previous: CallKey | None, site: CallSite) -> Executor | None:
        """A call that the current cycle does not expect, or that no cycle runs."""
        self.prune()
        self._unexpected += 1
        if self.current is not None and self._unexpected > len(self.current.keys):
            self.current = None
        if (learnt := self._learn(key)) is not None:
            self.current, self._unexpected = learnt, 0
            return self._run(learnt, site, 0)
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

    def _start_anew(self, key: CallKey, settings: Settings) -> None:
        """Forget what is known of the cycles of a call, but for those that are as good for its new settings."""
        found = [r for r in self.known if key in r.keys]
        gone = [r for r in found if not r.serves(settings)]
        for bound in gone:
            self._forget(bound)
        if found and not gone:
            return
        self._refused.clear()
        self._history.clear()

    def _learn(self, key: CallKey) -> BoundCycle | None:
        """Plan the calls since an earlier one of the same weights as a cycle, which begins now: when they have come twice,
        and are more than those of the cycle that runs."""
        current = self.current
        if current is not None and len(self.known) >= _MOST_CYCLES:
            return None
        for keys in self._periods(key):
            known = itertools.chain(self._refused, (bound.keys for bound in self.known))
            if (current is not None and len(keys) <= len(current.keys)) or any(_turned(keys, k) for k in known):
                continue
            if (learnt := self._plan(keys)) is not None:
                return learnt
        return None

    def _periods(self, key: CallKey) -> Iterator[tuple[CallKey, ...]]:
        """The calls since each of the newest earlier calls of ``key``, if the same calls came before them."""
        history = list(self._history)
        end = len(history) - 1
        earlier = (i for i in range(end - 1, max(-1, end - MOST_CALLS - 1), -1) if history[i] is key)
        for begin in itertools.islice(earlier, _TRIES):
            length, keys = end - begin, history[begin:end]
            once = _once(tuple(keys))
            if len(once) < length or (begin >= length and history[begin - length : begin] == keys):
                yield once

    def _plan(self, keys: tuple[CallKey, ...]) -> BoundCycle | None:
        """Plan a cycle of these calls; None if they cannot be one."""
        sites = sites_of(keys)
        if sites is None or not all(key.lasts for key in keys):
            return None
        settings = common(sites)
        regions = sum(len(s.code.program.problem.regions) for s in sites)
        again = any(a is b and not s.part for a, b, s in zip(keys, (*keys[1:], keys[0]), sites, strict=True))
        if settings is None or regions > MOST_REGIONS or again:  # again: a whole model, which is a cycle already
            self._refused.append(keys)
            return None
        calls, buffers = calls_of(sites)
        refs = {name: weakref.ref(buffer) for name, buffer in buffers.items()}
        try:
            bound = self._planned(keys, calls, refs, settings)
        except ChunkflowError as error:
            self._refused.append(keys)
            _log.warning(
                "%s calls repeat, but each runs under its own plan and fetches its weights when it starts: %s",
                len(keys),
                error,
            )
            return None
        bound.replan_after = max(s.code.replan_after for s in sites)
        self._add(bound, folder_of(sites))
        return bound

    def _planned(
        self,
        keys: tuple[CallKey, ...],
        calls: Sequence[Call],
        buffers: BufferRefs,
        settings: Settings,
        timings: Timings | None = None,
    ) -> BoundCycle:
        """A cycle that is planned now.  Raises ChunkflowError if there is no plan."""
        with planning(f"{len(keys)} calls that repeat"):
            cycle = make_cycle(calls, replace(settings, timings=timings))
            return BoundCycle(self._arena, calls, buffers, settings, cycle, arrivals(cycle), keys=keys)

    def _add(self, bound: BoundCycle, folder: Path | None) -> None:
        """Know a cycle.  ``folder``: of the dump of one of its calls, if there is one."""
        for old in [r for r in self.known if r is not self.current][: max(0, len(self.known) + 1 - _MOST_CYCLES)]:
            self._forget(old)
        self.known.append(bound)
        if folder is not None:
            with contextlib.suppress(OSError):  # a full disk is no error
                _write(bound, folder)
        plan = bound.cycle.plan
        _log.info("%s calls repeat and run as a cycle: %s bytes on the device", len(bound.keys), plan.device_bytes)


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
