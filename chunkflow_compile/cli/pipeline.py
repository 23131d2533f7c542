"""``chunkflow pipeline``: plans a generation of a whole pipeline within a budget, without weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from chunkflow_compile.catalog.eager_cost import EagerCost, eager_cost
from chunkflow_compile.catalog.presets import OutputSizes
from chunkflow_compile.catalog.published import Published, published
from chunkflow_compile.catalog.trace_cache import CacheEntry
from chunkflow_compile.catalog.weightless import trace_without_weights
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.hoist import split
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import DEFAULT_MIN_BYTES, Hoist
from chunkflow_compile.report.generation_tables import Limits, draw_generation, generation_answer, generation_tables
from chunkflow_compile.report.perfetto import generation_events
from chunkflow_compile.report.pictures import check_picture
from chunkflow_compile.report.record import check_writable, prose
from chunkflow_compile.simulate.generation import Component, generations, least_budget
from chunkflow_compile.units import parse_bytes, size
from chunkflow_compile.weights.progress import Progress

from .arguments import FORMS, sizes_given
from .output import say, write_json
from .planned_machine import choose_hardware, machine, note_hardware
from .planning_arguments import preset_call, trace_entry


def run(arguments: argparse.Namespace) -> int:
    if arguments.picture:
        check_picture(arguments.picture)
    if arguments.timeline:
        check_writable(Path(arguments.timeline))
    pipeline = published(arguments.pipeline)
    choose_hardware(arguments)
    hardware = machine(load_profile(arguments.hardware), arguments)
    memory = None if arguments.memory is None else parse_bytes(arguments.memory, "memory")
    sizes = replace(pipeline.transformer.sizes, **sizes_given(arguments))
    pipeline.transformer.shape(sizes)
    steps = pipeline.steps if arguments.steps is None else arguments.steps
    if steps < pipeline.experts:
        raise ChunkflowError(f"--steps must be at least {pipeline.experts}.")
    note_hardware(arguments)
    progress = Progress(len(pipeline.encoders) + 3)
    fused, hoist = arguments.lowering == "inductor", FORMS[arguments.hoist]
    components = [
        replace(component, pack=FORMS[arguments.pack], hoist=hoist, split=arguments.split)
        for component in _components(pipeline, sizes, steps, hardware, fused, hoist, progress)
    ]
    with progress.phase("planning"):
        least = least_budget(components, hardware)
        if hoist is True and not any(c.halves for c in components):
            raise ChunkflowError(
                f"--hoist: no weight of {pipeline.name} is read by products of small inputs alone: leave it out."
            )
        limits = Limits(budget=memory, card=hardware.name, card_bytes=hardware.memory_bytes)
        memory = least if memory is None else memory
        ways = generations(components, hardware, memory)
    called = pipeline.transformer.workload(sizes)
    per_step = f"{called.forwards} forward{'s' * (called.forwards > 1)} per step"
    title = f"{pipeline.name}, {called.label}, {steps} steps, {per_step}, on {hardware.name}"
    say(arguments, prose(generation_answer(ways, limits)))
    say(arguments, "\n" + prose(f"{title}, within {size(memory)}; the minimum is {size(least)}") + "\n")
    say(arguments, generation_tables(ways, limits))
    if arguments.picture:
        draw_generation(ways, memory, hardware, title, Path(arguments.picture))
        say(arguments, f"\npicture: {arguments.picture}")
    if arguments.timeline:
        Path(arguments.timeline).write_text(generation_events(ways["chunkflow"], title))
        say(arguments, f"\ntimeline: {arguments.timeline}")
    figures = {way: {"phases": [p.figures for p in phases]} for way, phases in ways.items()}
    write_json(arguments, {"pipeline": title, "memory": memory, "least": least, "ways": figures})
    return 0


def _components(
    pipeline: Published,
    sizes: OutputSizes,
    steps: int,
    hardware: Hardware,
    fused: bool,
    hoist: Hoist,
    progress: Progress,
) -> Iterator[Component]:
    """Yield the components of a pipeline in the order of their phases."""
    for encoder in pipeline.encoders:
        with progress.phase(f"tracing {encoder.name}"):
            encoded, build = asdict(encoder), encoder.model_and_inputs
            cost = kept_cost(encoded, partial(eager_cost, build, torch.bfloat16))
            trace = partial(trace_without_weights, build, 1, DEFAULT_MIN_BYTES, torch.bfloat16)
            traced = trace_entry(encoded).get(trace)
            yield _component(encoder.name, cost, encoder.calls, make_cut(replace(traced, fused=fused)))
    transformer = pipeline.transformer
    with progress.phase(f"tracing {transformer.name}, half a minute for 10,000 nodes"):
        key, call = preset_call(transformer, 1, sizes, DEFAULT_MIN_BYTES, None, 1)
        traced = replace(trace_entry(key).get(call), fused=fused)
        cut = make_cut(traced)
    halves, nbytes = split(traced) if hoist else None, [weight.nbytes for weight in cut.problem.weights]
    for expert in range(pipeline.experts):  # each expert runs in a part of the steps
        mine = steps // pipeline.experts + (expert < steps % pipeline.experts)
        name = "transformer" + (f"_{expert + 1}" if expert else "")
        yield Component(
            name=name,
            weights=sum(nbytes),
            small=sum(n for n in nbytes if n < DEFAULT_MIN_BYTES),
            activations=None,
            calls=mine * transformer.forwards,
            cut=cut,
            halves=halves,
        )
    with progress.phase("decoding"):
        decoded = {"decoder of": asdict(pipeline), "sizes": asdict(sizes)}
        decode = partial(pipeline.vae_and_latents, sizes)
        cost = kept_cost(decoded, partial(eager_cost, decode, torch.bfloat16, "decode"))
    # a decoder that decodes chunks of frames, one after the other, is called once per chunk
    vae = _component("vae", cost, cost.passes)
    yield replace(vae, seconds=cost.seconds(hardware) / cost.passes, tileable=not pipeline.tiled)


def kept_cost(key: Mapping[str, Any], count: Callable[[], EagerCost]) -> EagerCost:
    """Return the cost of an eager call from the cache.  If it is not cached, compute it with ``count`` and store it."""
    return CacheEntry(kind="cost", key=key, write=asdict, read=lambda body: EagerCost(**body)).get(count)


def _component(name: str, cost: EagerCost, calls: int, cut: Cut | None = None) -> Component:
    weights, small, activations = cost.weights, cost.small, cost.activations
    return Component(name=name, weights=weights, small=small, activations=activations, calls=calls, cut=cut)
