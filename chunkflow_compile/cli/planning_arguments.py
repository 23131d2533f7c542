"""Evaluate the arguments that the planning commands share: a model, its sizes, a machine, a goal."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from chunkflow_compile.catalog.branches import BRANCHES
from chunkflow_compile.catalog.presets import OutputSizes, Preset, preset
from chunkflow_compile.catalog.quiet import quiet_diffusers
from chunkflow_compile.catalog.trace_cache import CacheEntry
from chunkflow_compile.catalog.weightless import load_build, trace_without_weights
from chunkflow_compile.options import ALIASES, Options
from chunkflow_compile.passes.errors import ChunkflowError, first_line
from chunkflow_compile.passes.graph.stored import body_of, traced_from
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import OnPeers
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.units import parse_bytes, parse_rate
from chunkflow_compile.weights.progress import Progress

from .arguments import FORMS, add_model, sizes_given
from .output import save_traceback
from .planned_machine import choose_hardware, machine, note_hardware
from .planned_model import PlannedModel


def options_of(arguments: argparse.Namespace) -> Options:
    """Convert the arguments to options of the backend, including a hardware profile.  Raises ChunkflowError if an
    argument is invalid."""
    choose_hardware(arguments)
    return Options(
        memory=arguments.memory,
        weight_memory=arguments.weight_memory,
        slowdown=arguments.slowdown,
        hardware=arguments.hardware,
        yields=arguments.yields,
        chunk_bytes=parse_bytes(arguments.chunk_bytes, "chunk_bytes"),
        min_bytes=parse_bytes(arguments.min_bytes, "min_bytes"),
        group_bytes=None if arguments.group_bytes is None else parse_bytes(arguments.group_bytes, "group_bytes"),
        disable=tuple(arguments.disable_pass),
        pack=FORMS[arguments.pack],
        hoist=FORMS[arguments.hoist],
        split=arguments.split,
        exchange_groups=arguments.exchange_groups,
    )


def load_target(arguments: argparse.Namespace, progress: Progress, graph: bool = False) -> PlannedModel:
    """Check the arguments, and then trace the model as one phase of ``progress``.  Tracing takes up to a minute for a
    large model, or a second if the trace is cached.  ``graph``: whether the command needs the graph in addition to the
    problem.

    Raises ChunkflowError if an argument is invalid or if the model cannot be traced.
    """
    if arguments.ulysses < 1 or (arguments.forwards is not None and arguments.forwards < 1):
        raise ChunkflowError("--ulysses and --forwards must be at least 1.")
    options = options_of(arguments)
    settings = options.settings()
    if options.goal.pack == "auto" and options.goal.memory is None:
        raise ChunkflowError(
            "--pack auto chooses for a budget: give --memory or --weight-memory, or --pack for all weights that can be "
            "packed."
        )
    if options.hoist and arguments.regional:
        raise ChunkflowError(
            "--hoist splits the whole model, and --regional plans its blocks one by one: leave one out."
        )
    hardware = machine(settings.hardware, arguments)
    peers = _peers(hardware, arguments)
    if arguments.drive is not None:
        hardware = replace(hardware, drive_bandwidth=parse_rate(arguments.drive, "drive"))
    host_memory = None if arguments.host_memory is None else parse_bytes(arguments.host_memory, "host_memory")
    if arguments.model.endswith(".json"):
        raise ChunkflowError(f"{arguments.model} is a plan file, not a model: use it with chunkflow timeline.")
    own = ":" in arguments.model or ".py" in arguments.model
    title, forwards, trace, key = (_own if own else _preset)(arguments, options.min_bytes)
    fused = arguments.lowering == "inductor"
    target = PlannedModel(
        title=title,
        trace=lambda: replace(trace(), fused=fused),
        key=None if key is None else {**key, "fused": fused},
        degree=arguments.ulysses,
        forwards=forwards,
        settings=replace(settings, hardware=hardware, goal=replace(options.goal, peers=peers), ranks=arguments.ulysses),
        cfg_parallel=arguments.cfg_parallel,
        regional=arguments.regional,
        host_memory=host_memory,
    )
    note_hardware(arguments)
    with progress.phase(f"tracing {arguments.model}, half a minute for 10,000 nodes"):
        if graph or target.kept is None:
            _ = target.traced
    return target


def _peers(hardware: Hardware, arguments: argparse.Namespace) -> OnPeers:
    """Return whether to shard weights over the devices of the ranks.  Raises ChunkflowError if sharding is required and
    not possible.

    If sharding is optional and impossible, prints a note on stderr.
    """
    peers = FORMS[arguments.peers]
    if not peers or not (why := hardware.why_no_peers(arguments.ulysses)):
        return peers
    if peers is True:
        raise ChunkflowError(f"--peers: {why} Leave it out.")
    print(f"note: no weight is on the devices of other ranks: {why}", file=sys.stderr)
    return False


# The title, the number of calls per step, a function that traces the model, and everything that the trace depends on
# (None if this is unknown).
Model = tuple[str, int, Callable[[], Traced], "Mapping[str, Any] | None"]


def _own(arguments: argparse.Namespace, min_bytes: int) -> Model:
    """Return a user's own model."""
    if arguments.quantize is not None:
        raise ChunkflowError("--quantize is for presets: quantise the model in your own function.")
    for name in sizes_given(arguments):
        raise ChunkflowError(f"--{name} is a size of a preset: leave it out, since your own function makes its inputs.")
    degree, cfg_parallel = arguments.ulysses, arguments.cfg_parallel
    forwards = _forwards(arguments, arguments.model, 1)
    with contextlib.redirect_stdout(sys.stderr):
        build = load_build(arguments.model)
    work = partial(trace_without_weights, build, degree, min_bytes, cfg_parallel=cfg_parallel)
    return arguments.model, forwards, partial(_trace, arguments, work), None


def _preset(arguments: argparse.Namespace, min_bytes: int) -> Model:
    """Return the model of a preset."""
    model, quantize = preset(arguments.model).under(arguments.cfg_parallel), arguments.quantize
    sizes = replace(model.sizes, **sizes_given(arguments))
    model.shape(sizes)
    forwards = _forwards(arguments, model.name, model.forwards)
    key, call = preset_call(model, arguments.ulysses, sizes, min_bytes, quantize, arguments.cfg_parallel)
    name = f"{model.name} in {quantize}" if quantize else model.name
    title = f"{name}, {model.workload(sizes).label}, batch {sizes.batch}"
    return title, forwards, partial(trace_entry(key).get, partial(_trace, arguments, call)), key


def preset_call(
    model: Preset, degree: int, sizes: OutputSizes, *more: Any
) -> tuple[Mapping[str, Any], Callable[[], Traced]]:
    """Return everything that the trace of a preset depends on, and a function that traces the preset.  ``more``: further
    arguments of ``Preset.trace``."""
    key = {"model": asdict(model), "degree": degree, "sizes": asdict(sizes), "more": more}
    return key, partial(model.trace, degree, sizes, *more)


def trace_entry(key: Mapping[str, Any]) -> CacheEntry[Traced]:
    """Return the cache entry for a traced graph."""
    return CacheEntry(kind="trace", key=key, write=body_of, read=traced_from)


def refuse_options(arguments: argparse.Namespace) -> None:
    """Raise ChunkflowError if the user has set an option that the given plan file determines."""
    parser = argparse.ArgumentParser()
    add_model(parser, or_blocks=True)
    for name, default in vars(parser.parse_args(["plan.json"])).items():
        if name != "model" and getattr(arguments, name) != default:
            option = ALIASES.get(name, name).replace("_", "-")
            raise ChunkflowError(
                f"--{option} is an option of a model: leave it out, since the plan {arguments.model} fixes it."
            )


def load_and_plan(arguments: argparse.Namespace, progress: Progress) -> tuple[PlannedModel, Plan]:
    """Trace and cut a model, and plan it.  These are two phases of ``progress``."""
    target = load_target(arguments, progress)
    with progress.phase("planning"):
        note_rates(target)
        return target, target.plan()


def note_rates(target: PlannedModel) -> None:
    """Print a note on stderr if the hardware profile has no rate for a dtype in the model."""
    name, rates = target.hardware.name, target.hardware.gemm_flops
    missing = sorted({r.cost.dtype for r in target.problem.regions if r.cost.flops} - set(rates))
    if missing:
        note = f"{name} has no rate for {', '.join(missing)}; planned at the slowest of {', '.join(rates)}"
        print(f"note: {note}", file=sys.stderr)


def _forwards(arguments: argparse.Namespace, name: str, default: int) -> int:
    """Return the number of calls of the model per step and rank.  Raises ChunkflowError if CFG parallelism cannot divide
    the calls of a step."""
    ranks: int = arguments.cfg_parallel
    calls: int = arguments.forwards or default
    if ranks not in (1, BRANCHES):
        raise ChunkflowError(
            f"--cfg-parallel {ranks}: classifier-free guidance has {BRANCHES} branches. Give {BRANCHES}, for ranks of its "
            "own for each, or 1, for ranks that compute both."
        )
    if calls % ranks:
        raise ChunkflowError(
            f"--cfg-parallel {ranks} needs two branches of classifier-free guidance, one call each, but a step of {name} is "
            f"{calls} call{'s' * (calls != 1)}. Leave it out where guidance is distilled into the model, as in FLUX.1-dev "
            "and HunyuanVideo; where there are two branches (true_cfg_scale), give --forwards 2 and the inputs of one."
        )
    return calls // ranks


def _trace(arguments: argparse.Namespace, work: Callable[[], Traced]) -> Traced:
    """Trace a model.  If tracing fails, write the full traceback to a file and raise ChunkflowError with the cause in a
    sentence.

    The output of the model is redirected to stderr, because stdout is only for tables or JSON.
    """
    quiet_diffusers()
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        try:
            return work()
        except ChunkflowError:
            raise
        except Exception as error:
            file = save_traceback()
            raise ChunkflowError(
                f"{arguments.model} cannot be traced: {_cause(error)} (full traceback: {file})"
            ) from error


def _cause(error: Exception) -> str:
    """Return the most useful line of an error: Dynamo's reason, or the first line of the error raised inside the
    model."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for start in ("got ", "Explanation: "):
        if reason := next((line for line in lines if line.startswith(start)), None):
            return f"{type(error).__name__}: {reason.removeprefix(start)}"
    inside: BaseException = error
    while (below := inside.__cause__ or inside.__context__) is not None:
        inside = below
    return first_line(inside)
