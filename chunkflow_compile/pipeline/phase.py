"""A phase: the calls of one component of a pipeline, with the plans and the measurements of these calls."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from chunkflow_compile.hardware.profiles import is_of_machine
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.placement.place import least_memory
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.placed.notes import activation_note, hoisting_notes, packing_notes, splitting_notes
from chunkflow_compile.placed.offload import cycles, programs, why_nothing_streams
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.placed.replan import replan
from chunkflow_compile.report.phases import PhaseFigures
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.runtime.bound_cycle import BoundCycle
from chunkflow_compile.runtime.call_site import CallKey
from chunkflow_compile.runtime.measurement import seconds_of_calls
from chunkflow_compile.runtime.single_call import SingleCall
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves_of

_KEPT_SECONDS = 32  # the maximum number of call times that a phase keeps; the oldest are dropped first


class Learned(NamedTuple):
    """The recorded activations of a phase.

    ``activations``: the maximum bytes of the activations in a call.  ``steady``: whether the activations were measured in a
    call that did not change the arena.  ``assumed``: the bytes in ``activations`` that are predicted because they cannot be
    measured.
    """

    activations: int
    steady: bool
    assumed: int


class Phase:
    """A component of a pipeline, and the plans and measurements of its calls.

    ``name``: the name of the component in the pipeline.  ``root``: the model; the phase keeps only a weak reference to it.
    ``arena``: the arena for the weights, which other phases may share.  ``counts``: whether plans for this phase have a
    memory budget that covers predicted activations as well as weights.  If so, blocks are split when memory is short.
    ``activations``: the peak number of bytes on the device during a call, without the bytes in arenas, but including the
    small weights of all phases; 0 until a call has ended.  ``measured``: whether ``activations`` was measured.
    ``budget``: the bytes of weights that the current plans may keep on the device; None before the first plan.  ``limit``:
    the maximum of ``budget`` between an out-of-memory error and the end of the generation; otherwise None.
    """

    def __init__(
        self,
        name: str,
        root: nn.Module,
        arena: Arena,
        gone: Callable[[Phase], object],
        enabled: bool = False,
        counts: bool = False,
    ) -> None:
        """``gone``: a function that is called with the phase once the model no longer exists.  ``enabled``: whether
        ``compile`` has enabled adapters on the model."""
        self.name = name
        self.gone = gone
        self.enabled = enabled
        self.counts = counts
        self._root = weakref.ref(root, functools.partial(_went, weakref.ref(self)))
        self.arena = arena
        self.activations = 0
        self.measured = False
        self._assumed = 0  # The bytes in ``activations`` that are predicted because they cannot be measured.
        self.steady = False  # Whether ``activations`` was measured in a call that did not change the arena.
        self.budget: int | None = None
        self.limit: int | None = None
        self.calls = 0
        self.retries = 0
        # name of an intercepted method -> the instance attribute of this name that the interception has replaced, or None if
        # the model had only the method of its class.  Empty if calls of the model itself are intercepted.
        self.methods: dict[str, Any] = {}
        self._warned = 0  # the maximum bytes of a call that has exceeded the budget
        self._seconds: deque[float] = deque(maxlen=_KEPT_SECONDS)
        self._ran: list[
            tuple[weakref.ref[SingleCall], int]
        ] = []  # the programs of the newest call, and how often each ran

    @property
    def root(self) -> nn.Module:
        """The model; an empty module if the model no longer exists."""
        root = self._root()
        return nn.Module() if root is None else root

    @property
    def begins(self) -> bool:
        """Whether calls of the component are still intercepted.

        ``module.compile()`` replaces the attribute that intercepts the calls.
        """
        return bool(self.methods) or isinstance(self.root._compiled_call_impl, Entry)

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights of the component, without duplicates."""
        return [*{id(leaf): leaf for leaf in leaves_of(self.root)}.values()]

    @property
    def kept(self) -> int:
        """The bytes of the weights that never leave the device, including the shards that other ranks read."""
        placement = placement_of(self.root)
        pieces = 0 if placement is None else placement.store.piece_bytes
        return pieces + sum(leaf.nbytes for leaf in self.weights if not isinstance(leaf, HostWeight))

    @property
    def streamed(self) -> int:
        """The bytes of the weights that can be streamed."""
        return sum(leaf.nbytes for leaf in self.weights if isinstance(leaf, HostWeight))

    @property
    def least(self) -> int:
        """The minimum bytes of weights on the device with which all programs can be planned.

        These bytes include the weights that never leave the device.
        """
        variants = {id(program.variant): program.variant for program in programs(self.root)}.values()
        plannable = [(variant.program.problem, variant.settings) for variant in variants]
        needed = [least_memory(p, s.hardware, s.chunk_bytes, s.external_bytes, s.arena, s.part) for p, s in plannable]
        return max([self.kept, *needed])

    @property
    def live(self) -> int:
        """The maximum bytes of predicted activations over all input sizes so far; 0 if ``counts`` is False."""
        return _live_bytes(programs(self.root)) if self.counts else 0

    @property
    def grew(self) -> bool:
        """Whether the predicted activations of the newest call exceed the bytes that :meth:`assume` has recorded."""
        return self.counts and _live_bytes(program for program, _ in self._newest()) > self._assumed

    def steps(self) -> dict[SingleCall, int]:
        """Return a mapping from each program in the arena to the number of times that the program has run."""
        return {s: s.call.steps for s in self.arena.programs if isinstance(s, SingleCall) and not s.preamble}

    def ended(self, before: dict[SingleCall, int], seconds: float) -> None:
        """Record that a call has ended.

        ``before``: the result of :meth:`steps` before the call.  ``seconds``: the duration of the call, measured on the host.
        """
        self._seconds.append(seconds)
        counts = {program: count - before.get(program, 0) for program, count in self.steps().items()}
        self._ran = [(weakref.ref(program), count) for program, count in counts.items() if count]

    def begin_call(self) -> None:
        self.calls += 1

    def begin_retry(self) -> None:
        """Record that a call ran out of memory and is about to be retried."""
        self.retries += 1

    def exceeds(self, taken: int) -> bool:
        """Record that a call took ``taken`` bytes, more than the budget.  Return True if ``taken`` is a new maximum."""
        before, self._warned = self._warned, max(self._warned, taken)
        return taken > before

    def plan_for(self, budget: int) -> None:
        """Plan the programs for at most ``budget`` bytes of weights on the device.  Raises ChunkflowError if there is no such
        plan."""
        if budget < self.kept:
            raise ChunkflowError("there is no room for any.")
        if programs(self.root):
            memory, weight_memory = (budget + self.live, None) if self.counts else (None, budget)
            replan(self.root, memory=memory, weight_memory=weight_memory)
        self.budget = budget

    def keep_budget(self) -> None:
        """Limit plans to the current budget until the generation ends, because a call has run out of memory."""
        self.limit = self.budget

    def end_generation(self) -> None:
        self.limit = None

    @property
    def learned(self) -> Learned:
        """The activations that were recorded so far."""
        return Learned(self.activations, self.steady, self._assumed)

    def assume(self, small: int) -> None:
        """Record the predicted activations, because activations cannot be measured.  ``small``: the bytes of the weights that
        never leave the device, summed over all phases."""
        self._assumed = self.live
        self.activations = small + self._assumed

    def unlearn(self, before: Learned) -> None:
        """Discard the activations that the newest call has recorded.  ``before``: the value of ``learned`` before this
        call."""
        self.activations, self.steady, self._assumed = before

    def learn(self, activations: int, steady: bool) -> None:
        """Record the measured activations of a call.

        ``activations``: the measured bytes.  ``steady``: whether the call left the arena unchanged.  If it did, this
        measurement replaces all measurements from calls that changed the arena.
        """
        self.measured = True
        if steady and not self.steady:
            self.activations, self.steady = activations, True
        elif steady == self.steady:
            self.activations = max(self.activations, activations)

    def figures(self, small: int, first: Phase) -> PhaseFigures:
        """Return the memory, the call times and the notes of the phase.

        ``small``: the bytes of the weights that never leave the device, summed over all phases.  ``first``: the first phase
        among the phases that share the arena.  The memory of the arena is counted only for this first phase.
        """
        predicted, measured = self._predicted_s(), self.seconds(wait=True)
        newest = self._newest()
        hardware = next((program.plan.hardware for program, _ in newest), None)
        notes = dict.fromkeys(note for program in programs(self.root) for note in program.notes)
        notes |= dict.fromkeys((*splitting_notes(self.root), *packing_notes(self.root), *hoisting_notes(self.root)))
        activations = (max(0, self.activations - small) or None) if self.measured else None
        if newest:
            notes[activation_note(_live_bytes(program for program, _ in newest), activations)] = None
        if first is not self:
            notes[f"shares memory on the device with {first.name}, where it is counted"] = None
        return PhaseFigures(
            name=self.name,
            model=type(self.root).__name__,
            weights=sum(leaf.nbytes for leaf in self.weights),
            streamed=self.streamed,
            on_device=self.kept + (self.arena.held if first is self else 0),
            activations=activations,
            calls=self.calls,
            predicted_s=predicted,
            measured_s=measured,
            retries=self.retries,
            stalled_s=self._per_call("exposed_h2d_s"),
            moved=int(self._per_call("moved_bytes") or 0),
            hardware=hardware,
            profiled=hardware is None or is_of_machine(hardware, self.arena.device),
            unstreamed=why_nothing_streams(self.root),
            notes=tuple(notes),
            tileable=hasattr(self.root, "enable_tiling") and not getattr(self.root, "use_tiling", False),
        )

    def _per_call(self, figure: str) -> float | None:
        """Return the sum of a measured value over all programs of the newest call; None if no program was measured.

        ``figure``: the name of the value in :class:`StepMeasurement`.
        """
        steps = [([getattr(m, figure) for m in [*program.call.measured]], count) for program, count in self._newest()]
        measured = [count * _median(values) for values, count in steps if values]
        return sum(measured) if measured else None

    def _newest(self) -> list[tuple[SingleCall, int]]:
        """Return the programs of the newest call, and how often each of them ran."""
        return [(program, count) for ref, count in self._ran if (program := ref()) is not None]

    def _predicted_s(self) -> float | None:
        """Return the predicted seconds for the newest call, or None if there is no prediction.

        If the programs of the call run in a cycle, the plan of the cycle contains the prediction.  Otherwise the predictions
        from the plans of the programs are added.
        """
        newest = self._newest()
        problems = {program.key: program.program.problem for program, _ in newest}
        for bound in cycles(self.root)[:1]:
            cuts = {id(call.cut) for call in bound.calls}
            if all(id(program.variant.cut) in cuts for program, _ in newest):
                return _planned_s(bound, problems.keys())
            # the calls of this cycle are the calls in ``newest``, but were planned for other input sizes
            if problems.keys() == set(bound.keys):
                return _simulated_s(bound, problems)
        times = [(count, s.plan.predicted.step_s) for s, count in newest if s.plan.predicted is not None]
        return sum(count * step_s for count, step_s in times) if times else None

    def seconds(self, wait: bool = False) -> float | None:
        """Return the seconds per call, or None if no call has ended.

        The result is the measured time of the programs in the newest call.  If these programs were not measured, the result
        is the median of the call durations that the host has measured.
        ``wait``: whether to wait for steps in flight.  Without waiting, only measurements that have arrived are used.
        """
        newest = self._newest()
        if newest and not any(program.closed for program, _ in newest):
            if wait:
                for program, _ in newest:
                    program.arena.streams.collect(wait=True)
            steps = [(program.call.seconds, count) for program, count in newest]
            if all(measured for measured, _ in steps):
                return sum(count * _median(measured) for measured, count in steps)
        return _median([*self._seconds]) if self._seconds else None


def _planned_s(cycle: BoundCycle, keys: Collection[CallKey | None]) -> float | None:
    """Return the predicted seconds for those calls of a cycle whose keys are in ``keys``; None if the cycle's plan contains
    no prediction.

    Each call is counted from its beginning to the beginning of the next call.
    """
    if cycle.plan.predicted is None:
        return None
    return sum(seconds for key, seconds in zip(cycle.keys, seconds_of_calls(cycle.cycle), strict=True) if key in keys)


def _simulated_s(cycle: BoundCycle, problems: Mapping[CallKey | None, Problem]) -> float:
    """Simulate one pass over a cycle under the cycle's plan, but for other input sizes; return the predicted seconds.

    ``problems``: key of a call -> the scheduling problem of this call for the other input sizes.
    """
    whole, plan = cycle.cycle.problem, cycle.plan
    sized = [problems.get(key, call.cut.problem) for key, call in zip(cycle.keys, cycle.calls, strict=True)]
    regions = zip(whole.regions, chain.from_iterable(p.regions for p in sized), strict=True)
    collectives = zip(whole.collectives, chain.from_iterable(p.collectives for p in sized), strict=True)
    problem = replace(
        whole,
        regions=tuple(replace(mine, cost=other.cost) for mine, other in regions),
        collectives=tuple(replace(mine, nbytes=other.nbytes) for mine, other in collectives),
    )
    return Simulator(problem, cycle.settings.hardware, plan.chunk_bytes).step_under(plan)


def _live_bytes(programs: Iterable[SingleCall]) -> int:
    """Return the maximum bytes of predicted activations over these programs."""
    return max((program.program.problem.live_bytes for program in programs), default=0)


def kept_by(phases: Iterable[Phase]) -> int:
    """Return the bytes of the weights that never leave the device, summed over these phases."""
    return sum(phase.kept for phase in phases)


class Entry:
    """A callable that replaces a method of a component, so that :meth:`Budget.run` runs the calls of this method."""

    def __init__(self, run: Callable[..., Any], phase: Phase, name: str, call: Callable[..., Any]) -> None:
        """``run``: a function that runs a call; its arguments are the phase, and the original method with bound arguments.
        ``name``: the name of the method.  ``call``: the original method."""
        self._run, self._phase, self._name, self._call = run, phase, name, call
        functools.update_wrapper(self, call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._phase, functools.partial(self._call, *args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the original method, bound to the copy of the component."""
        root = self._phase.root
        return getattr(type(root), self._name).__get__(memo.get(id(root), root))

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise ChunkflowError(
            f"{self._phase.name} belongs to a compiled pipeline, and cannot be pickled: call restore(pipe) first, or "
            "save it with save_pretrained."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the garbage collector may call this function while Dynamo traces
def _went(ref: weakref.ref[Phase], _: object) -> None:
    if (phase := ref()) is not None:
        phase.gone(phase)


def _median(seconds: list[float]) -> float:
    """Return the median of all values except the first, which includes one-time costs.  If there is only one value, return
    this value."""
    return median(seconds[1:] or seconds)
