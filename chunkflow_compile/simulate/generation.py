"""A generation of a whole pipeline, planned without weights: what each phase has on the device, in four ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.placement.place import least_memory, place
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.report.generation import Generation, PhaseMemory

# Share of a budget that plans leave to what the caching allocator cannot reuse.
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
    resident = {c.name: _placed(c, hardware, chunk_bytes, policy="resident")[1] for c in components}

    def plain(c: Component) -> PhaseMemory:
        return _phase(c, total, resident[c.name])

    def one_model(c: Component) -> PhaseMemory:
        return _phase(c, c.weights, resident[c.name], loading_s=c.weights / rate)

    def blocks(c: Component) -> PhaseMemory:
        weights, seconds = _placed(c, hardware, chunk_bytes, policy="layerwise")
        return _phase(c, weights, seconds, loading_s=c.weights / rate if c.problem is None else 0.0)

    def planned(c: Component) -> PhaseMemory:
        room = usable(memory) - c.activations
        if c.problem is None and c.weights > room:
            raise _too_little(c, hardware, chunk_bytes, memory)
        try:
            weights, seconds = _placed(c, hardware, chunk_bytes, memory=max(0, room))
        except ChunkflowError as error:
            raise _too_little(c, hardware, chunk_bytes, memory) from error
        return _phase(c, weights, seconds, loading_s=min(weights, c.weights) / rate)  # a phase begins cold

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


def budget_for(nbytes: int) -> int:
    """A budget of which plans may count on ``nbytes``."""
    return int(nbytes / (1 - RESERVED_SHARE)) + 1


def needed(component: Component, hardware: Hardware, chunk_bytes: int) -> int:
    """The least budget in which a component runs, bytes."""
    problem = component.problem
    weights = component.weights if problem is None else least_memory(problem, hardware, chunk_bytes)
    return budget_for(weights + component.activations)


def _too_little(component: Component, hardware: Hardware, chunk_bytes: int, memory: int) -> ChunkflowError:
    least = needed(component, hardware, chunk_bytes)
    return ChunkflowError(
        f"memory={memory} bytes is too little for {component.name}: its activations take up to {component.activations} "
        f"bytes, and with the least of its weights it needs {least}. Give --memory {-(-least // 2**20)}MiB or more."
    )


def _placed(component: Component, hardware: Hardware, chunk_bytes: int, **goal: Any) -> tuple[int, float]:
    """Bytes of weights on the device under a plan for ``goal``, and seconds of a call.  What runs eagerly has no plan."""
    if component.problem is None:
        return component.weights, component.seconds
    plan = place(component.problem, hardware, chunk_bytes=chunk_bytes, **goal)
    assert plan.predicted is not None
    return plan.device_bytes, plan.predicted.step_s


def _phase(component: Component, weights: int, seconds: float, loading_s: float = 0.0) -> PhaseMemory:
    return PhaseMemory(
        name=component.name,
        weights=weights,
        activations=component.activations,
        calls=component.calls,
        seconds=seconds,
        loading_s=loading_s,
    )
