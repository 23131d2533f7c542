"""A phase: the calls of one component of a pipeline, with their plans and measurements."""

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

_KEPT_SECONDS = 32  # number of newest calls whose times are kept


class Learned(NamedTuple):
    """The recorded activations of a phase.

    ``activations``: their maximum in bytes.  ``steady``: whether they were measured in a call that did not change the arena.
    ``assumed``: the bytes among them that are predicted, because they cannot be measured.
    """

    activations: int
    steady: bool
    assumed: int


class Phase:
    """A component of a pipeline, and the plans and measurements of its calls.

    ``name``: its name in the pipeline.  ``root``: the model, of which the phase keeps a weak reference.  ``arena``: the arena
    of its weights, which it may share with other phases.  ``counts``: whether its plans include its predicted activations, so
    that its blocks are split if memory is short.
    ``activations``: maximum bytes on the device during a call, without the bytes in arenas but including the small weights of
    all phases; 0 until a call has ended.  ``measured``: whether they were measured.
    ``budget``: bytes of weights on the device for which its programs are planned, or None before that.  ``limit``: the
    maximum of ``budget`` until the end of a generation in which a call ran out of memory; None otherwise.
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
        """``gone``: function that is called when the model no longer exists.  ``enabled``: whether ``compile`` has enabled
        adapters on the model."""
        self.name = name
        self.gone = gone
        self.enabled = enabled
        self.counts = counts
        self._root = weakref.ref(root, functools.partial(_went, weakref.ref(self)))
        self.arena = arena
        self.activations = 0
        self.measured = False
        self._assumed = 0  # predicted bytes in ``activations`` if they cannot be measured
        self.steady = False  # whether ``activations`` was measured in a call that did not change the arena
        self.budget: int | None = None
        self.limit: int | None = None
        self.calls = 0
        self.retries = 0
        # intercepted method -> previous attribute of the instance; empty if calls of the module are intercepted
        self.methods: dict[str, Any] = {}
        self._warned = 0  # the most bytes for which a warning about the budget was logged
        self._seconds: deque[float] = deque(maxlen=_KEPT_SECONDS)
        self._ran: list[tuple[weakref.ref[SingleCall], int]] = []  # programs of the newest call, and how often each ran

    @property
    def root(self) -> nn.Module:
        """The model, or an empty module once the model no longer exists."""
        root = self._root()
        return nn.Module() if root is None else root

    @property
    def begins(self) -> bool:
        """Whether its calls are still intercepted.  ``module.compile()`` replaces the attribute that intercepts them."""
        return bool(self.methods) or isinstance(self.root._compiled_call_impl, Entry)

    @property
    def weights(self) -> list[torch.Tensor]:
        """Its weights, each once."""
        return [*{id(leaf): leaf for leaf in leaves_of(self.root)}.values()]

    @property
    def kept(self) -> int:
        """Bytes of its weights that never leave the device, including the shards that it keeps for other ranks."""
        placement = placement_of(self.root)
        pieces = 0 if placement is None else placement.store.piece_bytes
        return pieces + sum(leaf.nbytes for leaf in self.weights if not isinstance(leaf, HostWeight))

    @property
    def streamed(self) -> int:
        """Bytes of its weights that its calls copy to the device."""
        return sum(leaf.nbytes for leaf in self.weights if isinstance(leaf, HostWeight))

    @property
    def least(self) -> int:
        """The minimum bytes of weights on the device for any plan, including the weights that never leave the device."""
        codes = {id(program.code): program.code for program in programs(self.root)}.values()
        needed = [
            least_memory(c.program.problem, s.hardware, s.chunk_bytes, s.outside, s.arena, s.part)
            for c in codes
            for s in (c.settings,)
        ]
        return max([self.kept, *needed])

    @property
    def live(self) -> int:
        """The maximum predicted bytes of activations over all sizes so far; 0 if its plans do not include activations."""
        return _live_bytes(programs(self.root)) if self.counts else 0

    @property
    def grew(self) -> bool:
        """Whether the predicted activations of its newest call exceed the bytes that were assumed."""
        return self.counts and _live_bytes(program for program, _ in self._newest()) > self._assumed

    def steps(self) -> dict[SingleCall, int]:
        """Return how often each program in its arena has run."""
        return {s: s.call.steps for s in self.arena.programs if isinstance(s, SingleCall) and not s.preamble}

    def ended(self, before: dict[SingleCall, int], seconds: float) -> None:
        """Note that a call has ended.

        ``before``: the result of :meth:`steps` before the call.  ``seconds``: the time from its beginning to its return.
        """
        self._seconds.append(seconds)
        counts = {program: count - before.get(program, 0) for program, count in self.steps().items()}
        self._ran = [(weakref.ref(program), count) for program, count in counts.items() if count]

    def begin_call(self) -> None:
        self.calls += 1

    def begin_retry(self) -> None:
        """Note that a call ran out of memory and is about to be retried."""
        self.retries += 1

    def exceeds(self, taken: int) -> bool:
        """Note that a call took ``taken`` bytes, more than the budget.  Returns whether this is the maximum so far."""
        before, self._warned = self._warned, max(self._warned, taken)
        return taken > before

    def plan_for(self, budget: int) -> None:
        """Plan its programs for ``budget`` bytes of weights on the device.  Raises ChunkflowError if this is too little."""
        if budget < self.kept:
            raise ChunkflowError("there is no room for any.")
        if programs(self.root):
            memory, weight_memory = (budget + self.live, None) if self.counts else (None, budget)
            replan(self.root, memory=memory, weight_memory=weight_memory)
        self.budget = budget

    def keep_budget(self) -> None:
        """Limit its plans to its current budget until the generation ends, after a call ran out of memory."""
        self.limit = self.budget

    def end_generation(self) -> None:
        self.limit = None

    @property
    def learned(self) -> Learned:
        """The activations that are recorded so far."""
        return Learned(self.activations, self.steady, self._assumed)

    def assume(self, small: int) -> None:
        """Record the predicted activations, if calls cannot be measured.  ``small``: as in :meth:`figures`."""
        self._assumed = self.live
        self.activations = small + self._assumed

    def unlearn(self, before: Learned) -> None:
        """Discard the activations of the newest call.  ``before``: the record before that call."""
        self.activations, self.steady, self._assumed = before

    def learn(self, activations: int, steady: bool) -> None:
        """Record the measured activations of a call, in bytes.

        ``steady``: whether the call left the arena unchanged.  Such a measurement is preferred to all others.
        """
        self.measured = True
        if steady and not self.steady:
            self.activations, self.steady = activations, True
        elif steady == self.steady:
            self.activations = max(self.activations, activations)

    def figures(self, small: int, first: Phase) -> PhaseFigures:
        """Return its current figures.

        ``small``: bytes of the weights of all phases that never leave the device.  ``first``: the first phase that uses its
        arena.  The memory of the arena is counted with this phase only.
        """
        predicted, measured = self._predicted(), self.seconds(wait=True)
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
        """Sum a field of the measured steps over all programs of the newest call; None if no program was measured."""
        steps = [([getattr(m, figure) for m in [*program.call.measured]], count) for program, count in self._newest()]
        measured = [count * _median(values) for values, count in steps if values]
        return sum(measured) if measured else None

    def _newest(self) -> list[tuple[SingleCall, int]]:
        """The programs of the newest call, and how often each ran."""
        return [(program, count) for ref, count in self._ran if (program := ref()) is not None]

    def _predicted(self) -> float | None:
        """Predicted seconds of the newest call, from its part of a cycle or else from the plans of its programs; or None."""
        newest = self._newest()
        problems = {program.key: program.program.problem for program, _ in newest}
        for bound in cycles(self.root)[:1]:
            cuts = {id(call.cut) for call in bound.calls}
            if all(id(program.code.cut) in cuts for program, _ in newest):
                return _predicted(bound, problems.keys())
            if problems.keys() == set(bound.keys):  # the cycle was planned at other sizes
                return _played(bound, problems)
        times = [(count, s.plan.predicted.step_s) for s, count in newest if s.plan.predicted is not None]
        return sum(count * step_s for count, step_s in times) if times else None

    def seconds(self, wait: bool = False) -> float | None:
        """Seconds per call: the measured time of the programs of the newest call.

        If there are no such measurements, it is the median time from the beginning of a call to its return, or None.
        ``wait``: whether to wait for steps in flight.  Otherwise only the measurements that are already available are used.
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


def _predicted(cycle: BoundCycle, keys: Collection[CallKey | None]) -> float | None:
    """Predicted seconds of the calls of a cycle with these keys, or None if the plan has no prediction.

    The time of a call ends when the next call begins.
    """
    if cycle.plan.predicted is None:
        return None
    return sum(seconds for key, seconds in zip(cycle.keys, seconds_of_calls(cycle.cycle), strict=True) if key in keys)


def _played(cycle: BoundCycle, problems: Mapping[CallKey | None, Problem]) -> float:
    """Simulate a pass over a cycle with other sizes under its plan, and return the predicted seconds.

    ``problems``: key of a call -> the scheduling problem of this call at its new sizes.
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
    """The maximum predicted bytes of activations over these programs."""
    return max((program.program.problem.live_bytes for program in programs), default=0)


def kept_by(phases: Iterable[Phase]) -> int:
    """Return the bytes of the weights of several phases that never leave the device."""
    return sum(phase.kept for phase in phases)


class Entry:
    """Replaces a method of a component, and runs its calls as a phase."""

    def __init__(self, run: Callable[..., Any], phase: Phase, name: str, call: Callable[..., Any]) -> None:
        """``run``: function that gets the phase and a call, whose arguments are bound already.  ``call``: the original
        method."""
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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the garbage collector may call it anywhere
def _went(ref: weakref.ref[Phase], _: object) -> None:
    if (phase := ref()) is not None:
        phase.gone(phase)


def _median(seconds: list[float]) -> float:
    """The median without the first value, which includes one-time costs; a single value is returned as it is."""
    return median(seconds[1:] or seconds)
