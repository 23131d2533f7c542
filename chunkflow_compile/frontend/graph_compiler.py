"""Graph compiler: plans, verifies and lowers the ATen graph that AOTAutograd makes from a Dynamo graph."""

from __future__ import annotations

import logging
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
from chunkflow_compile.frontend.model_lookup import start_program
from chunkflow_compile.frontend.preambles import preamble_of, warn_if_not_hoisted
from chunkflow_compile.frontend.preconditions import (
    note_estimates,
    note_ops_of_others,
)
from chunkflow_compile.frontend.survey import Survey
from chunkflow_compile.frontend.trace import (
    describe_graph,
    move_tables,
)
from chunkflow_compile.lowering.lower import lower_regions
from chunkflow_compile.options import Options
from chunkflow_compile.passes.cutting import goal_of_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.head_groups import in_head_groups
from chunkflow_compile.passes.graph.pack import packed
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.hoisting import hoisting_of
from chunkflow_compile.passes.names import STAGES, StageName
from chunkflow_compile.passes.pass_pipeline import Stage, stages
from chunkflow_compile.passes.placement.place import least_memory
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.passes.problem import Parameter
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.placed.index import ModelIndex
from chunkflow_compile.placed.placement import placement_of, placements_around
from chunkflow_compile.private_torch.dynamo import dynamo_timed
from chunkflow_compile.report.logs import logged
from chunkflow_compile.report.stages import write_stages
from chunkflow_compile.runtime.graph import CompiledGraph, HostConstants
from chunkflow_compile.runtime.hoisted import HoistedGraph
from chunkflow_compile.runtime.variants import Variant, VariantCache, decided
from chunkflow_compile.runtime.wrapped_calls import LoweredRegion
from chunkflow_compile.units import enough, size

_log = logging.getLogger(__name__)

# The note for users who pass pack="auto" without a budget.
_NO_GOAL = (
    "pack='auto' packs nothing: which weights to pack depends on a budget, and neither memory= nor weight_memory= was given. "
    "With memory='8GiB', or pack=True, the weights have 0.76 of their bytes in host memory and on the link"
)


@dataclass(frozen=True, kw_only=True)
class GraphCompiler:
    """Plans, verifies and lowers the ATen graph that AOTAutograd makes from a Dynamo graph.

    ``weights``: the weights by their parameter names.  ``index``: the ModelIndex of the model that contains them.
    ``report``: a function that is called with the name of each stage of the compilation.  ``expected``: the goal that the
    owner of the model's placement expects to set, or None (see :class:`Placement`).  ``pieces``: the bytes that this rank
    stores for the sharded weights which only other parts of the model read; it stores one shard (*piece*) of each such
    weight.  ``slow``: see :class:`Traced`.  ``root``: a function that returns the model, or None.  ``by_kind``: see
    :func:`chunkflow`.  ``notes``: notes for the user on decisions that were made before planning.  ``survey``: the survey
    (survey.py) during which the graph is compiled, or None if the graph is compiled for an ordinary call.  ``agreed``: an
    empty list before the ranks have agreed on the number of groups of heads (exchange_groups.py), and afterwards a list with
    one pair: this number, and notes about it.  If this rank compiles the graph again at fixed sizes, it uses the same number
    without asking the other ranks again.
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
        """Compile the graph as one program.  If products are hoisted, compile the preamble and the rest of the graph as two
        programs instead."""
        with dynamo_timed("chunkflow.hoist"):
            hoisting = hoisting_of(traced, replace(self.settings, goal=self._expected_goal))
        unhoisted = replace(self.settings, goal=replace(self.settings.goal, hoist=False))
        if hoisting is None:
            warn_if_not_hoisted(traced, self.settings, self.by_kind)
            return self._graph(traced, unhoisted, tables)
        halves, moved = hoisting.halves, HostConstants(self.device)
        make = partial(self._graph, halves.preamble, hoisting.preamble, moved, hoisting.preamble_cut)
        # In a survey (survey.py), the graph gets a new preamble instead of one that the model already has, because a graph
        # that is compiled in a survey never runs.
        placement = placement_of(self.index.root) if self.index.root is not None and self.survey is None else None
        preamble = preamble_of(placement, hoisting, self.chosen, traced.repeats is not None, make)
        main = self._graph(halves.main, replace(hoisting.main, goal=unhoisted.goal), moved)
        # keep only weak references, so that compiled code does not keep the model alive
        later = replace(self, weights=WeakValueDictionary(self.weights), index=ModelIndex(None, {}, {}), report=str)
        whole = partial(_compile_whole, later, traced, unhoisted)
        return HoistedGraph(aten, halves, preamble, main, tables, whole)

    @property
    def _expected_goal(self) -> Goal:
        """The goal in ``settings``.  If this goal has neither a budget nor a slowdown, it gets the budget or slowdown and the
        policy of ``expected`` (:meth:`Goal.aimed_at`)."""
        goal = self.settings.goal
        return goal.aimed_at(self.expected) if goal.memory is None and goal.slowdown is None else goal

    def _describe(self, aten: GraphModule) -> Traced:
        """Return the ATen graph together with the data that planning needs and that the graph does not contain."""
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

        ``tables``: the inputs that the program copies to the device only once.  ``pieces``: the graph cut into regions, or
        None if it is not cut yet.
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
        """Raise ChunkflowError if the budget is too small for the program together with the pieces (shards) of weights that
        this rank stores for the other parts of the model."""
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


def _compile_whole(compiler: GraphCompiler, traced: Traced, settings: Settings) -> CompiledGraph:
    """Compile a graph as one program without hoisting, after calls have shown that hoisting does not pay off.

    Call this function only while Dynamo is not compiling.
    """
    with tracing(TracingContext(_fake_mode(traced.graph))):
        return compiler._graph(traced, settings, HostConstants(compiler.device))


def _fake_mode(graph: GraphModule) -> Any:
    """Return the FakeTensorMode of the fake tensors in a graph's metadata, or None if there are no fake tensors."""
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def _lower_again(
    chosen: Options, program: Program, lowered: Mapping[str, LoweredRegion]
) -> Mapping[str, LoweredRegion]:
    """Lower the regions of a new program for a graph that was compiled before.  Return the code of each region by name.

    Call this function only while Dynamo is not compiling.
    ``lowered``: the code of all regions that were already lowered for this graph, by region key.  This code is reused.
    """
    missing = {name: region for name, region in program.regions.items() if region.info.key not in lowered}
    modes = (mode for region in missing.values() if (mode := _fake_mode(region.module)) is not None)
    with tracing(TracingContext(next(modes, None))), dynamo_timed("chunkflow.lowering"):
        fresh = lower_regions(replace(program, regions=missing), chosen.lowering, chosen.inductor)
    return {name: fresh[name] if name in fresh else lowered[r.info.key] for name, r in program.regions.items()}


def _goal_of(parameters: Mapping[str, nn.Parameter]) -> Goal | None:
    """Return the goal that replan or a pipeline has set for the model that contains ``parameters``, or None if no goal was
    set."""
    return next((p.goal for p in placements_around(parameters.values()) if p.goal is not None), None)


def _no_other_goal(_: Mapping[str, nn.Parameter]) -> None:
    """Return None, because the goal of a preamble does not change if the goal of the model changes."""


def run_passes(
    traced: Traced,
    settings: Settings,
    dump: str | Path | None,
    *,
    pieces: Cut | None = None,
    last: StageName = "verified",
    **other: Any,
) -> tuple[Stage, Path | None]:
    """Run the passes on an ATen graph and log every stage.  Return the last stage, and the folder of its dump or None.

    ``dump``: the folder to which the stages are written, or None for no dump.  ``pieces``, ``last``: see :func:`stages`.
    ``other``: new values for fields of ``settings``.
    """
    settings = replace(settings, **other)
    run = logged(_timed(stages(traced, settings, pieces=pieces, last=last)), settings.hardware)
    return ([*run][-1], None) if dump is None else write_stages(run, dump, settings.hardware)


def _timed(run: Iterator[Stage]) -> Iterator[Stage]:
    """Yield the stages of ``run``, and measure the time for each stage with torch's compilation timer."""
    for name in STAGES:
        with dynamo_timed(f"chunkflow.{name}"):
            stage = next(run, None)
        if stage is None:
            return
        yield stage


def _room_advice(program: Program, chosen: Options, outside: int, arena: int, goal: Goal) -> str:
    """Return a sentence that states the minimum memory of a program.

    The sentence is part of the error message if the device does not have enough memory.
    """
    outside += goal.counted(program.problem.live_bytes)
    least = least_memory(program.problem, chosen.profile(), chosen.chunk_bytes, outside, arena)
    budget = "No budget was given" if goal.memory is None else f"The budget was {goal.option}={size(goal.memory)}"
    return f"{budget}, and the least that this model runs in is {goal.option}={enough(least)!r}. "
