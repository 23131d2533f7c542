"""Phases: the components of a pipeline, which run one after another on one device and share its memory.

A phase is a component's call.  Its weights live in an arena of its own, or in one that it shares with the phases that it
alternates with: their programs run as one cycle, which is planned for all of them.  Before a phase begins, other arenas are
freed, least recently used first, until the weights and the activations of the phase have room.  What a phase needs beside
its weights is measured: the plan of its weights gets the rest of the budget.
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

from chunkflow_compile.hardware.headroom import budget_for, usable
from chunkflow_compile.passes.errors import ChunkflowError, shortage
from chunkflow_compile.pipeline.allocators import Allocator
from chunkflow_compile.pipeline.oom_retry import RngSnapshot, given_to, out_of_memory, runs_once
from chunkflow_compile.pipeline.phase import Entry, Phase, kept_by
from chunkflow_compile.placed.offload import cycles, programs
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.report.phases import PipelineFigures
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.units import enough, size
from chunkflow_compile.weights.locks import ProcessLock

_log = logging.getLogger(__name__)

# A plan is made again if its part of the budget has grown by this share of the budget: less is worth no cold start.
_WORTH_A_PLAN = 0.02
# Attribute of a pipeline and of its components: their Budget.
BUDGET = "_chunkflow_budget"


class _Refused(NamedTuple):
    """Plans that a phase was refused.  ``asked``: for which programs.  ``rest``: bytes that activations left.  ``why``: the
    error."""

    asked: tuple[object, ...]
    rest: int
    why: str


class Budget:
    """The memory of a device that the phases of one or several pipelines share.

    ``total``: most bytes, weights and activations together.  ``turn``: held by a generation, ``lock`` by a call.
    """

    def __init__(self, device: torch.device, total: int) -> None:
        self.device = device
        self.total = total
        self.turn = ProcessLock()
        self.lock = ProcessLock()
        self.phases: list[Phase] = []
        self.pipelines = weakref.WeakKeyDictionary[Any, frozenset[str]]()  # compiled -> the components at that time
        self.arguments: dict[str, Any] = {}  # of the first compile(pipe), for components that come later
        self._generated = False  # whether a generation has ended since compile(pipe)
        self._allocator = Allocator(device)
        self.most: int | None = (
            None  # bytes that the device held in a call since compile(pipe), if anything counts them
        )
        self._warned = False  # that phases run without gradients
        self._last: list[Phase] = []  # the newest last
        self._settled = False  # whether the newest has its room
        self._running: tuple[Phase, int] | None = None  # the phase whose call runs now, and its thread
        self._refused = weakref.WeakKeyDictionary[Phase, _Refused]()

    @property
    def usable(self) -> int:
        """Bytes of the budget that plans may count on."""
        return usable(self.total)

    def figures(self) -> PipelineFigures:
        """What is known of the phases now, in the order of the components."""
        small, first = kept_by(self.phases), {p.arena: p for p in reversed(self.phases)}
        return PipelineFigures(tuple(p.figures(small, first[p.arena]) for p in self.phases), self.total, self.most)

    @property
    def host_bytes(self) -> int:
        """Bytes of the weights of all phases in host memory."""
        placements = (placement_of(phase.root) for phase in self.phases)
        return sum(placement.store.held_bytes for placement in placements if placement is not None)

    def log(self) -> None:
        """Log a line for each phase, at INFO, on the first rank only."""
        if _log.isEnabledFor(logging.INFO) and (not dist.is_initialized() or dist.get_rank() == 0):
            for figures in self.figures().phases:
                _log.info("%s", figures)

    def phase_of(self, module: nn.Module) -> Phase | None:
        """The phase of a component, None if it has none here."""
        return next((phase for phase in self.phases if phase.root is module), None)

    def add_pipeline(self, pipe: Any, components: Iterable[str], arguments: dict[str, Any]) -> None:
        """All components of a pipeline are phases now.  ``arguments``: of its compile(pipe)."""
        self.arguments = arguments
        self.pipelines[pipe] = frozenset(components)
        self._generated = False

    def add(self, phase: Phase, methods: tuple[str, ...]) -> None:
        """Make the calls of a component a phase: those of the module, or of its ``methods`` if there are any."""
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
        """A phase is removed, or its component no longer exists: only the pipelines keep it."""
        self.phases = [other for other in self.phases if other is not phase]  # another list: it may be read now
        self._last = [other for other in self._last if other is not phase]
        self._settled = False

    @contextlib.contextmanager
    def generation(self) -> Iterator[None]:
        """The call of a pipeline.  The caller holds the turn.  The first one since compile(pipe) is logged."""
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
        """Run a call of a phase, after the calls of other threads.  Raises ChunkflowError if it does not fit the budget."""
        with self.lock(), self._without_gradients(phase, call):
            phase.begin_call()
            self._make_room_for(phase)
            before, self._running = self._running, (phase, threading.get_ident())
            try:
                return self._run(phase, call)
            finally:
                self._running = before

    def _without_gradients(self, phase: Phase, call: functools.partial[Any]) -> contextlib.AbstractContextManager[Any]:
        """No gradients, which compiled phases refuse, in a call outside of the pipeline's; unless its inputs have some."""
        if not torch.is_grad_enabled() or any(t.requires_grad for t in given_to(call, torch.Tensor)):
            return contextlib.nullcontext()
        if not self._warned:
            self._warned = True
            _log.warning("%s runs without gradients, as all components of a compiled pipeline do", phase.name)
        return torch.no_grad()

    def __reduce_ex__(self, _: object) -> tuple[type[None], tuple[()]]:
        """Copy as None: the copy of a pipeline or a component is an ordinary one."""
        return type(None), ()

    def _run(self, phase: Phase, call: functools.partial[Any], again: bool = False) -> Any:
        """Run and measure a call.  ``again``: it ran out of memory before, and weights gave way."""
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
                raise self._needs(phase, short.needed, short is error) from error
            if not out_of_memory(error):
                raise
            if again or runs_once(phase.root, call):
                raise self._does_not_fit(phase, error) from error
        else:
            phase.ended(steps, time.perf_counter() - begun)
            try:
                self._note(phase, held, others, peak)
            except ChunkflowError as error:  # the result is right, and may have taken minutes
                taken = phase.arena.held + others if peak is None else peak  # on a CPU, only weights are counted
                if phase.exceeds(taken):
                    _log.warning("A call of %s took more than the budget: %s", phase.name, error)
            return result
        # outside of the handler: the error's traceback would keep the activations
        _log.warning("%s ran out of memory: weights give way, and the call runs again", phase.name)
        phase.begin_retry()
        self._give_back(phase)
        rng.rewind()
        return self._run(phase, call, again=True)

    def _sharing(self, phase: Phase) -> list[Phase]:
        """The phases whose weights live in the arena of this one, itself included."""
        return [other for other in self.phases if other.arena is phase.arena]

    def _held_by_others(self, phase: Phase, graphs: bool = False) -> int:
        """Bytes that the other arenas hold.  ``graphs``: with those of their CUDA graphs, which the allocator does not count
        as allocated."""
        others = {p.arena for p in self.phases} - {phase.arena}
        return sum(arena.held + (arena.graphs.nbytes if graphs else 0) for arena in others)

    def _vacate(self, phases: Iterable[Phase]) -> None:
        """Free the arenas of ``phases``, and give their memory back to the device."""
        for phase in phases:
            phase.arena.evict()
        self._allocator.trim()

    def _make_room_for(self, phase: Phase) -> None:
        """Free the arenas of other phases, least recently used first, until this one fits."""
        if self._settled and self._last[-1] is phase:
            return
        self._settled = True
        self._last = [*(other for other in self._last if other is not phase), phase]
        if phase.budget is None and len(self._sharing(phase)) > 1:  # what another phase left
            self._vacate([phase])
        self._evict(phase)
        self._give_cache_back(phase)

    def most_bytes(self, arena: Arena) -> int | None:
        """Most bytes of weights in an arena that several phases share; None for the sum of their budgets."""
        sharing = [phase for phase in self.phases if phase.arena is arena]
        planned = [phase.budget - phase.kept for phase in sharing if phase.budget is not None]
        return max(planned, default=None) if len(sharing) > 1 else None

    def make_room(self, arena: Arena, nbytes: int) -> None:
        """Evict other arenas before this one has ``nbytes``.

        A cycle fetches a weight for each call that reads it, so its plan may take more than the weights of the phase.
        """
        phase, thread = self._running or (None, None)
        if phase is not None and phase.arena is arena and thread == threading.get_ident():  # it holds the lock
            self._evict(phase, nbytes)

    def _evict(self, phase: Phase, nbytes: int = 0) -> None:
        """Free the arenas of others, least recently used first, until this phase fits, whose arena gets ``nbytes`` now."""
        room = -1  # what the other arenas may hold; until the phase has a budget, all of them give way
        if phase.budget is not None:
            room = self.usable - phase.activations - self._taken(phase, phase.budget, nbytes)
        for other in self._last:
            if self._held_by_others(phase, graphs=True) <= room:
                break
            if other.arena is not phase.arena and (other.arena.held or other.arena.graphs.nbytes):
                self._vacate([other])

    def _taken(self, phase: Phase, budget: int, nbytes: int = 0) -> int:
        """Bytes of weights that calls of a phase, and of those that share its arena, bring to the device, ``nbytes`` of them
        in an arena that it does not have yet, as far as is known before they run."""
        streamed = sum(other.streamed for other in self._sharing(phase))
        return max(phase.arena.held + nbytes, min(streamed, budget - phase.kept))

    def _give_cache_back(self, phase: Phase) -> None:
        """Give what the allocator keeps for nothing back to the device, if the phase could exceed the budget beside it.

        The activations of one phase are of other sizes than those of the next, which would get new memory from the device.
        """
        reserved = self._allocator.reserved()
        if reserved is None:
            return
        held = kept_by(self.phases) + phase.arena.graphs.nbytes  # reserved already
        takes = max(0, phase.activations - held)
        if phase.budget is not None:
            takes += self._taken(phase, phase.budget) - phase.arena.held
        if phase.budget is None or reserved + takes > self.total:
            self._allocator.trim()

    def _give_back(self, phase: Phase) -> None:
        """Free all weights on the device, and give the phase a smaller plan until the generation ends."""
        self._vacate(self.phases)
        planned = [p.plan.device_bytes for p in programs(phase.root)]
        planned += [r.cycle.plan.device_bytes for r in cycles(phase.root)]
        for share in (0.5, 0.75) if planned else ():
            with contextlib.suppress(ChunkflowError):  # below the least; if all are, only the other phases give way
                for other in self._sharing(phase):
                    if other is phase or other.budget is not None:
                        self._set_budget(other, int(share * max(planned)))
                        other.keep_budget()
                return

    def _does_not_fit(self, phase: Phase, error: BaseException) -> ChunkflowError:
        self._vacate(self.phases)
        tiling = f", or pipe.{phase.name}.enable_tiling()." if hasattr(phase.root, "enable_tiling") else "."
        return ChunkflowError(
            f"{phase.name} ({type(phase.root).__name__}) does not fit a budget of {size(self.total)} with its weights "
            f"streamed: {str(error).splitlines()[0]} Call restore(pipe), then compile with more "
            f"memory, or call the pipeline with smaller sizes{tiling}"
        )

    def _needs(self, phase: Phase, needed: int, compiled: bool) -> ChunkflowError:
        """A program of a phase has no plan, because it needs so many bytes in addition to the small weights of other phases.
        ``compiled``: whether it was compiled before, with symbolic sizes."""
        fixed = " or with dynamic=False (blocks are split only at fixed sizes)" if compiled else ""
        needed += kept_by(self.phases) - phase.kept
        return ChunkflowError(
            f"memory={size(self.total)} is too little for {phase.name} ({type(phase.root).__name__}): one of its programs "
            f"needs {size(needed)}, for its predicted activations and as few of its weights as possible. Call restore(pipe), "
            f"then compile with at least memory={enough(budget_for(needed))!r}{fixed}, or call the pipeline with "
            "smaller sizes."
        )

    def _note(self, phase: Phase, held: int, others: int, peak: int | None) -> None:
        """Learn from a call what it needs beside the weights, and plan them for the rest of the budget.

        ``held``, ``others``: bytes that the arenas of this and of the other phases held when it began.
        """
        after, learned = phase.arena.held, phase.learned
        if peak is None:
            if phase.budget is None or phase.grew:
                phase.assume(kept_by(self.phases))
        elif others == self._held_by_others(phase):  # otherwise the peak may have weights that gave way since
            # activations of a graph are in its pool, which it holds between calls too
            pool = phase.arena.graphs.nbytes + kept_by(self.phases) if phase.arena.graphs.nbytes else 0
            phase.learn(max(0, peak - after - others, pool), steady=held == after)
        try:
            replanned = self._plan(phase)
        except ChunkflowError:  # a smaller call may fit
            phase.unlearn(learned)
            self._settled = False
            raise
        if replanned or phase.activations != learned.activations:
            self._settled = False  # others may have to give way again

    def _plan(self, phase: Phase) -> bool:
        """Plan a phase, and those that share its arena, for the rest of the budget, if it is less or much more than before.

        Returns whether.
        """
        planned = [p for p in self._sharing(phase) if p is phase or p.budget is not None]
        rest, replanned = self.usable - max(p.activations for p in planned), False
        asked = tuple((p.name, len(programs(p.root)), p.live, p.limit) for p in planned)
        before, little = self._refused.pop(phase, None), _WORTH_A_PLAN * self.total
        if before is not None and before.asked == asked and before.rest - little <= rest <= before.rest:
            self._refused[phase] = before  # each plan would be in vain, and calls of one size take about as much
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
        try:
            phase.plan_for(budget)
        except ChunkflowError as error:
            least, most = phase.least, max(self._sharing(phase), key=lambda p: p.activations)
            calls, whose = "its calls", "its"
            if most is not phase:
                calls, whose = f"calls of {most.name}, with which it takes turns,", "their"
            needs = f", which need {size(least)}" if budget < least else f": {error}"
            raise ChunkflowError(
                f"memory={size(self.total)} is too little for {phase.name} ({type(phase.root).__name__}): {calls} take "
                f"{size(most.activations - most.kept)} beside {whose} weights, activations mostly, so {size(max(0, budget))} "
                f"are left for the weights{needs}. Call restore(pipe), then compile with at least "
                f"memory={enough(budget_for(least + most.activations - phase.kept))!r}, or the pipeline with smaller sizes."
            ) from error
        if phase.arena.held > budget - phase.kept:
            self._vacate([phase])


def budget_of(owner: Any) -> Budget | None:
    """The budget of a pipeline or of a component, None if it has none."""
    budget: Budget | None = getattr(owner, "__dict__", {}).get(BUDGET)
    return budget


def claim(owner: Any, budget: Budget) -> Budget:
    """Give a pipeline or a component to a budget, unless it has one; return the one it has.

    Two threads that ask at once get the same one.
    """
    if budget_of(owner) is None:
        owner.__dict__.pop(BUDGET, None)  # that of a copy is None
    own: Budget = owner.__dict__.setdefault(BUDGET, budget)
    return own


def unclaim(owner: Any, budget: Budget) -> None:
    """Undo :func:`claim`."""
    if budget_of(owner) is budget:
        owner.__dict__.pop(BUDGET, None)
