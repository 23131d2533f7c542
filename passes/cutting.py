"""Cutting: chooses the cut of a traced graph according to the settings of the passes.  The cut determines the number of
regions, which weights are packed and which are sharded, and into how many slices and groups of heads blocks are divided."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain

from chunkflow_compile.passes.graph.coarsen import Groups, apart, grouped, merged
from chunkflow_compile.passes.graph.discover import Discovery, discover
from chunkflow_compile.passes.graph.head_groups import in_head_groups
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.regions import Cut, cut
from chunkflow_compile.passes.graph.rotary import in_real_arithmetic
from chunkflow_compile.passes.graph.shard import on_peers, streamable
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.placement.choice import peers_of, planned_for, to_fewer_peers, to_pack, to_peers
from chunkflow_compile.passes.placement.coarsest import candidates, coarsest, judged
from chunkflow_compile.passes.placement.exchanging import GroupChoice, choose_groups, groups_of_problem
from chunkflow_compile.passes.placement.splitting import best_split, split_into, splits
from chunkflow_compile.passes.placement.timeline import Simulator

from .goal import Goal
from .names import DEFAULT_GROUP_BYTES
from .plan import Plan
from .planning import Settings, make_plan, minimum_budget
from .problem import Problem
from .step import Scheduler


def make_cut(traced: Traced, group_bytes: int | None = None, disabled: Collection[str] = ()) -> Cut:
    """Discover the weights of a traced graph, and cut the graph into regions.  ``group_bytes``: size of the groups of
    weights between which the graph is cut, or None for the default size.  ``disabled``: names of the optional passes that do
    not run."""
    if "rotary" not in disabled:
        traced = in_real_arithmetic(traced)
    return _cut(traced, discover(traced), group_bytes, disabled)


def _cut(
    traced: Traced,
    discovery: Discovery,
    group_bytes: int | None,
    disabled: Collection[str],
    groups: Groups = (),
) -> Cut:
    """Cut a graph, using the optional passes that are not disabled.  ``groups``: see :func:`cut`."""
    return cut(
        traced,
        discovery,
        DEFAULT_GROUP_BYTES if group_bytes is None else group_bytes,
        dissolve_views="views" not in disabled,
        recompute="recompute" not in disabled,
        groups=groups,
    )


def choose_cut(traced: Traced, settings: Settings) -> Cut:
    """Cut a traced graph according to ``settings``.  By default, the cut has as few regions as a good plan needs
    (placement/coarsest.py).

    This function also chooses the weights to compress and the weights to shard (:func:`_packed_weights`,
    :func:`_peer_weights`).  No other function chooses them.  Raises ChunkflowError if ``settings`` require sharded weights or
    divided exchanges, and these are not possible.
    """
    groups = settings.goal.exchange_groups
    if groups == "auto":
        groups = groups_for(traced, settings).groups
    return _cut_undivided(in_head_groups(traced, groups) if groups else traced, settings)


def groups_for(traced: Traced, settings: Settings) -> GroupChoice:
    """Choose the number of groups of heads into which the exchanges of a graph are divided.  If ``settings`` contain a plan
    or timings, return the number of groups for which the plan or the timings were made."""
    hardware, given = settings.hardware, settings.plan or settings.timings
    if given is not None:
        return groups_of_problem(traced, given.problem, lambda graph: _cut_undivided(graph, settings).problem.digest)

    def resident_s(graph: Traced) -> float:
        problem = whole_blocks(make_cut(graph, disabled=settings.disabled), settings).problem
        simulator = Simulator(problem, hardware, settings.chunk_bytes)
        return simulator.play(Scheduler(problem, settings.chunk_bytes).step({}), spans=False).step_s

    def planned(graph: Traced) -> Plan:
        problem = _cut_undivided(graph, settings).problem
        return plans_of(graph, settings, problem)(problem)

    return choose_groups(traced, resident_s, planned)


def plans_of(traced: Traced, settings: Settings, finest: Problem) -> Callable[[Problem], Plan]:
    """Return a function that plans the problem of any cut of a graph.  With it, the caller compares cuts by their plans (see
    :func:`judged`).  ``finest``: problem of the graph's finest cut."""

    def plan(problem: Problem, *, goal: Goal, ends: Sequence[int] | None = None) -> Plan:
        one = replace(settings, goal=goal, part=False)
        return make_plan(problem, one, residents_in_arena=traced.repeats is not None, ends=ends)

    return judged(finest, traced.repeats, settings.goal, plan)


def _cut_undivided(traced: Traced, settings: Settings) -> Cut:
    """Cut a graph according to ``settings``, but do not divide its exchanges into groups of heads."""
    finest, repeats = make_cut(traced, settings.group_bytes, settings.disabled), traced.repeats
    budget = goal_of_cut(traced, settings).memory is not None
    planned = plans_of(traced, settings, finest.problem)
    # cuts of a graph are not compared by their plans if the plan of the graph covers neither a whole model nor several
    # repetitions of a block
    alone = (settings.part and repeats is None) or settings.preamble
    judge = None if alone or not budget else planned
    finest = on_peers(finest, _peer_weights(finest, settings, None if alone else planned), settings.ranks)
    names = _packed_weights(finest, settings, judge)
    finest = packed(finest, names)
    if alone:
        return finest
    return _in_slices(_coarse(finest, settings, names, planned), finest, settings, planned)


def _coarse(finest: Cut, settings: Settings, names: frozenset[str], planned: Callable[[Problem], Plan]) -> Cut:
    """Return the cut with as few regions as a good plan needs (placement/coarsest.py).  ``names``: names of the packed
    weights.  ``planned``: result of :func:`plans_of`."""
    if settings.group_bytes is not None:
        return finest
    before = _cut_before(finest, settings)
    budget = goal_of_cut(finest.traced, settings).memory is not None
    groups = before or coarsest(finest, budget, planned)
    if len(groups) == len(finest.regions):
        return finest
    again = _grouped(finest, groups, settings)
    if settings.goal.peers == "auto" and before is None and not _sharded_now(finest.traced):
        again = on_peers(again, to_fewer_peers(again, planned, settings.ranks, budget), settings.ranks)
    return packed(again, names)


def _grouped(finest: Cut, groups: Groups, settings: Settings) -> Cut:
    """Merge the regions of each group in ``groups`` into one region, and return the resulting cut.  No weight is packed in
    this cut."""
    discovery = (finest.raw or finest).discovery
    return _cut(finest.traced, discovery, settings.group_bytes, settings.disabled, groups)


def whole_blocks(finest: Cut, settings: Settings) -> Cut:
    """Return the cut in which each block without collectives is one region.  No weight is packed in this cut."""
    return _grouped(finest, grouped(finest, None), settings)


def _in_slices(chosen: Cut, finest: Cut, settings: Settings, planned: Callable[[Problem], Plan]) -> Cut:
    """Split the blocks of a cut into slices of their tokens, if ``settings`` ask for it or the budget requires it.
    Otherwise return ``chosen``.

    ``chosen``: cut without slices.  ``finest``: finest cut, from which ``chosen`` was made.  ``planned``: result of
    :func:`plans_of`.
    """
    wanted, goal = settings.goal.split, goal_of_cut(chosen.traced, settings)
    budget, plan = goal.activations and goal.memory is not None, settings.plan
    if wanted == 1 or (wanted == "auto" and not budget and (plan is None or plan.problem == chosen.problem.digest)):
        return chosen

    def form(cut: Cut) -> Cut:
        return packed(cut, chosen.packed & packable(cut))

    if wanted != "auto":
        return form(split_into(whole_blocks(finest, settings), wanted))
    cuts = chain([chosen], map(form, splits(whole_blocks(finest, settings))))
    if plan is not None:
        return next((cut for cut in cuts if cut.problem.digest == plan.problem), chosen)
    return best_split(cuts, lambda cut: planned(cut.problem), lambda cut: minimum_budget(cut.problem, settings))


def goal_of_cut(traced: Traced, settings: Settings) -> Goal:
    """Return the goal for which a graph is cut.  If the graph is a block that is compiled separately, return the common goal
    of all blocks that the graph stands for."""
    return settings.goal if traced.repeats is None else traced.repeats.goal


def _packed_weights(finest: Cut, settings: Settings, planned: Callable[[Problem], Plan] | None) -> frozenset[str]:
    """Return the names of the weights to pack according to ``settings``.  If some weights of the model are already packed,
    and ``settings`` neither name weights nor require packing, return the packed weights.  ``planned``: result of
    :func:`plans_of`, or None if cuts are not compared by their plans."""
    pack = settings.goal.pack
    if not isinstance(pack, str | bool):
        return pack & packable(finest)
    if pack is not True and (now := {p.name for p in finest.traced.parameters if p.source.compressed}):
        return packable(finest) & now
    if not pack:
        return frozenset()
    if settings.plan is not None:
        return planned_for(finest, settings.plan)
    if pack is True:
        return packable(finest)
    return frozenset() if planned is None or settings.timings is not None else to_pack(finest, planned)


def _peer_weights(finest: Cut, settings: Settings, planned: Callable[[Problem], Plan] | None) -> frozenset[str]:
    """Return the names of the weights to shard according to ``settings``.  If some weights of the model are already sharded,
    and ``settings`` do not name weights, return the sharded weights.  ``planned``: result of :func:`plans_of`, or None if
    cuts are not compared by their plans."""
    peers = settings.goal.peers
    if not isinstance(peers, str | bool):
        return peers & streamable(finest)
    if now := _sharded_now(finest.traced):
        return streamable(finest) & now
    if not peers:
        return frozenset()
    if peers is True:
        settings.hardware.check_peers(settings.ranks)
    elif settings.hardware.why_no_peers(settings.ranks):
        return frozenset()
    if settings.plan is not None:
        return peers_of(finest, settings.plan)
    if peers is True:
        return streamable(finest)
    if planned is None or settings.timings is not None:
        return frozenset()
    budget = goal_of_cut(finest.traced, settings).memory is not None
    return to_peers(finest, planned, settings.ranks, budget, settings.hardware.rate_during_pulls(settings.ranks))


def _sharded_now(traced: Traced) -> frozenset[str]:
    return frozenset(p.name for p in traced.parameters if p.source.sharded)


def _cut_before(finest: Cut, settings: Settings) -> Groups | None:
    """Return the groups of regions with which the graph was cut before: for the plan or the timings in ``settings``, or for a
    problem in ``settings.likes`` that has the same structure.  If no such groups are found, return None or, if ``settings``
    contain a plan or timings, one group per region."""
    given = settings.plan or settings.timings
    structures = [problem.structure for problem, _ in settings.likes]
    if given is None and not structures:
        return None
    for groups in (*candidates(finest), apart(finest)):
        problem = merged(finest, groups)
        if (given is not None and problem.digest == given.problem) or problem.structure in structures:
            return groups
    return None if given is None else apart(finest)
