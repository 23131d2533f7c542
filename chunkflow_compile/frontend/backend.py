"""The backend: ``torch.compile(model, backend="chunkflow")``.

The backend turns the Dynamo graph into a :class:`CompiledGraph` without reading a weight.  First it describes the parameters.
Then it cuts, plans, rewrites and verifies the ATen graph.  Finally it lowers the regions of this graph.  Weights move only
after all these steps have succeeded.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from chunkflow_compile.frontend.block_kinds import repeats_of
from chunkflow_compile.frontend.compression import compressible
from chunkflow_compile.frontend.exchange_groups import agreed_groups
from chunkflow_compile.frontend.hoisting import preamble_of, warn_if_not_hoisted
from chunkflow_compile.frontend.model_lookup import index_of, move_weights, start_program
from chunkflow_compile.frontend.module_search import blocks_around
from chunkflow_compile.frontend.preconditions import (
    bytes_outside,
    device_of,
    fix_sizes,
    guard_hooks,
    is_part,
    lower_without_weights,
    note_estimates,
    note_graph_break,
    note_ops_of_others,
    refuse_attributes,
    refuse_decisions_of_a_rank,
    refuse_gradient_buckets,
    refuse_gradients,
    warn_if_no_module_holds,
    warn_if_nothing_streams,
    warn_of_small_weights,
    weights_and_modules,
    with_fixed_batch,
)
from chunkflow_compile.frontend.survey import Survey, Unplanned, survey_of
from chunkflow_compile.frontend.trace import (
    NO_MODULE,
    describe_graph,
    describe_parameters,
    inline_regions,
    lower_to_aten,
    move_tables,
    slow_inputs,
    weights_among,
)
from chunkflow_compile.hardware.caches import check_compile_cache
from chunkflow_compile.lowering.lower import lower_regions
from chunkflow_compile.lowering.tensorrt import check_tensorrt
from chunkflow_compile.option_parsing import parse_options
from chunkflow_compile.options import Options
from chunkflow_compile.passes.cutting import goal_of_cut
from chunkflow_compile.passes.errors import BudgetError, ChunkflowError, first_line
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.head_groups import in_head_groups
from chunkflow_compile.passes.graph.pack import packed
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.sizes import symbols_of
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.hoisting import hoisting_of
from chunkflow_compile.passes.names import STAGES, StageName
from chunkflow_compile.passes.pieces import piece_bytes
from chunkflow_compile.passes.pipeline import Stage, stages
from chunkflow_compile.passes.placement.place import least_memory
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.passes.problem import Parameter, Problem
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.placed.index import ModelIndex
from chunkflow_compile.placed.offload import large_weights, refuse_accelerate
from chunkflow_compile.placed.placement import Placement, placement_of, placements_around, progress_of
from chunkflow_compile.placed.streamable import refuse_fully_sharded
from chunkflow_compile.private_torch.dynamo import BackendCompilerFailed, dynamo_timed
from chunkflow_compile.private_torch.inductor import InductorError
from chunkflow_compile.releases import warn_if_untested
from chunkflow_compile.report.logs import logged
from chunkflow_compile.report.stages import write_stages
from chunkflow_compile.runtime.device import check_device, check_kind
from chunkflow_compile.runtime.graph import CompiledGraph, HostConstants, awaited
from chunkflow_compile.runtime.hoisted import HoistedGraph
from chunkflow_compile.runtime.variants import Variant, VariantCache, decided, without_call_fields
from chunkflow_compile.runtime.wrapped_calls import LoweredRegion
from chunkflow_compile.units import enough, size
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of

_log = logging.getLogger(__name__)


# The note for pack="auto" without a memory budget.
_NO_GOAL = (
    "pack='auto' packs nothing: which weights to pack depends on a budget, and neither memory= nor weight_memory= was given. "
    "With memory='8GiB', or pack=True, the weights have 0.76 of their bytes in host memory and on the link"
)


class CompilationError(ChunkflowError, BackendCompilerFailed):
    """A ChunkflowError during compilation.

    Dynamo wraps errors of backends in BackendCompilerFailed.  This class is derived from BackendCompilerFailed, so Dynamo
    raises it unchanged.  Its message is the message of the original error, without the name of the backend and without
    Dynamo's advice to report a bug.
    """

    def __str__(self) -> str:
        return str(self.inner_exception)


def chunkflow(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    name: str | None = None,
    by_kind: bool = False,
) -> Any:
    """Compile a Dynamo graph; called by torch.compile.

    A graph without weights is lowered without a plan, because there is nothing to stream.
    ``options``, ``mode``: as passed to torch.compile.  ``name``: ignored; torch passes it since version 2.15.
    ``by_kind``: whether the graph is part of a model that is compiled block by block, each block type once.
    Raises ChunkflowError, before any weight moves, in these cases: unknown options, unsupported settings of torch, enabled
    gradients, inputs that are not on the device of the weights, weights that accelerate has offloaded, weights that are
    attributes of the graph, a graph that torch has split into the buckets of DistributedDataParallel, or a memory budget
    below the minimum.
    """
    try:
        with awaited(example_inputs):
            return _compile_frame(graph, example_inputs, options, mode, by_kind)
    except ChunkflowError as error:
        raise CompilationError(chunkflow, error, inspect.currentframe()) from error


def _compile_frame(
    graph: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None, mode: str | None, by_kind: bool
) -> Any:
    warn_if_untested(torch.__version__)
    chosen = parse_options(options, mode)
    check_compile_cache(needed=chosen.lowering != "eager")
    refuse_gradient_buckets(graph)
    refuse_attributes(graph, chosen.min_bytes)
    note_graph_break(graph)
    inline_regions(graph)
    index, placed = index_of(*weights_and_modules(graph, inputs, chosen.min_bytes), chosen.min_bytes)
    weights = weights_among(inputs, index)
    if not weights:
        return lower_without_weights(graph, inputs, chosen.lowering, chosen.inductor)
    placement = None if index.root is None else placement_of(index.root)
    if placement is not None and chosen.hoist is False and chosen.policy == "chunkflow":
        chosen = replace(chosen, hoist=placement.hoist)
    min_bytes = chosen.min_bytes if placed is None else placed
    progress = progress_of(graph if index.root is None else index.root)
    with progress.compiling():
        compiler = _graph_compiler(graph, inputs, chosen, index, weights, min_bytes, placement)
        survey = survey_of(inputs)
        compiler = replace(compiler, report=progress.say, by_kind=by_kind, survey=survey)
        with dynamo_timed("chunkflow.aot"):
            fixed = set() if placement is None else placement.fixed
            traced = with_fixed_batch(graph, inputs, compiler.slow) if chosen.hoist else inputs
            try:
                compiled, runner = _compile_with_dynamic_shapes(
                    graph, traced, compiler, fixed if survey is None else {*fixed}
                )
            except BudgetError as error:
                if survey is None:
                    raise
                survey.note(error)
                return Unplanned(graph, error)
        if survey is not None:
            return compiled
        progress.compiled(p.name for p in compiler.parameters)
    part, made = compiler.settings.part, runner.programs
    offloaded = frozenset[str]().union(*(program.offloaded for program in made))
    if part:
        guard_hooks()
    warn_if_nothing_streams(index, made)
    if index.root is not None and not offloaded and (placement is None or placement.owned_arena is None):
        warn_of_small_weights(index.root, min_bytes)  # for a pipeline, compile() gives this warning
    if index.root is not None and (placed is not None or _is_first_compilation()):
        wanted = [weights[p.key] for p in compiler.parameters if p.name in offloaded]
        if part and wanted:  # also move the weights of all other blocks, so that the guards of this block hold for them
            wanted += large_weights(blocks_around(index.root, wanted), index, min_bytes)
        missing = [w for w in {id(w): w for w in wanted}.values() if buffer_of(w) is None]
        move_weights(index, compiler.device, min_bytes, missing, chosen.pack)
    return compiled


def _graph_compiler(
    graph: GraphModule,
    inputs: Sequence[Any],
    chosen: Options,
    index: ModelIndex,
    weights: Mapping[tuple[int, str], torch.Tensor],
    min_bytes: int,
    placement: Placement | None,
) -> _GraphCompiler:
    """Return the compiler for the ATen graph of a Dynamo graph.  Raises ChunkflowError if the graph cannot be compiled."""
    refuse_gradients(inputs)
    if index.root is not None:
        refuse_accelerate(index.root)
        refuse_decisions_of_a_rank(index.root, graph)
        refuse_fully_sharded(index.root)
    fix_sizes(inputs, weights.values())
    device = check_device(device_of(weights, inputs, graph))
    chosen = chosen.on(device)
    _check_options(chosen, device)
    parameters = describe_parameters(inputs, index, min_bytes)
    if chosen.policy != "resident":
        warn_if_no_module_holds((weights[p.key] for p in parameters if p.keep == NO_MODULE), min_bytes)
    part = is_part(weights.values(), index.root, min_bytes)
    buffers = [buffer_of(weights[p.key]) for p in parameters]
    peers = None if placement is None else placement.store.peers
    goal, settings = None if placement is None else placement.goal, chosen.settings()
    sharded = False if peers is None or placement is None else placement.peers
    settings = replace(
        settings,
        goal=replace(chosen.goal.aimed_at(goal), peers=sharded),
        plan=settings.plan if goal is None else None,
        part=part,
        external_bytes=bytes_outside(index.root, weights.values(), min_bytes, part),
        ranks=0 if peers is None else peers.ranks,
    )
    return _GraphCompiler(
        chosen=chosen,
        settings=replace(settings, likes=_likes(placement, settings)),
        parameters=parameters,
        weights={p.name: weights[p.key] for p in parameters},
        index=index,
        device=device,
        min_bytes=min_bytes,
        expected=None if placement is None else placement.expected,
        slow=slow_inputs(graph, chosen.hoist),
        root=(lambda: None) if index.root is None else weakref.ref(index.root),
        pieces=_pieces_elsewhere(placement, buffers) if part else 0,
    )


def _compile_with_dynamic_shapes(
    graph: GraphModule, inputs: Sequence[Any], compiler: _GraphCompiler, fixed: set[tuple[str, ...]]
) -> tuple[Callable[..., Any], CompiledGraph | HoistedGraph]:
    """Compile a graph with dynamic shapes, if possible; return the function for Dynamo, and the runner that it calls.

    In two cases, the graph is compiled only for the sizes of this call.  One case is that Inductor fails on dynamic shapes.
    The other is that the budget is too small for whole blocks: blocks can be split into slices only at fixed sizes.
    ``fixed``: one tuple of weight names for each graph that is compiled for fixed sizes.  In the two cases above, this
    function adds the weight names of this graph.
    """
    names = tuple(p.name for p in compiler.parameters)
    if names not in fixed:
        try:
            return lower_to_aten(graph, inputs, compiler)
        except InductorError as error:
            if not symbols_of([*inputs]):
                raise
            said = "%s and what reads it are compiled for each size: Inductor fails on symbols, %s"
            _log.warning(said, names[0], first_line(error))
            fixed.add(names)
        except BudgetError:
            goal = compiler.settings.goal
            whole = compiler.survey is not None and compiler.survey.whole
            if whole or not symbols_of([*inputs]) or not goal.activations or goal.split == 1:
                raise
            said = (
                "The graph that reads %s is compiled for each size: blocks can be split into slices only at fixed sizes"
            )
            if compiler.survey is None:
                _log.warning(said, names[0])
            fixed.add(names)
    for value in inputs:
        if isinstance(value, torch.SymInt):
            int(value)  # adds a guard on this size
    return lower_to_aten(graph, inputs, compiler)


@dataclass(frozen=True, kw_only=True)
class _GraphCompiler:
    """Plans, verifies and lowers the ATen graph that AOTAutograd makes from a Dynamo graph.

    ``weights``: the weights by their parameter names.  ``index``: the index of the model that contains the weights.
    ``report``: a function that is called with the name of each stage of the compilation.  ``expected``: the goal that the
    model is expected to get later, or None if it is not known.  ``pieces``: the size in bytes of this rank's pieces of the
    weights that only other parts of the model read.  ``slow``: see :class:`Traced`.  ``root``: a function that returns the
    model, or None.  ``by_kind``: see :func:`chunkflow`.  ``notes``: notes for the user on decisions that were made before
    planning.  ``survey``: the survey during which the graph is compiled; None if the graph is compiled for an ordinary call.
    ``agreed``: the number of groups of heads on which the ranks have agreed, with its notes.  If a rank compiles the graph
    again at fixed sizes, it uses this number again instead of asking the other ranks.
    """

    chosen: Options
    settings: Settings
    parameters: Sequence[Parameter]
    weights: Mapping[str, torch.Tensor]
    index: ModelIndex
    device: torch.device
    min_bytes: int
    report: Callable[[str], object] = str
    expected: Goal | None = None
    pieces: int = 0
    slow: frozenset[int] | None = None
    by_kind: bool = False
    survey: Survey | None = None
    root: Callable[[], nn.Module | None] = lambda: None
    notes: tuple[str, ...] = ()
    agreed: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def __call__(self, aten: GraphModule, _: Sequence[Any]) -> CompiledGraph | HoistedGraph:
        with dynamo_timed("chunkflow.program"):
            return self._runner(aten)

    def _runner(self, aten: GraphModule) -> CompiledGraph | HoistedGraph:
        self.report("planning")
        tables = HostConstants(self.device, move_tables(aten, self.device))
        traced = self._describe(aten)
        with dynamo_timed("chunkflow.exchange_groups"):
            if not self.agreed:
                expected = replace(self.settings, goal=self._expected_goal)
                traced, said = agreed_groups(traced, expected, alone=self.survey is not None)
                self.agreed.append((traced.exchange_groups, said))
            groups, notes = self.agreed[0]
            traced = in_head_groups(traced, groups)
        settings = replace(self.settings, goal=replace(self.settings.goal, exchange_groups=groups > 1 and groups))
        return replace(self, settings=settings, notes=notes)._halves(aten, traced, tables)

    def _halves(self, aten: GraphModule, traced: Traced, tables: HostConstants) -> CompiledGraph | HoistedGraph:
        """Compile the graph as a whole; if products are hoisted, compile its two halves instead."""
        with dynamo_timed("chunkflow.hoist"):
            hoisting = hoisting_of(traced, replace(self.settings, goal=self._expected_goal))
        unhoisted = replace(self.settings, goal=replace(self.settings.goal, hoist=False))
        if hoisting is None:
            warn_if_not_hoisted(traced, self.settings, self.by_kind)
            return self._graph(traced, unhoisted, tables)
        halves, moved = hoisting.halves, HostConstants(self.device)
        make = partial(self._graph, halves.preamble, hoisting.preamble, moved, hoisting.preamble_cut)
        # in a survey, no preamble of the model is reused, because the compiled graph will never run
        placement = placement_of(self.index.root) if self.index.root is not None and self.survey is None else None
        preamble = preamble_of(placement, hoisting, self.chosen, traced.repeats is not None, make)
        main = self._graph(halves.main, replace(hoisting.main, goal=unhoisted.goal), moved)
        # keep only weak references, so that compiled code does not keep the model alive
        later = replace(self, weights=WeakValueDictionary(self.weights), index=ModelIndex(None, {}, {}), report=str)
        whole = partial(_compile_whole, later, traced, unhoisted)
        return HoistedGraph(aten, halves, preamble, main, tables, whole)

    @property
    def _expected_goal(self) -> Goal:
        """The goal from the settings.  If this goal has neither a budget nor a slowdown, both and the policy come from the
        goal that the model is expected to get."""
        goal = self.settings.goal
        return goal.aimed_at(self.expected) if goal.memory is None and goal.slowdown is None else goal

    def _describe(self, aten: GraphModule) -> Traced:
        """Return the ATen graph together with the data that its nodes do not contain."""
        chosen = self.chosen
        repeats = None
        if self.settings.part and self.index.root is not None:
            streamed = [p.name for p in self.parameters if p.keep is None]
            repeats = repeats_of(self.index.root, streamed, self._expected_goal)
        fused = chosen.lowering != "eager"
        return replace(describe_graph(aten, self.parameters, self.index.blocks, fused, repeats), slow=self.slow)

    def _graph(
        self, traced: Traced, settings: Settings, tables: HostConstants, pieces: Cut | None = None
    ) -> CompiledGraph:
        """Run the passes on a graph and lower the result.

        ``tables``: the inputs that are copied to the device once.  ``pieces``: the graph cut into regions, or None if it is
        not cut yet.
        """
        chosen = self.chosen
        notes, others = list[str](), list[str]()
        note_estimates(traced, notes.append)
        compressed = any(p.source.compressed for p in self.parameters)
        if settings.goal.pack == "auto" and goal_of_cut(traced, settings).memory is None and not compressed:
            others.append(_NO_GOAL)
        note_ops_of_others(traced, others.append)
        make = partial(run_passes, traced, settings, chosen.dump)
        stage, folder = make(pieces=pieces)
        assert stage.cut is not None
        if (able := compressible(stage.cut, self.weights)) != stage.cut.packed:
            stage, folder = make(pieces=packed(stage.cut, able))
        program = stage.program
        assert program is not None and stage.cut is not None
        self._refuse_pieces(program)
        settings = replace(settings, goal=decided(settings.goal, stage.cut))
        with dynamo_timed("chunkflow.lowering"):
            lowering = chosen.lowering if self.survey is None else "eager"
            regions = lower_regions(program, lowering, chosen.inductor, self.report, notes.append)
        for note in notes if self.survey is None else ():
            _log.warning("%s", note)
        variant = Variant(
            program=program,
            cut=stage.cut,
            settings=settings,
            regions=regions,
            notes=(*self.notes, *notes, *others),
            make=make,
            lower=partial(_lower_again, chosen),
            replan_after=0 if settings.preamble else chosen.replan_after,
            folder=folder,
            kind=chosen.device_kind(),
            poison="poison" in chosen.debugging(),
            cudagraphs=False if settings.preamble else chosen.cudagraphs,
            pin_bytes=chosen.pin_bytes(),
            advice=partial(_room_advice, program, chosen, settings.external_bytes, settings.arena, goal=settings.goal),
        )
        place = partial(start_program, self.device, self.min_bytes, chosen.pack, variant.kind, self.root)
        goal = settings.goal if settings.preamble else decided(replace(chosen.goal, hoist=False), variant.cut)
        changed = _no_other_goal if settings.preamble else _goal_of
        return CompiledGraph(
            VariantCache(variant, traced, goal), place, changed, chosen.arena, tables, chosen.pack is not False
        )

    def _refuse_pieces(self, program: Program) -> None:
        """Raise ChunkflowError if the budget is too small for this rank's pieces of all weights."""
        memory, chosen = self.settings.goal.memory, self.chosen
        if not self.pieces or memory is None:
            return
        goal, problem = self.settings.goal, program.problem
        outside = self.settings.external_bytes + self.pieces + goal.counted(problem.live_bytes)
        if memory < (least := least_memory(problem, chosen.profile(), chosen.chunk_bytes, outside)):
            raise ChunkflowError(
                f"{goal.option}={size(memory)} is too little for peers=True: this rank's pieces of weights take "
                f"{size(self.pieces + problem.piece_bytes)} of it. Give {goal.option}={enough(least)!r} or more, or "
                "place the model with peers='auto'."
            )


def _compile_whole(compiler: _GraphCompiler, traced: Traced, settings: Settings) -> CompiledGraph:
    """Compile a graph with hoisted products as one program.  Call this function only while Dynamo is not compiling."""
    with tracing(TracingContext(_fake_mode(traced.graph))):
        return compiler._graph(traced, settings, HostConstants(compiler.device))


def _fake_mode(graph: GraphModule) -> Any:
    """Return the FakeTensorMode of the fake tensors in a graph's metadata; None if there are no fake tensors."""
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def _lower_again(
    chosen: Options, program: Program, lowered: Mapping[str, LoweredRegion]
) -> Mapping[str, LoweredRegion]:
    """Lower the regions of a new program for an already compiled graph; return the code of each region by name.

    Call this function only while Dynamo is not compiling.
    ``lowered``: the code that earlier programs of the graph have lowered, by region key; it is reused.
    """
    missing = {name: region for name, region in program.regions.items() if region.info.key not in lowered}
    modes = (mode for region in missing.values() if (mode := _fake_mode(region.module)) is not None)
    with tracing(TracingContext(next(modes, None))), dynamo_timed("chunkflow.lowering"):
        fresh = lower_regions(replace(program, regions=missing), chosen.lowering, chosen.inductor)
    return {name: fresh[name] if name in fresh else lowered[r.info.key] for name, r in program.regions.items()}


def _check_options(chosen: Options, device: torch.device) -> None:
    """Raise ChunkflowError if the options do not match the device of the weights."""
    check_kind(device, chosen.device_kind())
    if chosen.arena is not None and chosen.arena.device != device:
        raise ChunkflowError(
            f"The weights are on {device}, but the arena passed as an option is on "
            f"{chosen.arena.device}: create it with chunkflow_compile.Arena({str(device)!r})."
        )
    if chosen.lowering == "tensorrt":
        check_tensorrt(device)


def _pieces_elsewhere(placement: Placement | None, buffers: Sequence[HostBuffer | None]) -> int:
    """Return the size in bytes of this rank's pieces of a model's weights, except the weights in ``buffers``.

    Returns 0 unless all weights of the model are sharded.
    """
    if placement is None or placement.peers is not True or (peers := placement.store.peers) is None:
        return 0
    others = set(placement.store.buffers).difference(buffers)
    return sum(piece_bytes(b.nbytes, peers.ranks) for b in others if b.name in peers.pending or b.source.sharded)


def _likes(placement: Placement | None, settings: Settings) -> tuple[tuple[Problem, Plan], ...]:
    """Return the problem and the plan of each running program whose settings differ from ``settings`` only in the input
    sizes."""
    if placement is None or settings.goal.policy != "chunkflow" or settings.timings is not None:
        return ()
    running = [p for p in placement.programs if not p.closed]
    return tuple(
        (p.program.problem, p.plan)
        for p in running
        if without_call_fields(p.variant.settings) == without_call_fields(settings)
    )


def _goal_of(parameters: Mapping[str, nn.Parameter]) -> Goal | None:
    """Return the goal that replan or a pipeline has set for the model that contains these weights, or None."""
    return next((p.goal for p in placements_around(parameters.values()) if p.goal is not None), None)


def _no_other_goal(_: Mapping[str, nn.Parameter]) -> None:
    """Return None, because the goal of a preamble does not change if the goal of the model changes."""


def _is_first_compilation() -> bool:
    """Whether Dynamo compiles the running function for the first time.

    Dynamo creates the guards after the backend returns.  In the first compilation, the backend has moved the weights by then,
    so the guards describe moved weights and fit all later calls.  A later compilation may be for a model that was restored,
    or for another model of the same class.  The weights of such a model move only at its first call, so the guards describe
    ordinary weights and fit all models whose weights have not moved.  From its second call on, the model fits the guards of
    the first compilation.
    """
    compilation = torch._guards.CompileContext.current_compile_id()
    return compilation is not None and compilation.frame_compile_id == 0


def run_passes(
    traced: Traced,
    settings: Settings,
    dump: str | Path | None,
    *,
    pieces: Cut | None = None,
    last: StageName = "verified",
    **other: Any,
) -> tuple[Stage, Path | None]:
    """Run the passes on an ATen graph and log every stage; return the last stage, and the folder with the dump or None.

    ``dump``: the folder in which to write the stages, or None.  ``pieces``, ``last``: see :func:`stages`.  ``other``: new
    values for fields of ``settings``.
    """
    settings = replace(settings, **other)
    run = logged(_timed(stages(traced, settings, pieces=pieces, last=last)), settings.hardware)
    return ([*run][-1], None) if dump is None else write_stages(run, dump, settings.hardware)


def _timed(run: Iterator[Stage]) -> Iterator[Stage]:
    """Yield the stages, and measure the time for each stage with torch's compilation timer."""
    for name in STAGES:
        with dynamo_timed(f"chunkflow.{name}"):
            stage = next(run, None)
        if stage is None:
            return
        yield stage


def _room_advice(program: Program, chosen: Options, outside: int, arena: int, goal: Goal) -> str:
    """Return a sentence on the minimum memory, for the error message if the arena does not fit."""
    outside += goal.counted(program.problem.live_bytes)
    least = least_memory(program.problem, chosen.profile(), chosen.chunk_bytes, outside, arena)
    budget = "No budget was given" if goal.memory is None else f"The budget was {goal.option}={size(goal.memory)}"
    return f"{budget}, and the least that this model runs in is {goal.option}={enough(least)!r}. "
