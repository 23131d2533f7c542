"""A generation of a whole pipeline, planned without weights: what each phase has on the device, in four ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from chunkflow_compile.hardware.headroom import budget_for, usable
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.hoist import Halves
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.hoisting import plan_halves
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES, Hoist, Pack
from chunkflow_compile.passes.pipeline import Settings, make_cut, make_plan
from chunkflow_compile.passes.placement.choice import to_pack
from chunkflow_compile.passes.placement.place import least_memory
from chunkflow_compile.report.generation import Generation, PhaseMemory
from chunkflow_compile.units import enough, size

from .group_offload import play_group_offload, there_and_back_s

# Two of the ways by the calls of diffusers that they stand for.  Model offload moves a whole component there and back, too.
MODEL_OFFLOAD = "model offload (enable_model_cpu_offload)"
GROUP_OFFLOAD = "group offload, two blocks (enable_group_offload)"


@dataclass(frozen=True, kw_only=True)
class Component:
    """A component of a pipeline.  ``weights``, ``activations``: bytes.  ``small``: those of its weights that stay on the
    device while other components run.  ``cut``: of its compiled call; None for one that runs eagerly, whose calls take
    ``seconds``.  ``pack``: whether weights are packed where it is planned.  ``calls``: in a generation, one after another.
    ``halves``: those of its graph if it can be hoisted, else None.  ``hoist``: whether it is hoisted where it is planned."""

    name: str
    weights: int
    small: int
    activations: int
    calls: int
    cut: Cut | None = None
    seconds: float = 0.0
    pack: Pack = False
    hoist: Hoist = False
    halves: Halves | None = None

    @property
    def all_packed(self) -> Cut | None:
        return self.cut and packed(self.cut, packable(self.cut))

    def packed_for(self, settings: Settings) -> Cut | None:
        """With the weights packed that ``pack`` asks for."""
        if self.cut is None or self.pack != "auto":
            return self.all_packed if self.pack else self.cut
        return packed(self.cut, to_pack(self.cut, partial(make_plan, settings=settings)))


def generations(components: Sequence[Component], hardware: Hardware, budget: int) -> Mapping[str, Generation]:
    """The same generation with all weights on the device, under diffusers' model offload, under its group offload, and
    planned within a budget of bytes, with weights packed.  Raises ChunkflowError if that is below the least."""
    total = sum(c.weights for c in components)
    rate = hardware.shared_by(1).copy_rate
    resident = Settings(hardware=hardware, goal=Goal(policy="resident"))
    plain = [replace(_phase(c, resident), weights=total) for c in components]
    moved_s = {c.name: there_and_back_s(c.weights, hardware) for c in components}
    singly = [
        replace(p, weights=c.weights, host=c.weights, loading_s=moved_s[p.name])
        for p, c in zip(plain, components, strict=True)
    ]

    def blocks(c: Component) -> PhaseMemory:
        phase = replace(_phase(c, resident), host=c.weights)
        if c.cut is None:  # no list of blocks of its own: it goes there and back as a whole
            return replace(phase, loading_s=moved_s[c.name])
        step = play_group_offload(c.cut.problem, hardware)
        return replace(phase, weights=step.device_bytes, seconds=step.timeline.step_s, plan=None)

    def planned(c: Component) -> PhaseMemory:
        others = _small_of_others(c, components)
        room = usable(budget) - c.activations - others
        if c.cut is None and c.weights > room:
            raise _too_little(c, others, hardware, budget)
        settings = Settings(hardware=hardware, goal=Goal(memory=max(0, room)))
        forms = [partial(_planned, c, settings)] if c.hoist is not True or c.halves is None else []
        forms += [partial(_hoisted, c, settings)] if c.hoist and c.halves is not None else []
        found, refused = list[PhaseMemory](), list[ChunkflowError]()
        for form in forms:
            try:
                found.append(form())
            except ChunkflowError as error:
                refused.append(error)
        if not found:
            raise _too_little(c, others, hardware, budget) from refused[0]
        phase = min(found, key=lambda p: p.loading_s + p.calls * p.seconds)
        # a phase begins cold
        loading_s = phase.loading_s + min(phase.weights, c.weights) / rate
        return replace(phase, weights=phase.weights + others, loading_s=loading_s)

    return {
        "plain": plain,
        MODEL_OFFLOAD: singly,
        GROUP_OFFLOAD: [blocks(c) for c in components],
        "chunkflow": [planned(c) for c in components],
    }


def _planned(c: Component, settings: Settings) -> PhaseMemory:
    """A phase whose whole component runs in each call."""
    cut = c.packed_for(settings)
    host = c.weights if cut is None else cut.problem.total_bytes
    return replace(_phase(replace(c, cut=cut), settings), host=host)


def _hoisted(c: Component, settings: Settings) -> PhaseMemory:
    """A phase before which the rows of all its calls are computed.  Raises ChunkflowError if they do not fit the budget."""
    assert c.halves is not None
    hoisting = plan_halves(c.halves, settings)
    main = replace(c, cut=make_cut(c.halves.main))
    cut = main.packed_for(hoisting.main)
    assert cut is not None
    phase = _phase(replace(main, cut=cut), hoisting.main)
    host = cut.problem.total_bytes + c.halves.hoisted_bytes
    weights = phase.weights + hoisting.main.outside
    return replace(phase, weights=weights, host=host, loading_s=hoisting.figures.fill_s)


def least_budget(components: Sequence[Component], hardware: Hardware) -> int:
    """The least budget in which all components run, bytes."""
    return max(_needed(c, _small_of_others(c, components), hardware) for c in components)


def _small_of_others(component: Component, components: Sequence[Component]) -> int:
    """Bytes of the small weights of the other components."""
    return sum(other.small for other in components if other is not component)


def _needed(component: Component, others: int, hardware: Hardware) -> int:
    forms = [component.all_packed if component.pack is True else component.cut]
    if component.pack == "auto":
        forms.append(component.all_packed)
    least = [least_memory(cut.problem, hardware, DEFAULT_CHUNK_BYTES) for cut in forms if cut is not None]
    return budget_for(min(least, default=component.weights) + others + component.activations)


def _too_little(component: Component, others: int, hardware: Hardware, budget: int) -> ChunkflowError:
    least = _needed(component, others, hardware)
    return ChunkflowError(
        f"memory={size(budget)} is too little for {component.name}: its activations take up to "
        f"{size(component.activations)}, and with the least of its weights it needs {size(least)}. "
        f"Give memory={enough(least)!r} or more."
    )


def _phase(component: Component, settings: Settings) -> PhaseMemory:
    """A phase, planned under ``settings`` unless it runs eagerly."""
    weights, seconds, plan = component.weights, component.seconds, None
    if component.cut is not None:
        problem = component.cut.problem
        plan = make_plan(problem, settings)
        assert plan.predicted is not None
        weights, seconds = plan.device_bytes + problem.unpacked_bytes, plan.predicted.step_s
    return PhaseMemory(
        name=component.name,
        weights=weights,
        activations=component.activations,
        calls=component.calls,
        seconds=seconds,
        plan=plan,
    )
