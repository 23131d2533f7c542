"""Divides the memory of a device among the phases of a pipeline.  A phase is a component, and phases run one after another.

Phases that alternate in every step share one arena for weights.  Each other phase has its own arena.  The programs of phases
with a shared arena run as one cycle, and one plan covers the whole cycle.  Before a phase begins, the arenas of other phases
are freed, least recently used first, until the weights and the activations of the phase fit.  During each call of a phase,
the memory that the call needs in addition to the weights is measured.  The weights are then planned for the rest of the
budget.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from chunkflow_compile.hardware.headroom import usable
from chunkflow_compile.passes.errors import ChunkflowError, shortage
from chunkflow_compile.pipeline.allocators import Allocator
from chunkflow_compile.pipeline.oom_retry import RngSnapshot, given_to, out_of_memory, runs_once
from chunkflow_compile.pipeline.phase import Entry, Phase, kept_by
from chunkflow_compile.pipeline.shortages import no_memory_for_weights, no_plan, out_of_memory_again
from chunkflow_compile.placed.offload import cycles, programs
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.report.phases import PipelineFigures
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.weights.locks import ProcessLock

_log = logging.getLogger(__name__)

# A phase is planned again if its part of the budget has shrunk, or has grown by more than this share of the whole budget.  A
# smaller gain is not worth a cold start.
_WORTH_A_PLAN = 0.02
# The name of the attribute in which a pipeline, and each of its components, stores the Budget.
BUDGET = "_chunkflow_budget"


class _Refused(NamedTuple):
    """A failed attempt to plan a phase together with the phases that share its arena.

    ``asked``: for each of these phases, the name, the number of programs, the predicted activations, and the limit at the
    time of the attempt.  ``rest``: the bytes of the budget that remained for weights after activations were subtracted.
    ``why``: the error message.
    """

    asked: tuple[object, ...]
    rest: int
    why: str


class Budget:
    """The memory of a device that the phases of one or several pipelines share.

    ``total``: the maximum size in bytes of weights and activations together.  ``turn``: the lock that a thread holds during a
    generation.  ``lock``: the lock that a thread holds during a call of a phase.
    """

    def __init__(self, device: torch.device, total: int) -> None:
        self.device = device
        self.total = total
        self.turn = ProcessLock()
        self.lock = ProcessLock()
        self.phases: list[Phase] = []
        # compiled pipeline -> names of its components
        self.pipelines = weakref.WeakKeyDictionary[Any, frozenset[str]]()
        self.arguments: dict[str, Any] = {}  # Arguments of the last compile(pipe), and the defaults for the next one.
        self._generated = False  # Whether a generation has ended since compile(pipe).
        self._allocator = Allocator(device)
        # the peak bytes on the device over all calls since compile(pipe); None if they are not measured
        self.most: int | None = None
        self._warned = False  # Whether the warning about gradients was logged.
        self._last: list[Phase] = []  # The phases in the order of their last calls, the most recent at the end.
        self._settled = False  # Whether other arenas were already freed for the phase at the end of ``_last``.
        self._running: tuple[Phase, int] | None = None  # The phase whose call is running, and the caller's thread id.
        self._refused = weakref.WeakKeyDictionary[Phase, _Refused]()

    @property
    def usable(self) -> int:
        """The part of the budget that plans may use, in bytes."""
        return usable(self.total)

    def figures(self) -> PipelineFigures:
        """Return the memory and the call times of all phases, in the order of the components."""
        small, first = kept_by(self.phases), {p.arena: p for p in reversed(self.phases)}
        return PipelineFigures(tuple(p.figures(small, first[p.arena]) for p in self.phases), self.total, self.most)

    @property
    def host_bytes(self) -> int:
        """The size in bytes of all phases' weights in host memory."""
        placements = (placement_of(phase.root) for phase in self.phases)
        return sum(placement.store.held_bytes for placement in placements if placement is not None)

    def log(self) -> None:
        """Log one line per phase at INFO, but only on rank 0."""
        if _log.isEnabledFor(logging.INFO) and (not dist.is_initialized() or dist.get_rank() == 0):
            for figures in self.figures().phases:
                _log.info("%s", figures)

    def phase_of(self, module: nn.Module) -> Phase | None:
        """Return the phase of a component; None if the component does not belong to this budget."""
        return next((phase for phase in self.phases if phase.root is module), None)

    def add_pipeline(self, pipe: Any, components: Iterable[str], arguments: dict[str, Any]) -> None:
        """Register a compiled pipeline.  All its components must be phases of this budget.

        ``arguments``: the arguments with which the user compiled the pipeline.
        """
        self.arguments = arguments
        self.pipelines[pipe] = frozenset(components)
        self._generated = False

    def add(self, phase: Phase, methods: tuple[str, ...]) -> None:
        """Intercept the calls of a component, so that :meth:`run` runs them.

        ``methods``: the names of the methods to intercept; if it is empty, calls of the module itself are intercepted.
        """
        self.phases.append(phase)
        if methods:
            for name in methods:
                phase.methods[name] = phase.root.__dict__.get(name)
                phase.root.__dict__[name] = Entry(self.run, phase, name, getattr(phase.root, name))
        else:
            call = phase.root._compiled_call_impl or phase.root._call_impl
            phase.root._compiled_call_impl = Entry(self.run, phase, "_call_impl", call)

    def remove(self, phase: Phase) -> None:
        """Undo :meth:`add`."""
        phase.root._compiled_call_impl = None
        for name, before in phase.methods.items():
            if before is None:
                phase.root.__dict__.pop(name, None)
            else:
                phase.root.__dict__[name] = before
        self.forget(phase)

    def forget(self, phase: Phase) -> None:
        """Drop a phase that was removed or whose component no longer exists."""
        # assign new lists, because another thread may be iterating over the old lists
        self.phases = [other for other in self.phases if other is not phase]
        self._last = [other for other in self._last if other is not phase]
        self._settled = False

    @contextlib.contextmanager
    def generation(self) -> Iterator[None]:
        """Return the context in which a generation, that is, one call of a pipeline, runs.

        The caller must hold ``turn``.  When the first generation after compile(pipe) ends, one line per phase is logged.
        """
        try:
            yield
        finally:
            with self.lock():
                for phase in self.phases:
                    phase.end_generation()
        if not self._generated:
            self._generated = True
            self.log()

    def run(self, phase: Phase, call: functools.partial[Any]) -> Any:
        """Run a call of a phase, while calls in other threads wait.  Raises ChunkflowError if the budget is too small."""
        with self.lock(), self._without_gradients(phase, call):
            phase.begin_call()
            self._make_room_for(phase)
            before, self._running = self._running, (phase, threading.get_ident())
            try:
                return self._run(phase, call)
            finally:
                self._running = before

    def _without_gradients(self, phase: Phase, call: functools.partial[Any]) -> contextlib.AbstractContextManager[Any]:
        """Return a context that disables gradients, because compiled phases do not support gradients.

        Gradients may be enabled if the user calls a component directly.  If an input of the call requires gradients,
        gradients stay enabled.
        """
        if not torch.is_grad_enabled() or any(t.requires_grad for t in given_to(call, torch.Tensor)):
            return contextlib.nullcontext()
        if not self._warned:
            self._warned = True
            _log.warning("%s runs without gradients, as all components of a compiled pipeline do", phase.name)
        return torch.no_grad()

    def __reduce_ex__(self, _: object) -> tuple[type[None], tuple[()]]:
        """Replace this object by None in copies and pickles, because a copied pipeline or component belongs to no budget."""
        return type(None), ()

    def _run(self, phase: Phase, call: functools.partial[Any], again: bool = False) -> Any:
        """Run and measure a call.  ``again``: whether this is a retry of a call that ran out of memory."""
        self._allocator.begin()
        rng, steps = RngSnapshot(self.device, call), phase.steps()
        held, others, begun = phase.arena.held, self._held_by_others(phase), time.perf_counter()
        try:
            try:
                result = call()
            finally:
                peak = self._allocator.peak()
                self.most = peak if self.most is None else max(self.most, peak or 0)
        except (torch.OutOfMemoryError, ChunkflowError) as error:
            if phase.counts and (short := shortage(error)) is not None:
                needed = short.needed + kept_by(self.phases) - phase.kept
                raise no_plan(phase, needed, self.total, symbolic=short is error) from error
            if not out_of_memory(error):
                raise
            if again or runs_once(phase.root, call):
                self._vacate(self.phases)
                raise out_of_memory_again(phase, self.total, error) from error
        else:
            phase.ended(steps, time.perf_counter() - begun)
            try:
                self._note(phase, held, others, peak)
            except ChunkflowError as error:  # Still return the result, which is correct and may have taken minutes.
                # On a CPU the peak is unknown, so only the bytes in the arenas are compared with the budget.
                taken = phase.arena.held + others if peak is None else peak
                if phase.exceeds(taken):
                    _log.warning("A call of %s took more than the budget: %s", phase.name, error)
            return result
        # Retry outside the exception handler: inside, the traceback of the error would keep the activations alive.
        _log.warning("%s ran out of memory: weights give way, and the call runs again", phase.name)
        phase.begin_retry()
        self._give_back(phase)
        rng.rewind()
        return self._run(phase, call, again=True)

    def _sharing(self, phase: Phase) -> list[Phase]:
        """Return all phases that use the arena of ``phase``, including ``phase`` itself."""
        return [other for other in self.phases if other.arena is phase.arena]

    def _held_by_others(self, phase: Phase, graphs: bool = False) -> int:
        """Return the number of bytes in all arenas except the arena of ``phase``.

        ``graphs``: whether to add the memory of the CUDA graphs that belong to these arenas.  The allocator does not count
        the memory of CUDA graphs as allocated.
        """
        others = {p.arena for p in self.phases} - {phase.arena}
        return sum(arena.held + (arena.graphs.nbytes if graphs else 0) for arena in others)

    def _vacate(self, phases: Iterable[Phase]) -> None:
        """Free the arenas of ``phases``, and return their memory to the device."""
        for phase in phases:
            phase.arena.evict()
        self._allocator.trim()

    def _make_room_for(self, phase: Phase) -> None:
        """Free the arenas of other phases, least recently used first, until ``phase`` fits."""
        if self._settled and self._last[-1] is phase:
            return
        self._settled = True
        self._last = [*(other for other in self._last if other is not phase), phase]
        if phase.budget is None and len(self._sharing(phase)) > 1:  # the arena may contain weights of another phase
            self._vacate([phase])
        self._evict(phase)
        self._give_cache_back(phase)

    def most_bytes(self, arena: Arena) -> int | None:
        """Return the maximum total bytes of the weights in an arena that several phases share.

        Returns None if only one phase uses the arena, or if no phase is planned yet.
        """
        sharing = [phase for phase in self.phases if phase.arena is arena]
        planned = [phase.budget - phase.kept for phase in sharing if phase.budget is not None]
        return max(planned, default=None) if len(sharing) > 1 else None

    def make_room(self, arena: Arena, nbytes: int) -> None:
        """Free other arenas, because ``arena`` is about to allocate ``nbytes`` bytes.

        The plan of a cycle may need more memory than the total size of its weights: if several calls read the same weight,
        the plan may contain one copy of the weight for each of these calls.
        """
        phase, thread = self._running or (None, None)
        if phase is not None and phase.arena is arena and thread == threading.get_ident():  # this thread holds ``lock``
            self._evict(phase, nbytes)

    def _evict(self, phase: Phase, nbytes: int = 0) -> None:
        """Free the arenas of other phases, least recently used first, until ``phase`` fits.

        ``nbytes``: the number of bytes that the arena of ``phase`` is about to allocate.
        """
        # The bytes that other arenas may keep.  For a phase without a budget, -1 makes the loop below free all other arenas.
        room = -1
        if phase.budget is not None:
            room = self.usable - phase.activations - self._taken(phase, phase.budget, nbytes)
        for other in self._last:
            if self._held_by_others(phase, graphs=True) <= room:
                break
            if other.arena is not phase.arena and (other.arena.held or other.arena.graphs.nbytes):
                self._vacate([other])

    def _taken(self, phase: Phase, budget: int, nbytes: int = 0) -> int:
        """Estimate the maximum bytes of the weights in a phase's arena, over the calls of all phases that share this arena.

        ``budget``: the budget of the phase in bytes.  ``nbytes``: the number of bytes that the arena is about to allocate.
        """
        streamed = sum(other.streamed for other in self._sharing(phase))
        return max(phase.arena.held + nbytes, min(streamed, budget - phase.kept))

    def _give_cache_back(self, phase: Phase) -> None:
        """Return unused memory of the allocator to the device if the phase would otherwise exceed the budget.

        The activations of this phase differ in size from the activations of the previous phase.  So the allocator would
        reserve new memory instead of reusing the memory that it has cached.
        """
        reserved = self._allocator.reserved()
        if reserved is None:
            return
        # the bytes that ``phase.activations`` includes and that the allocator has already reserved
        held = kept_by(self.phases) + phase.arena.graphs.nbytes
        takes = max(0, phase.activations - held)
        if phase.budget is not None:
            takes += self._taken(phase, phase.budget) - phase.arena.held
        if phase.budget is None or reserved + takes > self.total:
            self._allocator.trim()

    def _give_back(self, phase: Phase) -> None:
        """Evict the weights of all phases, and give ``phase`` a smaller plan until the generation ends."""
        self._vacate(self.phases)
        planned = [p.plan.device_bytes for p in programs(phase.root)]
        planned += [r.cycle.plan.device_bytes for r in cycles(phase.root)]
        for share in (0.5, 0.75) if planned else ():
            # If no plan fits in half of the planned bytes, try three quarters.  If no plan fits in three quarters, the phase
            # keeps its plan, and the eviction of the other phases' weights has to suffice.
            with contextlib.suppress(ChunkflowError):
                for other in self._sharing(phase):
                    if other is phase or other.budget is not None:
                        self._set_budget(other, int(share * max(planned)))
                        other.keep_budget()
                return

    def _note(self, phase: Phase, held: int, others: int, peak: int | None) -> None:
        """Record the memory that a call needed in addition to the weights, and plan the weights for the rest of the budget.

        ``held``: the bytes that the arena of this phase held when the call began.  ``others``: the bytes that all other
        arenas held when the call began.  ``peak``: the peak number of bytes on the device during the call, or None if the
        peak cannot be measured.
        Raises ChunkflowError if the rest of the budget is too small for the weights.
        """
        after, learned = phase.arena.held, phase.learned
        if peak is None:
            if phase.budget is None or phase.grew:
                phase.assume(kept_by(self.phases))
        # If the call has evicted weights of other phases, the peak may include these weights, so the peak is not recorded.
        elif others == self._held_by_others(phase):
            # The activations of a CUDA graph are in the memory pool of the graph, which stays allocated between calls.
            pool = phase.arena.graphs.nbytes + kept_by(self.phases) if phase.arena.graphs.nbytes else 0
            phase.learn(max(0, peak - after - others, pool), steady=held == after)
        try:
            replanned = self._plan(phase)
        except ChunkflowError:  # discard the activations of this call, because calls with smaller inputs may still fit
            phase.unlearn(learned)
            self._settled = False
            raise
        if replanned or phase.activations != learned.activations:
            self._settled = False  # other arenas may have to be evicted again

    def _plan(self, phase: Phase) -> bool:
        """Plan a phase, and the phases that share its arena, if the part of the budget for weights has changed.

        A small increase is ignored.  Returns whether a plan was made.  Raises ChunkflowError if the part of the budget for
        weights is too small.
        """
        planned = [p for p in self._sharing(phase) if p is phase or p.budget is not None]
        rest, replanned = self.usable - max(p.activations for p in planned), False
        asked = tuple((p.name, len(programs(p.root)), p.live, p.limit) for p in planned)
        before, little = self._refused.pop(phase, None), _WORTH_A_PLAN * self.total
        if before is not None and before.asked == asked and before.rest - little <= rest <= before.rest:
            # planning would fail again, because the memory for weights has not grown since the last failure
            self._refused[phase] = before
            raise ChunkflowError(before.why)
        for p in planned:
            budget = rest + p.kept
            if p.limit is not None:
                budget = min(budget, max(p.limit, p.least))
            if p.budget is None or not p.budget <= budget <= p.budget + little:
                try:
                    self._set_budget(p, budget)
                except ChunkflowError as error:
                    self._refused[phase] = _Refused(asked, rest, str(error))
                    raise
                replanned = True
        return replanned

    def _set_budget(self, phase: Phase, budget: int) -> None:
        """Plan a phase for ``budget`` bytes of weights on the device.  Raises ChunkflowError if ``budget`` is too small."""
        try:
            phase.plan_for(budget)
        except ChunkflowError as error:
            largest = max(self._sharing(phase), key=lambda p: p.activations)
            raise no_memory_for_weights(phase, largest, budget, self.total, error) from error
        if phase.arena.held > budget - phase.kept:
            self._vacate([phase])


def budget_of(owner: Any) -> Budget | None:
    """Return the budget of a pipeline or of a component; None if there is no budget."""
    budget: Budget | None = getattr(owner, "__dict__", {}).get(BUDGET)
    return budget


def claim(owner: Any, budget: Budget) -> Budget:
    """Assign a budget to a pipeline or a component, unless it already has a budget; return its budget.

    If two threads call this function for the same owner at the same time, both get the same budget.
    """
    if budget_of(owner) is None:
        owner.__dict__.pop(BUDGET, None)  # the attribute is None if ``owner`` is a copy of a compiled pipeline
    own: Budget = owner.__dict__.setdefault(BUDGET, budget)
    return own


def unclaim(owner: Any, budget: Budget) -> None:
    """Undo :func:`claim`."""
    if budget_of(owner) is budget:
        owner.__dict__.pop(BUDGET, None)
