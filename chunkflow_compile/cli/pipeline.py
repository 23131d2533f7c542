"""``chunkflow pipeline``: a generation of a whole pipeline within a budget, planned without weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chunkflow_compile.hardware.profiles import load_profile, profile_names
from chunkflow_compile.models.eager_cost import eager_cost
from chunkflow_compile.models.presets import Sizes
from chunkflow_compile.models.published import PUBLISHED, Encoder, Published, published
from chunkflow_compile.models.weightless import trace_without_weights
from chunkflow_compile.options import DEFAULT_CHUNK_BYTES, DEFAULT_MIN_BYTES
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.pipeline import make_cut
from chunkflow_compile.report.generation import draw_generation, generation_tables
from chunkflow_compile.report.perfetto import generation_events
from chunkflow_compile.report.record import check_writable, size
from chunkflow_compile.simulate.generation import Component, generations, least_budget
from chunkflow_compile.units import parse_bytes

from .output import Progress, add_json, check_json, say, write_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "pipeline",
        help="plan a whole pipeline within the memory of a card, without weights",
        description="Plans one generation of a pipeline, encoders, transformers and VAE, within a budget for weights and "
        "activations, and shows it beside other ways to run it.  Activations are those of eager code, an upper bound.",
        epilog="example: chunkflow pipeline flux.1-dev --memory 12GiB --hardware rtx-4090-pcie --picture flux.png",
    )
    parser.add_argument("pipeline", metavar="PIPELINE", help=", ".join(PUBLISHED))
    parser.add_argument(
        "--memory", metavar="SIZE", help="most bytes on the device, such as 12GiB (default: the least that fits)"
    )
    parser.add_argument(
        "--hardware",
        default="rtx-4090-pcie",
        metavar="HW",
        help=f"{', '.join(profile_names())}, a JSON file, or measured (default rtx-4090-pcie)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="denoising steps (default: the model's)")
    for name, text in (("frames", "frames of video"), ("height", "pixels"), ("width", "pixels")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} (default: as published)")
    parser.add_argument("--picture", metavar="PNG", help="draw the memory over the generation")
    parser.add_argument(
        "--timeline", metavar="JSON", help="write the phases, with two calls of each, as a trace for ui.perfetto.dev"
    )
    add_json(parser, "the phases of each way")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    for file in filter(None, (arguments.picture, arguments.timeline)):
        check_writable(Path(file))
    found, hardware = published(arguments.pipeline), load_profile(arguments.hardware)
    given = {n: getattr(arguments, n) for n in ("frames", "height", "width") if getattr(arguments, n) is not None}
    memory = None if arguments.memory is None else parse_bytes(arguments.memory, "--memory")
    sizes = replace(found.transformer.sizes, **given)
    found.transformer.shape(sizes)
    steps = found.steps if arguments.steps is None else arguments.steps
    if steps < found.experts:
        raise ChunkflowError(f"--steps must be at least {found.experts}.")
    progress = Progress(len(found.encoders) + 3)
    components = list(_components(found, sizes, steps, hardware, progress))
    with progress.phase("planning"):
        least = least_budget(components, hardware, DEFAULT_CHUNK_BYTES)
        memory = least if memory is None else memory
        ways = generations(components, hardware, DEFAULT_CHUNK_BYTES, memory)
    title = f"{found.name}, {sizes}, {steps} steps, on {hardware.name}"
    say(arguments, f"{title}, within {size(memory)}; the least that fits is {size(least)}\n")
    say(arguments, generation_tables(ways, found.transformer.forwards))
    if arguments.picture:
        draw_generation(ways, memory, title, Path(arguments.picture))
        say(arguments, f"\npicture: {arguments.picture}")
    if arguments.timeline:
        ours = ways["chunkflow"]
        Path(arguments.timeline).write_text(generation_events(ours.phases, ours.plans, title))
        say(arguments, f"\ntimeline: {arguments.timeline}")
    phases = {way: {"phases": [asdict(p) for p in g.phases]} for way, g in ways.items()}
    body = {"pipeline": title, "memory": memory, "least": least, "ways": phases}
    write_json(arguments, json.dumps(body, indent=1) + "\n")
    return 0


def _components(
    found: Published, sizes: Sizes, steps: int, hardware: Hardware, progress: Progress
) -> Iterator[Component]:
    """The phases of a generation, in order."""
    for encoder in found.encoders:
        with progress.phase(f"tracing {encoder.name}"):
            yield _encoder(encoder)
    transformer = found.transformer
    with progress.phase(f"tracing {transformer.name}, half a minute for 10,000 nodes"):
        problem = make_cut(transformer.trace(1, sizes)).problem
        cost = eager_cost(lambda: _called(*transformer.build(sizes, torch.device("cpu"))), torch.bfloat16)
    for expert in range(found.experts):  # each takes its share of the steps
        mine = steps // found.experts + (expert < steps % found.experts)
        yield Component(
            name="transformer" + (f"_{expert + 1}" if expert else ""),
            weights=cost.weights,
            small=cost.small,
            activations=cost.activations,
            calls=mine * transformer.forwards,
            problem=problem,
        )
    with progress.phase("decoding"):
        cost = eager_cost(found.decode(sizes), torch.bfloat16)
    yield Component(
        name="vae",
        weights=cost.weights,
        small=cost.small,
        activations=cost.activations,
        calls=1,
        seconds=cost.seconds(hardware),
    )


def _encoder(encoder: Encoder) -> Component:
    cost = eager_cost(lambda: _called(encoder.build(), encoder.inputs()), torch.bfloat16)
    traced = trace_without_weights(
        lambda: (encoder.build().eval(), encoder.inputs()), 1, DEFAULT_MIN_BYTES, torch.bfloat16
    )
    return Component(
        name=encoder.name,
        weights=cost.weights,
        small=cost.small,
        activations=cost.activations,
        calls=encoder.calls,
        problem=make_cut(traced).problem,
    )


def _called(model: nn.Module, inputs: dict[str, Any]) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    return model, lambda m: m(**inputs)
