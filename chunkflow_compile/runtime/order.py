"""Order: learns in which order the programs of an arena are called, and decides which cycle runs a call.

Each call is recorded by its *key*, which identifies the weights that the regions of the call read.  When a sequence of keys
has occurred twice in a row, the calls with these keys are planned as a cycle, which runs from the third pass on.  A pass is
one round through the calls of a cycle.  Ranks that call the same programs plan the cycle in the same pass.

A call that is not the expected next call is a *jump*.  The current cycle, or another known cycle that contains this call,
continues at the position of the call.  If no cycle contains the call, its program runs alone (single_call.py).  In both
cases, the executor first copies those weights that the call needs and that are not in the arena yet.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import size

from .arena import Arena
from .bound_cycle import BoundCycle
from .call_site import CallKey, CallSite
from .cycle_plan import (
    MOST_CALLS,
    calls_of,
    candidate_periods,
    dump,
    fits_budget,
    is_optimal_for,
    is_rotation,
    merge_settings,
    plan_cycle,
)
from .executor import Executor

_log = logging.getLogger(__name__)

# The maximum number of regions in a cycle.  It is enough for two models of 128 blocks that are called twice per step.  A
# limit is needed because planning time grows with the number of regions.
MOST_REGIONS = 4096
# The maximum number of cycles that an arena remembers.  Each cycle keeps its plan and its programs, but no device memory.
_MOST_CYCLES = 8


class Order:
    """The order in which the programs of an arena are called, and the cycles of these calls.

    Not thread-safe: callers hold the lock of the arena.  ``cycles``: the known cycles.  ``current``: the cycle that runs
    now, or None.
    """

    def __init__(self, arena: Arena) -> None:
        self.cycles: list[BoundCycle] = []
        self.current: BoundCycle | None = None
        self._arena = arena
        self._calls: weakref.WeakKeyDictionary[CallSite, CallKey | None] = weakref.WeakKeyDictionary()  # oldest first
        self._keys: weakref.WeakValueDictionary[object, CallKey] = weakref.WeakValueDictionary()
        self._history: deque[CallKey] = deque(maxlen=2 * MOST_CALLS + 1)
        self._rejected: deque[tuple[CallKey, ...]] = deque(maxlen=4 * _MOST_CYCLES)
        self._unexpected = 0

    def add(self, call: CallSite) -> CallKey | None:
        """Add a call; return its key, or None if the call cannot be part of a cycle."""
        self._calls[call] = key = self._key_of(call)
        return key

    def remove(self, call: CallSite) -> None:
        """Remove a call whose program has ended."""
        self._calls.pop(call, None)

    def _key_of(self, call: CallSite) -> CallKey | None:
        """Return the key of a call; None if the call cannot be part of a cycle, for example because the user gave its plan.

        Two calls have the same key if their regions read the same weights, the same weights are compressed, and collectives
        of the same kinds run between the same regions."""
        settings, buffers, problem = call.variant.settings, call.buffers, call.program.problem
        chosen = settings.goal.policy != "chunkflow" or settings.plan is not None or settings.timings is not None
        chosen = chosen or settings.preamble
        if chosen or not settings.enables("cycle") or not buffers:
            for cycle in self.cycles_of(call):
                self.forget(cycle)
            return None
        regions = [[buffers[name] for name in region.weights if name in buffers] for region in problem.regions]
        read = tuple(tuple(sorted(map(id, region))) for region in regions)
        packed = frozenset(id(buffers[w.name]) for w in problem.weights if w.source.compressed)
        identity = read, packed, tuple((c.kind, c.before, c.until) for c in problem.collectives)
        key = self._keys.get(identity)
        if key is None or not key.alive:
            key = self._keys[identity] = CallKey(itertools.chain(*regions), settings)
        elif key.renew(settings):  # the call was re-planned for another goal
            self._relearn(key, lambda cycle: is_optimal_for(cycle, settings))
        else:
            fits = partial(fits_budget, live_bytes=problem.live_bytes, goal=settings.goal)
            if not all(map(fits, self._cycles_with(key))):
                self._relearn(key, fits)
        return key

    def cycles_of(self, call: CallSite) -> list[BoundCycle]:
        """Return the known cycles that contain weights of ``call``."""
        own = set(map(id, call.buffers.values()))
        return [cycle for cycle in self.cycles if any(id(buffer) in own for buffer in cycle.buffers.values())]

    def forget(self, cycle: BoundCycle) -> None:
        self._arena.release(cycle)
        self.cycles.remove(cycle)
        if self.current is cycle:
            self.current = None

    def swap_plan(self, cycle: BoundCycle, again: BoundCycle) -> None:
        """From the next pass on, run ``again`` instead of ``cycle``.  ``again``: the same cycle under another plan."""
        if cycle in self.cycles:
            runs = cycle is self.current
            again.continue_from(cycle)
            self.forget(cycle)
            self._add(again)
            self.current = again if runs else self.current

    def advance(self, call: CallSite, key: CallKey) -> tuple[BoundCycle, Executor] | None:
        """Record that ``call`` is about to run.  Return the cycle that runs the call, and the executor of the call in this
        cycle; None if the call runs alone."""
        if (place := self._locate(call, key)) is None:
            return None
        cycle, number = place
        try:
            return cycle, cycle.begin(call, number)
        except ChunkflowError as error:  # not raised, because the program of this call can still run alone
            _log.warning("%s calls do not run as a cycle: %s", len(cycle.keys), str(error))
            self._rejected.append(cycle.keys)
            self.forget(cycle)
            return None

    def _locate(self, call: CallSite, key: CallKey) -> tuple[BoundCycle, int] | None:
        """Return the cycle that runs ``call``, and the position of the call in this cycle; None if no cycle contains the
        call."""
        previous = self._history[-1] if self._history else None
        self._history.append(key)
        if self.current is not None and not self.current.can_bind():
            self.prune()
        current = self.current
        if current is not None and current.keys[current.position] is key:
            self._unexpected = 0
            return current, current.position
        if current is None and key is previous and not call.part:
            return None  # a whole model that is called repeatedly runs alone
        return self._on_unexpected_call(key, previous, call)

    def _on_unexpected_call(
        self, key: CallKey, previous: CallKey | None, call: CallSite
    ) -> tuple[BoundCycle, int] | None:
        """Return the cycle and the position for a call that the current cycle does not expect; None if no cycle contains the
        call."""
        self.prune()
        self._unexpected += 1
        if self.current is not None and self._unexpected > len(self.current.keys):
            self.current = None
        if (learnt := self._try_new_cycle(key)) is not None:
            self.current, self._unexpected = learnt, 0
            return learnt, 0
        for cycle in [c for c in (self.current, *self.cycles) if c is not None]:
            count, other = len(cycle.keys), cycle is not self.current
            places = (number % count for number in range(cycle.position, cycle.position + count))
            # the search starts at the expected position
            number = next((number for number in places if cycle.keys[number] is key), None)
            if number is None or (other and not call.part and cycle.keys[number - 1] is not previous):
                continue
            if other or number != cycle.position:
                cycle.add_jump()
                call.counts.add_jump()
            self.current = cycle
            return cycle, number
        return None

    def prune(self) -> None:
        """Forget the cycles whose weights no longer exist."""
        for cycle in [c for c in self.cycles if not c.alive]:
            self.forget(cycle)

    def _cycles_with(self, key: CallKey) -> list[BoundCycle]:
        return [cycle for cycle in self.cycles if key in cycle.keys]

    def _relearn(self, key: CallKey, stays: Callable[[BoundCycle], bool]) -> None:
        """Forget each cycle that contains ``key`` and for which ``stays`` returns False.

        If a cycle is forgotten, or no cycle contains the key, also clear the history of calls, so that cycles are learned
        from scratch.
        """
        cycles = self._cycles_with(key)
        gone = [cycle for cycle in cycles if not stays(cycle)]
        for cycle in gone:
            self.forget(cycle)
        if gone or not cycles:
            self._rejected.clear()
            self._history.clear()

    def _try_new_cycle(self, key: CallKey) -> BoundCycle | None:
        """Plan a new cycle that begins with the latest call, whose key is ``key``.  Return None if there is no such cycle.

        :func:`candidate_periods` yields the cycles to try.  If the current cycle contains the latest call, the new cycle must
        be longer than the current one.  If the current cycle does not contain the latest call, the new cycle may have any
        length.  For example, a block that is split into slices only at some input sizes has another key at these sizes than
        at other sizes, so a cycle for the other sizes does not contain this key.
        """
        current = self.current
        if current is not None and len(self.cycles) >= _MOST_CYCLES:
            return None
        for keys in candidate_periods(list(self._history)):
            planned_before = itertools.chain(self._rejected, (cycle.keys for cycle in self.cycles))
            longer = current is None or len(keys) > len(current.keys) or key not in current.keys
            if not longer or any(is_rotation(keys, k) for k in planned_before):
                continue
            if (learnt := self._plan(keys)) is not None:
                return learnt
        return None

    def latest_calls(self, keys: Sequence[CallKey]) -> list[CallSite] | None:
        """Return the latest call site for each key; None if a key has no call site, because the program of the key has
        ended."""
        latest = {key: call for call, key in self._calls.items()}
        calls = [latest[key] for key in keys if key in latest]
        return calls if len(calls) == len(keys) else None

    def _live_bytes(self, key: CallKey) -> int:
        """Return the maximum bytes of activations over all calls with this key.  These calls may have different input
        sizes."""
        return max((call.program.problem.live_bytes for call, other in self._calls.items() if other is key), default=0)

    def _plan(self, keys: tuple[CallKey, ...]) -> BoundCycle | None:
        """Plan a cycle of the calls with these ``keys``; return None if these calls cannot be a cycle."""
        calls = self.latest_calls(keys)
        if calls is None or not all(key.alive for key in keys):
            return None
        settings = merge_settings(calls)
        regions = sum(len(call.program.problem.regions) for call in calls)
        # a whole model that is called repeatedly is already a cycle of one call
        again = any(a is b and not c.part for a, b, c in zip(keys, (*keys[1:], keys[0]), calls, strict=True))
        if settings is None or regions > MOST_REGIONS or again:
            self._rejected.append(keys)
            return None
        try:
            replan_after = max(call.variant.replan_after for call in calls)
            parts = calls_of(calls, [self._live_bytes(key) for key in keys])
            cycle = plan_cycle(self._arena, keys, *parts, settings, replan_after=replan_after)
        except ChunkflowError as error:
            self._rejected.append(keys)
            _log.warning(
                "%s calls repeat, but each runs under its own plan and fetches its weights when it starts: %s",
                len(keys),
                str(error),  # logged as text, because the traceback of the error would keep the arena alive
            )
            return None
        self._add(cycle)
        return cycle

    def _add(self, cycle: BoundCycle) -> None:
        """Remember a cycle.  If the arena then has more than _MOST_CYCLES cycles, forget the oldest cycles."""
        for old in [c for c in self.cycles if c is not self.current][: max(0, len(self.cycles) + 1 - _MOST_CYCLES)]:
            self.forget(old)
        self.cycles.append(cycle)
        dump(cycle, self.latest_calls(cycle.keys) or ())
        plan = cycle.plan
        _log.info("%s calls repeat and run as a cycle: %s on the device", len(cycle.keys), size(plan.device_bytes))
