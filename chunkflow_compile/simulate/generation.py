"""Plan a generation of a whole pipeline without weights.  The result is the device memory and the time of each phase with
four methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from chunkflow_compile.hardware.headroom import budget_for, usable
from chunkflow_compile.passes.cutting import choose_cut, whole_blocks
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.hoist import Halves
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.hoisting import plan_halves
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES, Hoist, Pack, Split
from chunkflow_compile.passes.placement.place import least_memory
from chunkflow_compile.passes.placement.splitting import split_into, splits
from chunkflow_compile.passes.planning import Settings, make_plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.report.generation_tables import Generation, PhaseMemory
from chunkflow_compile.report.plan_tables import slices_notes
from chunkflow_compile.units import enough, size

from .group_offload import play_group_offload, round_trip_s

# Two of the methods, each with the function of diffusers that enables it.  Model offload copies a whole component to the
# device, and back after its last call.
MODEL_OFFLOAD = "model offload (enable_model_cpu_offload)"
GROUP_OFFLOAD = "group offload, two blocks (enable_group_offload)"
# For each value of the option ``pack``, whether the weights of the smallest plan are compressed.  With "auto", both forms
# are tried.
_PACKS: Mapping[Pack, Sequence[bool]] = {False: (False,), True: (True,), "auto": (False, True)}


@dataclass(frozen=True, kw_only=True)
class Component:
    """A component of a pipeline.

    ``weights``: the bytes of all weights.  ``small``: the bytes of the weights that stay on the device while other
    components run.  ``activations``: the bytes of activations in an eager call; None to count the live values of compiled
    regions instead.  ``calls``: the number of consecutive calls per generation.  ``cut``: the finest cut of the compiled
    graph, or None if the component runs eagerly.  ``seconds``: the duration of an eager call.  ``pack``, ``hoist``: the
    options of these names.  ``halves``: the halves of the graph, or None if nothing can be hoisted.  ``split``: see Goal.
    ``tileable``: see PhaseMemory."""

    name: str
    weights: int
    small: int
    activations: int | None
    calls: int
    cut: Cut | None = None
    seconds: float = 0.0
    pack: Pack = False
    hoist: Hoist = False
    halves: Halves | None = None
    split: Split = "auto"
    tileable: bool = False

    def goal(self, room: int) -> Goal:
        """Return the goal for planning the component.  ``room``: the bytes that are available for weights and
        activations."""
        memory = max(0, room - (self.activations or 0))
        return Goal(memory=memory, activations=self.activations is None, pack=self.pack, split=self.split)

    def alive(self, problem: Problem | None) -> int:
        """Return the bytes of activations in a call.  ``problem``: the problem of the compiled call, or None for an eager
        call."""
        if self.activations is not None:
            return self.activations
        assert problem is not None, "it is compiled"
        return problem.live_bytes


def generations(components: Sequence[Component], hardware: Hardware, budget: int) -> Mapping[str, Generation]:
    """Return the phases of a generation by method: with all weights on the device, with diffusers' model offload, with
    diffusers' group offload, and with ChunkFlow.  ``budget``: ChunkFlow's budget in bytes.  Raises ChunkflowError if it
    is below the minimum."""
    total = sum(c.weights for c in components)
    rate = hardware.shared_by(1).copy_rate
    resident = Settings(hardware=hardware, goal=Goal(policy="resident"))
    whole = [c if c.cut is None else replace(c, cut=whole_blocks(c.cut, resident)) for c in components]
    plain = [replace(_phase(c, resident), weights=total) for c in whole]
    moved_s = {c.name: round_trip_s(c.weights, hardware) for c in components}
    singly = [
        replace(p, weights=c.weights, host=c.weights, loading_s=moved_s[p.name])
        for p, c in zip(plain, components, strict=True)
    ]

    def blocks(c: Component) -> PhaseMemory:
        phase = replace(_phase(c, resident), host=c.weights)
        if c.cut is None:  # without a cut, the component is copied to the device and back as a whole
            return replace(phase, loading_s=moved_s[c.name])
        step = play_group_offload(c.cut.problem, hardware)
        return replace(phase, weights=step.device_bytes, seconds=step.timeline.step_s, plan=None)

    def planned(c: Component) -> PhaseMemory:
        others = _small_of_others(c, components)
        room = usable(budget) - others
        if c.cut is None and c.weights + c.alive(None) > room:
            raise _too_little(c, components, hardware, budget)
        settings = Settings(hardware=hardware, goal=c.goal(room))
        # choose_cut decides "auto" with whole blocks; if that does not fit, try the two forms one by one
        packs = (c.pack, False, True) if c.pack == "auto" else (c.pack,)
        found, refused = list[PhaseMemory](), list[ChunkflowError]()
        for pack in packs:
            form = replace(settings, goal=replace(settings.goal, pack=pack))
            ways = [_planned] if c.hoist is not True or c.halves is None else []
            ways += [_hoisted] if c.hoist and c.halves is not None else []
            for way in ways:
                try:
                    found.append(way(c, form))
                except ChunkflowError as error:
                    refused.append(error)
            if found:
                break
        else:
            raise _too_little(c, components, hardware, budget) from refused[0]
        phase = min(found, key=lambda p: p.loading_s + p.calls * p.seconds)
        # the first call of a phase is a cold start, which copies the weights that later calls find on the device
        loading_s = phase.loading_s + min(phase.weights, c.weights) / rate
        return replace(phase, weights=phase.weights + others, loading_s=loading_s)

    return {
        "plain": plain,
        MODEL_OFFLOAD: singly,
        GROUP_OFFLOAD: [blocks(c) for c in whole],
        "chunkflow": [planned(c) for c in components],
    }


def _planned(c: Component, settings: Settings) -> PhaseMemory:
    """Plan a phase without hoisting."""
    if c.cut is None:
        return replace(_phase(c, settings), host=c.weights)
    cut = choose_cut(c.cut.traced, settings)
    return replace(_phase(replace(c, cut=cut), settings), host=cut.problem.total_bytes)


def _hoisted(c: Component, settings: Settings) -> PhaseMemory:
    """Plan a phase with hoisting.  The rows for all calls are computed before the first call.  Raises ChunkflowError if
    they do not fit in the budget."""
    assert c.halves is not None
    hoisting = plan_halves(c.halves, settings)
    cut = choose_cut(c.halves.main, hoisting.main)
    phase = _phase(replace(c, cut=cut), hoisting.main)
    host = cut.problem.total_bytes + c.halves.hoisted_bytes
    weights = phase.weights + hoisting.main.external_bytes
    return replace(phase, weights=weights, host=host, loading_s=hoisting.figures.fill_s)


def least_budget(components: Sequence[Component], hardware: Hardware) -> int:
    """Return the minimum budget with which all components run, in bytes."""
    return max(budget for budget, _ in _minimums(components, hardware))


def _minimums(components: Sequence[Component], hardware: Hardware) -> list[tuple[int, int]]:
    """Return, for each component, the minimum budget with which it runs and its bytes of activations with that budget.

    Experts have the same cut, for which the minimum is computed once: splitting a large cut takes seconds.
    """
    found = dict[tuple[object, ...], tuple[int, int]]()
    minimums = []
    for c in components:
        key = (id(c.cut), c.weights, c.activations, c.pack, c.split)
        if key not in found:
            found[key] = _least(c, hardware)
        least, alive = found[key]
        minimums.append((budget_for(_small_of_others(c, components) + least), alive))
    return minimums


def _small_of_others(component: Component, components: Sequence[Component]) -> int:
    """Return the bytes of the small weights of all other components."""
    return sum(other.small for other in components if other is not component)


def _least(c: Component, hardware: Hardware) -> tuple[int, int]:
    """Return the minimum bytes of weights and activations with which a component runs, and how many of these bytes are
    activations."""
    if c.cut is None:
        return c.weights + c.alive(None), c.alive(None)
    forms = [packed(cut, packable(cut)) if pack else cut for cut in _cuts(c, hardware) for pack in _PACKS[c.pack]]
    found = [(form.problem, c.alive(form.problem)) for form in forms]
    return min((least_memory(p, hardware, DEFAULT_CHUNK_BYTES) + alive, alive) for p, alive in found)


def _cuts(c: Component, hardware: Hardware) -> list[Cut]:
    """Return the cuts of a component that its option ``split`` allows: the finest cut, the cut with whole blocks, and
    cuts with slices."""
    assert c.cut is not None, "it is compiled"
    if c.activations is not None:
        return [c.cut]
    whole = whole_blocks(c.cut, Settings(hardware=hardware))
    if c.split == "auto":
        return [c.cut, whole, *splits(whole)]
    return [c.cut, whole] if c.split == 1 else [split_into(whole, c.split)]


def _too_little(
    component: Component, components: Sequence[Component], hardware: Hardware, budget: int
) -> ChunkflowError:
    """Return the error for a component that does not fit in the budget.  It states the minimum for all components."""
    minimums = _minimums(components, hardware)
    needed, alive = next(found for found, c in zip(minimums, components, strict=True) if c is component)
    every = max(budget for budget, _ in minimums)
    more = f", and another component needs {size(every)}" if every > needed else ""
    return ChunkflowError(
        f"memory={size(budget)} is too little for {component.name}: its activations take up to {size(alive)}, and with the "
        f"least of its weights it needs {size(needed)}{more}. Give memory={enough(max(needed, every))!r} or more."
    )


def _phase(component: Component, settings: Settings) -> PhaseMemory:
    """Return a phase.  It is planned with ``settings`` if the component has a cut."""
    weights, seconds, plan, problem = component.weights, component.seconds, None, None
    if component.cut is not None:
        problem = component.cut.problem
        plan = make_plan(problem, settings)
        assert plan.predicted is not None
        weights, seconds = plan.device_bytes + problem.unpacked_bytes, plan.predicted.step_s
    return PhaseMemory(
        name=component.name,
        weights=weights,
        activations=component.alive(problem),
        calls=component.calls,
        seconds=seconds,
        plan=plan,
        tileable=component.tileable,
        notes=() if problem is None else slices_notes(problem),
    )
