"""Evaluate the arguments that the planning commands share: a model, its sizes, a machine, a goal."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from chunkflow_compile.catalog.branches import BRANCHES
from chunkflow_compile.catalog.presets import OutputSizes, Preset, preset
from chunkflow_compile.catalog.quiet import quiet_diffusers
from chunkflow_compile.catalog.trace_cache import CacheEntry
from chunkflow_compile.catalog.weightless import load_build, trace_without_weights
from chunkflow_compile.options import ALIASES, Options
from chunkflow_compile.passes.cutting import choose_cut, groups_for
from chunkflow_compile.passes.errors import ChunkflowError, first_line
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.peers import on_peers
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.stored import body_of, traced_from
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.hoisting import Hoisting, HoistingFigures, hoisting_of
from chunkflow_compile.passes.names import OnPeers
from chunkflow_compile.passes.placement.exchanging import GroupChoice
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings, make_plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.report.plan_tables import hoisting_sentence
from chunkflow_compile.report.record import prose
from chunkflow_compile.units import parse_bytes, parse_rate
from chunkflow_compile.weights.drive import for_the_drive, with_drive
from chunkflow_compile.weights.progress import Progress

from .arguments import FORMS, add_model, sizes_given
from .machine import choose_hardware, machine, note_hardware
from .output import save_traceback


class Problems(NamedTuple):
    """The problems of a model.  ``problem``: the problem of the graph that runs in every step.  ``raw``: the problem of
    the whole model, without packed or sharded weights and without hoisting.  ``hoisted``: the figures of hoisting, or
    None.  ``why_groups``: the reason for the number of groups of heads; empty if the user has given this number."""

    problem: Problem
    raw: Problem
    hoisted: HoistingFigures | None
    why_groups: str = ""


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model and the machine for which it is planned.  ``forwards``: the number of calls of the model per denoising step
    and rank.

    ``trace``: a function that traces the model, or reads an earlier trace from the cache.  ``key``: everything that the
    trace depends on, or None if this is unknown, as for a user's own model.  ``cfg_parallel``: 2 if each branch of
    classifier-free guidance runs on separate ranks, otherwise 1.  ``regional``: whether blocks are compiled separately
    and run as a cycle.  ``host_memory``: the maximum bytes of weights in host memory, or None.
    """

    title: str
    trace: Callable[[], Traced]
    key: Mapping[str, Any] | None = None
    degree: int
    forwards: int
    settings: Settings
    cfg_parallel: int = 1
    regional: bool = False
    host_memory: int | None = None

    @cached_property
    def traced(self) -> Traced:
        return self.trace()

    @cached_property
    def cut(self) -> Cut:
        """The cut to plan.  Cutting takes a second for 10,000 nodes, and longer if it has to choose the weights to pack
        or to shard.  Raises ChunkflowError if weights must be packed and no weight can be packed, or if they must be
        sharded and no weight can be sharded."""
        hoisting = self.hoisting
        cut = (
            choose_cut(self.traced, self.settings_of_cut)
            if hoisting is None
            else choose_cut(hoisting.halves.main, hoisting.main)
        )
        if self.settings.goal.pack and not packable(cut.raw or cut):
            raise ChunkflowError(
                f"--pack packs contiguous weights of bfloat16, each read by one region, and {self.title} has none: leave it "
                "out, or give a model in bfloat16."
            )
        return cut

    @cached_property
    def hoisting(self) -> Hoisting | None:
        """The two halves of the model, or None if nothing is hoisted.  Raises ChunkflowError if products must be hoisted
        and no product can be hoisted."""
        return hoisting_of(self.traced, self.settings_of_cut)

    @cached_property
    def _groups(self) -> GroupChoice | None:
        """The chosen number of groups of heads and the reason for it, or None if the user has given the number."""
        return groups_for(self.traced, self.settings) if self.settings.goal.exchange_groups == "auto" else None

    @property
    def settings_of_cut(self) -> Settings:
        """The settings with the chosen number of groups of heads."""
        if self._groups is None:
            return self.settings
        groups = self._groups.groups
        goal = replace(self.settings.goal, exchange_groups=groups > 1 and groups)
        return replace(self.settings, goal=goal)

    @property
    def _entry(self) -> CacheEntry[Problems] | None:
        """The cache entry for the problems of the cut."""
        if self.key is None:
            return None
        key = {"traced": self.key, "settings": asdict(self.settings)}
        return CacheEntry(kind="problem", key=key, write=_bodies, read=_problems)

    @cached_property
    def kept(self) -> Problems | None:
        """The cached problems, or None.  If there are cached problems, the model need not be traced or cut."""
        return None if self._entry is None else self._entry.find()

    @cached_property
    def _found(self) -> Problems:
        if self.kept is not None:
            return self.kept
        goal, problem = self.settings.goal, self.cut.problem
        raw = on_peers(packed(self.cut, ()), (), 0).problem if goal.pack or goal.peers else problem
        if (hoisting := self.hoisting) is not None:
            plain = replace(goal, pack=False, peers=False, hoist=False)
            plain = replace(plain, exchange_groups=self.settings_of_cut.goal.exchange_groups)
            raw = choose_cut(self.traced, replace(self.settings, goal=plain)).problem
        why = "" if self._groups is None else self._groups.why
        found = Problems(problem, raw, None if hoisting is None else hoisting.figures, why)
        if self._entry is not None:
            self._entry.keep(found)
        return found

    @cached_property
    def problem(self) -> Problem:
        return self._where_it_runs(self._found.problem)

    @cached_property
    def raw(self) -> Problem:
        """The problem of the whole model, without packed or sharded weights and without hoisting."""
        return self._where_it_runs(self._found.raw)

    @property
    def hoisted(self) -> HoistingFigures | None:
        """The figures of hoisting, or None if nothing is hoisted."""
        return self._found.hoisted

    @property
    def why_groups(self) -> str:
        """The reason for the number of groups of heads; empty if the user has given this number."""
        return self._found.why_groups

    def _where_it_runs(self, problem: Problem) -> Problem:
        """Return a problem that is divided into blocks with --regional, and that has weights on the SSD with
        --host-memory."""
        if self.regional:
            problem = problem.in_blocks
            if not problem.regions:
                raise ChunkflowError(
                    f"{self.title} has no blocks in a ModuleList to compile one by one: leave out --regional."
                )
        if self.host_memory is None:
            return problem
        stored = {w.name: w.nbytes for w in problem.weights if w.source.compressed}
        large = [(name, stored.get(name, nbytes)) for name, nbytes in self.traced.large]
        return with_drive(problem, for_the_drive(large, self.host_memory))

    @property
    def hardware(self) -> Hardware:
        return self.settings.hardware

    def plan(self, problem: Problem | None = None, **other: Any) -> Plan:
        """Return a plan for the command's goal.  ``problem``: the problem to plan, by default :attr:`problem`.
        ``other``: settings that replace the command's settings."""
        problem = problem or self.problem
        settings = self.settings_of_step if problem is self.problem else self.settings
        plan = make_plan(problem, replace(settings, **other), residents_in_arena=self.regional)
        return replace(plan, model=self.title)

    @property
    def settings_of_step(self) -> Settings:
        """The settings for planning the graph that runs in every step.  If products are hoisted, they count the memory of
        the rows and reserve memory for the preamble."""
        if self.hoisted is None:
            return self.settings
        return replace(self.settings, external_bytes=self.hoisted.external_bytes, arena=self.hoisted.arena)

    @property
    def ranks(self) -> int:
        return self.cfg_parallel * self.degree

    @property
    def where(self) -> str:
        """A phrase that names the machine and, with several ranks, how a step is split over them."""
        if self.ranks == 1:
            return f"on {self.hardware.name}"
        if self.cfg_parallel == 1:
            return f"Ulysses degree {self.degree} on {self.hardware.name}"
        return f"{self.ranks} ranks: CFG parallel {self.cfg_parallel} x Ulysses {self.degree} on {self.hardware.name}"

    @property
    def calls(self) -> str:
        """A phrase on how often a rank calls the model per step."""
        return f"{self.forwards} forward{'s' * (self.forwards != 1)} per step"

    @property
    def heading(self) -> str:
        without = f"; without {', '.join(sorted(self.settings.disabled))}" if self.settings.disabled else ""
        without += "; its blocks compiled one by one" if self.regional else ""
        return prose(f"{self.title}; {self.where}, {self.calls}{without}")

    def heading_of(self, preamble: bool) -> str:
        """Return the heading for output about one graph.  ``preamble``: whether this is the preamble; otherwise, it is
        the graph that runs in every step, which is main if products are hoisted."""
        if self.hoisted is None:
            return self.heading
        half = "the preamble" if preamble else "main"
        return prose(f"{self.heading}; {half}, hoisted: {hoisting_sentence(self.hoisted)}")


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


def _bodies(found: Problems) -> list[Any]:
    hoisted = None if found.hoisted is None else asdict(found.hoisted)
    return [hoisted, found.why_groups, *(problem.body for problem in dict.fromkeys((found.problem, found.raw)))]


def _problems(bodies: Sequence[Any]) -> Problems:
    problems = [Problem.from_body(body) for body in bodies[2:]]
    return Problems(
        problems[0], problems[-1], None if bodies[0] is None else HoistingFigures(**bodies[0]), str(bodies[1])
    )


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
