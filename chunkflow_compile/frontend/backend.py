"""The backend: ``torch.compile(model, backend="chunkflow")``.

The backend turns a Dynamo graph into a :class:`CompiledGraph` without reading the values of weights.  First it describes the
parameters among the inputs of the graph.  Then it cuts, plans, rewrites and verifies the ATen graph, which AOTAutograd makes
from the Dynamo graph.  Finally it lowers the regions of the ATen graph.  The backend moves weights only after all these steps
have succeeded.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from chunkflow_compile.frontend.graph_compiler import GraphCompiler
from chunkflow_compile.frontend.model_lookup import index_of, move_weights
from chunkflow_compile.frontend.module_search import blocks_around
from chunkflow_compile.frontend.preconditions import (
    bytes_outside,
    device_of,
    fix_sizes,
    guard_hooks,
    is_part,
    lower_without_weights,
    note_graph_break,
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
from chunkflow_compile.frontend.survey import Unplanned, survey_of
from chunkflow_compile.frontend.trace import (
    NO_MODULE,
    describe_parameters,
    inline_regions,
    lower_to_aten,
    slow_inputs,
    weights_among,
)
from chunkflow_compile.hardware.caches import check_compile_cache
from chunkflow_compile.lowering.tensorrt import check_tensorrt
from chunkflow_compile.option_parsing import parse_options
from chunkflow_compile.options import Options
from chunkflow_compile.passes.errors import BudgetError, ChunkflowError, first_line
from chunkflow_compile.passes.graph.symbolic_sizes import symbols_of
from chunkflow_compile.passes.pieces import piece_bytes
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.placed.index import ModelIndex
from chunkflow_compile.placed.offload import large_weights, refuse_accelerate
from chunkflow_compile.placed.placement import Placement, placement_of, progress_of
from chunkflow_compile.placed.streamable import refuse_fully_sharded
from chunkflow_compile.private_torch.dynamo import BackendCompilerFailed, dynamo_timed
from chunkflow_compile.private_torch.inductor import InductorError
from chunkflow_compile.releases import warn_if_untested
from chunkflow_compile.runtime.device import check_device, check_kind
from chunkflow_compile.runtime.graph import CompiledGraph, awaited
from chunkflow_compile.runtime.hoisted import HoistedGraph
from chunkflow_compile.runtime.variants import without_call_fields
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of

_log = logging.getLogger(__name__)


class CompilationError(ChunkflowError, BackendCompilerFailed):
    """A ChunkflowError during compilation.

    Dynamo wraps errors of backends in BackendCompilerFailed, and adds the name of the backend and advice to report a bug.  A
    CompilationError is a BackendCompilerFailed already, so Dynamo raises it unchanged.  Its message is the message of the
    original error.
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
    """Compile a Dynamo graph, and return the function that Dynamo should call instead; torch.compile calls this backend.

    A graph without weights is lowered without a plan, because there is nothing to stream.
    ``options``, ``mode``: the arguments that the user has passed to torch.compile.  ``name``: not used; torch passes this
    argument since version 2.15.
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
        warn_of_small_weights(index.root, min_bytes)  # for a pipeline, compile() has already given this warning
    if index.root is not None and (placed is not None or _is_first_compilation()):
        wanted = [weights[p.key] for p in compiler.parameters if p.name in offloaded]
        if part and wanted:
            # Also move the weights of the other blocks.  Otherwise Dynamo's guards for this block, which expect offloaded
            # weights, would fail for the other blocks.
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
) -> GraphCompiler:
    """Return the compiler for the ATen graph that AOTAutograd will make from a Dynamo graph.  Raises ChunkflowError if the
    graph cannot be compiled."""
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
    return GraphCompiler(
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
    graph: GraphModule, inputs: Sequence[Any], compiler: GraphCompiler, fixed: set[tuple[str, ...]]
) -> tuple[Callable[..., Any], CompiledGraph | HoistedGraph]:
    """Compile a graph with dynamic shapes, if possible; return the function that Dynamo should call, and the CompiledGraph or
    HoistedGraph that this function calls.

    If Inductor fails on dynamic shapes, the graph is compiled only for the input sizes of the current call.  The same happens
    if whole blocks do not fit in the budget, because blocks can be split into slices only at fixed sizes.
    ``fixed``: a set with one tuple for each graph that is compiled at fixed sizes; the tuple contains the names of the
    graph's weights.  If this function compiles ``graph`` at fixed sizes, it adds the tuple for ``graph``.
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
            int(value)  # makes Dynamo add a guard on this size
    return lower_to_aten(graph, inputs, compiler)


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
    """Return how many bytes this rank stores for the sharded weights of a model, not counting the weights in ``buffers``.

    The rank stores one shard (*piece*) of each weight.  Returns 0 unless all weights of the model are sharded.
    """
    if placement is None or placement.peers is not True or (peers := placement.store.peers) is None:
        return 0
    others = set(placement.store.buffers).difference(buffers)
    return sum(piece_bytes(b.nbytes, peers.ranks) for b in others if b.name in peers.pending or b.source.sharded)


def _likes(placement: Placement | None, settings: Settings) -> tuple[tuple[Problem, Plan], ...]:
    """Return the problem and the plan of each program that runs on a placed model and has settings like ``settings``.

    Settings are alike if they are equal in all fields that :func:`without_call_fields` keeps.
    """
    if placement is None or settings.goal.policy != "chunkflow" or settings.timings is not None:
        return ()
    running = [p for p in placement.programs if not p.closed]
    return tuple(
        (p.program.problem, p.plan)
        for p in running
        if without_call_fields(p.variant.settings) == without_call_fields(settings)
    )


def _is_first_compilation() -> bool:
    """Whether Dynamo compiles the current function for the first time.

    Dynamo creates the guards of a compilation after the backend has returned.  In the first compilation, the backend moves
    the weights before it returns, so the guards describe moved weights and hold in all later calls.

    If Dynamo compiles the function again, the model may be a restored one, or another model of the same class.  Then the
    backend does not move the weights; they move when the compiled graph is first called.  So the guards describe weights
    that have not moved, and hold for the first call of every such model.  When such a model is called a second time, its
    weights have moved, and the guards of the first compilation hold.
    """
    compilation = torch._guards.CompileContext.current_compile_id()
    return compilation is not None and compilation.frame_compile_id == 0
