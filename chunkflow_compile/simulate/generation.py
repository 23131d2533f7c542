"""A generation of a whole pipeline, planned without weights: what each phase has on the device, in four ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.placement.place import least_memory, place
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.report.generation import Generation, PhaseMemory

# As in phases.py: left to what the caching allocator cannot reuse.
RESERVED_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Component:
    """A component of a pipeline.  ``weights``, ``activations``: bytes.  ``problem``: of its compiled call; None for one that
    runs eagerly, whose calls take ``seconds``.  ``calls``: in a generation, one after another."""

    name: str
    weights: int
    activations: int
    calls: int
    problem: Problem | None = None
    seconds: float = 0.0


def generations(
    components: Sequence[Component], hardware: Hardware, chunk_bytes: int, memory: int
) -> Mapping[str, Generation]:
    """The same generation with all weights on the device, with one component at a time there, with two blocks at a time,
    and planned within ``memory`` bytes.  Raises ChunkflowError if that is below the least."""
    total = sum(c.weights for c in components)
    rate = hardware.h2d_bandwidth * hardware.eta_pref

    def plain(c: Component) -> PhaseMemory:
        return _phase(c, total, _resident(c, hardware, chunk_bytes))

    def one_model(c: Component) -> PhaseMemory:
        return replace(_phase(c, c.weights, _resident(c, hardware, chunk_bytes)), loading_s=c.weights / rate)

    def blocks(c: Component) -> PhaseMemory:
        if c.problem is None:
            return replace(_phase(c, c.weights, c.seconds), loading_s=c.weights / rate)
        plan = place(c.problem, hardware, policy="layerwise", chunk_bytes=chunk_bytes)
        assert plan.predicted is not None
        return _phase(c, plan.device_bytes, plan.predicted.step_s)

    def planned(c: Component) -> PhaseMemory:
        room = usable(memory) - c.activations
        if c.problem is None:
            if c.weights > room:
                raise ChunkflowError(_too_little(c, memory, needed(c, hardware, chunk_bytes)))
            return replace(_phase(c, c.weights, c.seconds), loading_s=c.weights / rate)
        try:
            plan = place(c.problem, hardware, chunk_bytes=chunk_bytes, memory=max(0, room))
        except ChunkflowError as error:
            raise ChunkflowError(_too_little(c, memory, needed(c, hardware, chunk_bytes))) from error
        assert plan.predicted is not None
        first = min(plan.device_bytes, c.weights) / rate  # a phase begins cold
        return replace(_phase(c, plan.device_bytes, plan.predicted.step_s), loading_s=first)

    ways: Mapping[str, Callable[[Component], PhaseMemory]] = {
        "plain": plain,
        "one model at a time": one_model,
        "two blocks at a time": blocks,
        "chunkflow": planned,
    }
    return {
        way: Generation(way=way, phases=tuple(make(component) for component in components))
        for way, make in ways.items()
    }


def usable(memory: int) -> int:
    """Bytes of a budget that plans may count on."""
    return memory - int(RESERVED_SHARE * memory)


def needed(component: Component, hardware: Hardware, chunk_bytes: int) -> int:
    """The least budget in which a component runs, bytes."""
    problem = component.problem
    weights = component.weights if problem is None else least_memory(problem, hardware, chunk_bytes)
    return int((weights + component.activations) / (1 - RESERVED_SHARE)) + 1


def _too_little(component: Component, memory: int, least: int) -> str:
    return (
        f"memory={memory} bytes is too little for {component.name}: its activations take up to {component.activations} "
        f"bytes, and with the least of its weights it needs {least}. Give --memory {-(-least // 2**20)}MiB or more."
    )


def _phase(component: Component, weights: int, seconds: float) -> PhaseMemory:
    return PhaseMemory(
        name=component.name,
        weights=weights,
        activations=component.activations,
        calls=component.calls,
        seconds=seconds,
    )


def _resident(component: Component, hardware: Hardware, chunk_bytes: int) -> float:
    if component.problem is None:
        return component.seconds
    plan = place(component.problem, hardware, policy="resident", chunk_bytes=chunk_bytes)
    assert plan.predicted is not None
    return plan.predicted.step_s
