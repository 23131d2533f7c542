"""Variants: the results of compiling a graph.  There is one variant for each pair of an input size and a goal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.pack import packed
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.shard import on_peers
from chunkflow_compile.passes.graph.symbolic_sizes import estimated, hints, symbol_nodes
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.pass_pipeline import Stage
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.weights.drive import in_files

from .cuda_graphs import CudaGraphsWanted
from .device import DeviceKind
from .wrapped_calls import LoweredRegion

# The maximum number of input sizes whose plans are kept.  If there are more sizes, the least recently used plan is dropped.
# This number is enough for twenty text lengths of unpadded prompts and a dozen resolutions.  For each size, the plan is kept.
# If blocks are compiled separately, one program per block is kept as well.
KEPT_SIZES = 32

# The maximum number of goals for which a graph keeps variants.  If there are more goals, the oldest variant is dropped.
# Models of one class share a graph, and each model may have its own goal.
KEPT_GOALS = 4

Sizes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """The result of compiling a graph for one goal and one size of its inputs.

    ``regions``: name of a submodule of the program -> the lowered code of this region.

    ``cut``, ``settings``: the cut graph and the settings from which the program was made.  The goal in the settings contains
    the names of the compressed weights and of the sharded weights.  ``make``: a function that runs the passes again.  Its
    keyword arguments are another cut graph (``pieces``) or other settings.  It returns the last :class:`Stage` and the folder
    of the dump.  ``lower``: a function that lowers the regions of a program.  Its second argument is a mapping: region key ->
    lowered code that can be reused.

    ``replan_after``: the number of warm steps after which the program is re-planned from measured times; 0 means never.
    ``folder``: the folder that measurements are written to, or None.  ``kind``: the :class:`DeviceKind` that the programs
    need.  ``poison``: see :class:`Target`.  ``cudagraphs``: the value of the option with this name.  ``pin_bytes``: the
    maximum bytes of host memory to pin; None means as many as the machine allows.  ``notes``: sentences for the user about
    the compilation.  ``advice``: a function that returns a sentence for the error that is raised if the device does not have
    enough memory; the sentence says which plan would fit.
    """

    program: Program
    cut: Cut
    settings: Settings
    regions: Mapping[str, LoweredRegion]
    make: Callable[..., tuple[Stage, Path | None]]
    lower: Callable[[Program, Mapping[str, LoweredRegion]], Mapping[str, LoweredRegion]]
    replan_after: int = 0
    folder: Path | None = None
    kind: DeviceKind
    poison: bool = False
    cudagraphs: CudaGraphsWanted = False
    pin_bytes: int | None = None
    notes: tuple[str, ...] = ()
    advice: Callable[..., str] = str

    @property
    def packed(self) -> frozenset[str]:
        """The names of the compressed weights."""
        return self.cut.packed

    @property
    def on_peers(self) -> frozenset[str]:
        """The names of the weights that are sharded over the devices of the ranks."""
        return self.cut.on_peers

    @property
    def in_files(self) -> frozenset[str]:
        """The names of the weights that, according to the plan, are in files."""
        return frozenset(w.name for w in self.program.problem.weights if w.source.file)

    @property
    def sources(self) -> Mapping[str, frozenset[str]]:
        """The names of the compressed weights (key ``pack``) and of the sharded weights (key ``peers``).  The keys are names
        of fields of :class:`Goal`."""
        return {"pack": self.packed, "peers": self.on_peers}

    @property
    def verified(self) -> bool:
        """Whether programs are verified, each by itself and together with the other programs in its arena."""
        return self.settings.enables("verify")

    def remade(self, **settings: Any) -> Variant:
        """Return the variant for other settings.  Regions are compiled again only if the new goal compresses other weights
        than the present goal.

        Raises ChunkflowError if no plan meets the settings.
        """
        settings = {"likes": (), **settings}
        goal: Goal = settings.get("goal", self.settings.goal)
        assert isinstance(goal.pack, frozenset) and isinstance(goal.peers, frozenset)
        same, regions = goal.pack == self.packed, self.regions
        pieces = on_peers(self.cut if same else packed(self.cut, goal.pack), goal.peers, self.settings.ranks)
        stage, folder = self.make(pieces=pieces, **settings)
        assert stage.program is not None
        if not same:
            lowered = {region.info.key: self.regions[name] for name, region in self.program.regions.items()}
            regions = self.lower(stage.program, lowered)
        advice = partial(self.advice, goal=goal) if "goal" in settings else self.advice
        make = partial(self.make, **settings)
        variant = replace(self, program=stage.program, settings=replace(self.settings, **settings))
        return replace(variant, cut=pieces, regions=regions, folder=folder, make=make, advice=advice, replan_after=0)

    def reading(self, names: frozenset[str]) -> Variant:
        """Return the variant to use if the weights ``names`` are in files.  The program is planned again, but no region
        is compiled.

        Returns this variant unchanged in three cases: the plan already expects all weights in ``names`` to be in files, the
        program is planned as part of a cycle, or the user gave the plan.  In the last two cases, the plan may expect some of
        these weights in host memory.  Each copy of such a weight then reads the file directly.
        """
        if names <= self.in_files or self.settings.part or self.settings.plan is not None:
            return self
        pieces = in_files(self.cut, names)
        stage, folder = self.make(pieces=pieces)
        assert stage.program is not None
        return replace(self, program=stage.program, cut=pieces, folder=folder)

    def at(self, traced: Traced) -> Variant:
        """Return the variant for other input sizes of the same graph: a new plan for the same regions.

        Raises ChunkflowError if no plan meets the settings.
        """
        pieces, likes = self.cut.at(traced), ((self.program.problem, self.program.plan),)
        if self.folder is None:
            stage, _ = self.make(pieces=pieces, likes=likes, last="planned")
            assert stage.plan is not None
            if stage.plan.placement == self.program.plan.placement:  # the transfers are unchanged, and were verified
                program = replace(self.program, problem=pieces.problem, plan=stage.plan)
                return replace(self, program=program, cut=pieces)
            likes = ((pieces.problem, stage.plan),)
        stage, folder = self.make(pieces=pieces, likes=likes)
        assert stage.program is not None
        return replace(self, program=stage.program, cut=pieces, folder=folder)


@dataclass(eq=False)
class ActiveVariant:
    """Holds the variant that the next call of one model runs.  This object outlives the programs of the model.

    ``by_itself``: whether the variant was chosen by automatic re-planning (``replan_after``), not by the user.  In this
    case, an error that occurs when the variant is started is logged instead of raised.
    """

    variant: Variant
    by_itself: bool = False

    def run(self, variant: Variant, by_itself: bool) -> None:
        """Make the next call run ``variant``.  ``by_itself``: see :class:`ActiveVariant`."""
        self.variant, self.by_itself = variant, by_itself

    def fall_back(self, variant: Variant) -> None:
        """Make the next call run the previous ``variant`` again, and never re-plan it automatically."""
        self.variant = replace(variant, replan_after=0)

    def adapt(self, variant: Variant) -> None:
        """Make the next call run ``variant``, which has the same goal as the present variant, but is planned for the way in
        which the weights are stored now (for example, compressed or in files)."""
        self.variant = variant


class VariantCache:
    """The variants of one graph, indexed by input sizes and by goal.  If the programs for two sizes are equal, both sizes
    share one variant."""

    def __init__(self, first: Variant, traced: Traced, goal: Goal) -> None:
        """``first``: the variant for the input sizes for which the graph was compiled.  ``goal``: the goal given by the
        options."""
        self.first = first
        self._goal = goal
        self._firsts = {first.settings.goal: first}
        self._traced = traced
        inputs = [n for n in traced.graph.graph.nodes if n.op == "placeholder"]
        position = {node: i for i, node in enumerate(inputs)}
        self._symbols = {name: position[n] for name, n in symbol_nodes(traced.graph).items() if n in position}
        values = hints(traced.graph)
        # -1 stands for a data-dependent size, which has no value at compile time
        begun = tuple(values.get(name, -1) for name in self._symbols)
        self._variants = {begun: {**self._firsts}}
        self._same = {begun: begun}
        self._clock = itertools.count()
        self._used = {begun: next(self._clock)}  # not an OrderedDict, because other threads read this dict

    @property
    def graph(self) -> GraphModule:
        """The ATen graph."""
        return self._traced.graph

    def sizes(self, inputs: Sequence[Any]) -> Sizes | None:
        """Return the key under which the variants for a call with ``inputs`` are kept; None if there is no variant for the
        sizes of these inputs yet."""
        if not self._symbols:
            return ()
        same = self._same.get(tuple(inputs[position] for position in self._symbols.values()))
        if same is not None:
            self._used[same] = next(self._clock)
        return same

    def plan(self, inputs: Sequence[Any], changed: Goal | None) -> None:
        """Make a plan for the sizes of a call.  If there are then more than KEPT_SIZES plans, drop the least recently used
        plan.

        ``changed``: the goal that ``replan`` or a pipeline has set for the model, or None.  Raises ChunkflowError if no plan
        meets the goal.
        """
        goal = self._goal.aimed_at(changed)
        sizes = tuple(inputs[position] for position in self._symbols.values())
        values = estimated(dict(zip(self._symbols, sizes, strict=True)), self._traced.unknown)
        variant = _variant_for(goal, self._firsts).at(replace(self._traced, sizes=values))
        others = ((size, variants[goal]) for size, variants in self._variants.items() if goal in variants)
        same = (size for size, other in others if other.program.same_as(variant.program))
        self._same[sizes] = size = next(same, sizes)
        self._used[size] = next(self._clock)
        if size == sizes:
            self._variants[sizes] = {goal: variant}
        if len(self._variants) > KEPT_SIZES:
            oldest = min(self._variants, key=lambda size: self._used[size])
            del self._variants[oldest], self._used[oldest]
            self._same = {other: size for other, size in self._same.items() if size != oldest}

    def variant(self, sizes: Sizes, changed: Goal | None, **form: frozenset[str]) -> Variant:
        """Return the variant for ``sizes``, which :meth:`sizes` has returned.  ``changed``: see :meth:`plan`.  ``form``: the
        keyword arguments ``pack`` (the names of the compressed weights) and ``peers`` (the names of the sharded weights).
        Raises ChunkflowError if no plan meets the goal."""
        goal = self._goal.aimed_at(changed)
        return _variant_for(
            replace(goal, pack=form.get("pack", goal.pack), peers=form.get("peers", goal.peers)), self._variants[sizes]
        )

    def __contains__(self, sizes: Sizes) -> bool:
        return sizes in self._variants


def _variant_for(goal: Goal, variants: dict[Goal, Variant]) -> Variant:
    """Return the variant for a goal.  If there is no such variant yet, make it from the variant for another goal."""
    if goal not in variants:
        variant = next(iter(variants.values())).remade(goal=goal, plan=None)
        if len(variants) >= KEPT_GOALS:
            del variants[next(iter(variants))]
        variants[goal] = variant
    return variants[goal]


def decided(goal: Goal, cut: Cut) -> Goal:
    """Return the goal with the choices that were made for ``cut``: the names of the compressed weights, the names of the
    sharded weights, and the number of groups of attention heads.  The given goal may leave these choices open."""
    groups = cut.problem.exchange_groups
    return replace(goal, pack=cut.packed, peers=cut.on_peers, exchange_groups=groups > 1 and groups)


def without_call_fields(settings: Settings) -> Settings:
    """Return the settings without the fields that may differ between calls, or between the input sizes of one call."""
    goal = replace(settings.goal, pack=False, peers=False, hoist=False, exchange_groups=False)
    return replace(settings, likes=(), part=False, external_bytes=0, arena=0, table=0, tables=0, goal=goal)
