"""Pipeline: run the passes in order.  Each row below contains a stage, its result, and the passes that produce it.

traced      the ATen graph, its parameters and process groups      tracing, outside this package
regions     regions of pure compute between collectives            head groups, rotary, discover, cut, peers, split, pack
planned     a home, a slot and windows for every weight            place, unless a plan is passed
rewritten   the program with its transfer ops                      rewrite
verified    the same program, proved safe                          verify
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.graph.coarsen import Groups, apart, grouped, merged
from chunkflow_compile.passes.graph.discover import discover
from chunkflow_compile.passes.graph.head_groups import in_head_groups
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.peers import on_peers, streamable
from chunkflow_compile.passes.graph.regions import Cut, cut
from chunkflow_compile.passes.graph.rotary import in_real_arithmetic
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.placement.choice import peers_of, planned_for, to_fewer_peers, to_pack, to_peers
from chunkflow_compile.passes.placement.coarsest import candidates, coarsest, judged
from chunkflow_compile.passes.placement.exchanging import GroupChoice, choose_groups, groups_of_problem
from chunkflow_compile.passes.placement.place import least_memory, place
from chunkflow_compile.passes.placement.splitting import best_split, split_into, splits
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.program.contracts import check_cut, check_plan, check_traced
from chunkflow_compile.passes.program.cycle import Call, Cycle, ends_of, problem_of, write
from chunkflow_compile.passes.program.rewrite import Program, rewrite
from chunkflow_compile.passes.program.verify import Proof, verify

from .errors import BudgetError, ChunkflowError
from .goal import DEFAULT_GOAL, Goal
from .hardware import Hardware
from .names import DEFAULT_CHUNK_BYTES, DEFAULT_GROUP_BYTES, OPTIONAL_PASSES, StageName
from .plan import Plan
from .problem import Problem
from .step import Scheduler

# With "auto", each call waits for all its copies at its end only if the predicted step becomes longer by less than this
# share.  If the host is the bottleneck, launching a call as one CUDA graph saves many times as much.
MOST_JOIN_LOSS = 0.01


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the passes.  Sizes are in bytes.

    ``goal``: objective of plans, unless a ``plan`` is given.  ``group_bytes``: size of the groups of weights at which
    the graph is cut, or None for the coarsest cut that is as good as the finest.  ``part``, ``outside``, ``arena``:
    arguments of place.  ``likes``: problems and their plans; a problem with the same structure as one of them gets the
    same placement.  ``joined``: whether the plan has joins, so that each call can be one CUDA graph; "auto" to add
    joins only if they cost little, see :data:`MOST_JOIN_LOSS`.  If there are several calls, True means "auto".
    ``preamble``: whether the graph is the preamble of a model (hoisting.py), which runs once for many steps; it is
    planned like a ``part``, and never as a call of a cycle.  ``table``: bytes of this block's table of rows, if the
    block is hoisted separately; ``tables``: total bytes of such tables for all blocks with its block type.  Unlike the
    table of a whole model, these tables are not included in ``outside``, because a cycle contains several block types.
    ``ranks``: number of ranks over whose devices weights may be sharded, or 0 if unknown; if ``goal.peers`` is "auto",
    no weights are sharded over ranks that cannot pull from each other (:meth:`Hardware.why_no_peers`).  ``disabled``:
    names of :data:`OPTIONAL_PASSES`.
    """

    hardware: Hardware
    goal: Goal = DEFAULT_GOAL
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    group_bytes: int | None = None
    plan: Plan | None = None
    part: bool = False
    outside: int = 0
    arena: int = 0
    likes: tuple[tuple[Problem, Plan], ...] = ()
    timings: Timings | None = None
    joined: Literal[False, True, "auto"] = False
    preamble: bool = False
    table: int = 0
    tables: int = 0
    ranks: int = 0
    disabled: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        check_disabled(self.disabled)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The results of the passes so far; the results of later passes are None."""

    name: StageName
    traced: Traced
    cut: Cut | None = None
    plan: Plan | None = None
    program: Program | None = None
    proof: Proof | None = None


def check_disabled(names: Iterable[str]) -> None:
    """Raise ChunkflowError for a name that is not an optional pass."""
    for name in names:
        if name not in OPTIONAL_PASSES:
            close = difflib.get_close_matches(name, OPTIONAL_PASSES, n=1, cutoff=0.0)[0]
            raise ChunkflowError(
                f"There is no pass {name!r} that can be disabled; did you mean {close!r}? Those that can are "
                f"{', '.join(OPTIONAL_PASSES)}; later passes need all others."
            )


def make_plan(problem: Problem, settings: Settings, *, inside: bool = False, ends: Sequence[int] | None = None) -> Plan:
    """Return the plan in ``settings``, or make a plan for the goal in ``settings``.  ``inside``: as in place.
    ``ends``: as in Plan.check_problem.

    Raises ChunkflowError if no plan meets the goal.
    """
    if settings.plan is not None:
        return settings.plan
    like = next((plan for other, plan in settings.likes if other.structure == problem.structure), None)
    return place(
        problem,
        settings.hardware,
        settings.goal,
        chunk_bytes=settings.chunk_bytes,
        part=settings.part or settings.preamble,
        like=like,
        inside=inside,
        outside=settings.outside + (settings.tables if settings.part else 0),
        arena=settings.arena,
        timings=settings.timings,
        joins=tuple(ends or (len(problem.regions),)) if settings.joined else (),
    )


def join_loss(
    problem: Problem, settings: Settings, *, inside: bool = False, ends: Sequence[int] | None = None
) -> float:
    """Return the relative increase of the predicted step time due to joins, with the same memory; 0.01 means 1 %.

    If ``settings`` contain a plan, its windows are kept.  Otherwise the plans with and without joins are placed
    separately.  The arguments and errors are the same as for make_plan.
    """
    joins = tuple(ends or (len(problem.regions),))
    free = make_plan(problem, replace(settings, joined=False), inside=inside)
    if settings.plan is not None:
        joined = free
    else:
        taken = free.device_bytes + settings.outside + problem.unpacked_bytes
        memory = taken if settings.goal.memory is None else settings.goal.memory
        goal = replace(settings.goal, memory=memory, slowdown=None)
        joined = make_plan(problem, replace(settings, goal=goal, joined=True), inside=inside, ends=joins)
    simulator = Simulator(problem, settings.hardware, free.chunk_bytes, settings.timings)
    steps = simulator.step_under(replace(free, joins=())), simulator.step_under(replace(joined, joins=joins))
    return steps[1] / steps[0] - 1 if steps[0] else 0.0


def _decided(problem: Problem, settings: Settings, *, inside: bool = False, ends: Sequence[int] = ()) -> Settings:
    """Return the settings with ``joined`` resolved to True or False.  The arguments are as in make_plan."""
    if not settings.joined or (settings.joined is True and len(ends) < 2):
        return settings
    return replace(settings, joined=join_loss(problem, settings, inside=inside, ends=ends or None) < MOST_JOIN_LOSS)


def _planned(pieces: Cut, settings: Settings) -> Plan:
    """Return the plan of a cut.  Raises ChunkflowError if no plan meets the goal."""
    goal, traced = settings.goal, pieces.traced
    try:
        return make_plan(pieces.problem, _decided(pieces.problem, settings))
    except BudgetError as error:
        if not goal.activations or goal.split == 1 or not (traced.sizes or traced.unknown):
            raise
        text = (
            f"{error} Blocks cannot be split into slices here because the sizes of the graph are symbolic: compile the model "
            "with dynamic=False."
        )
        raise BudgetError(text, error.needed) from error


def make_cycle(calls: Sequence[Call], settings: Settings) -> Cycle:
    """Plan, write and verify the programs of calls that repeat in this order.  Raises ChunkflowError if no plan meets the
    goal."""
    problem, settings = problem_of(calls), replace(settings, likes=(), part=False)
    settings = _decided(problem, settings, inside=True, ends=ends_of(calls))
    plan = make_plan(problem, settings, inside=True, ends=ends_of(calls))
    cycle = write(calls, plan, share="sharing" not in settings.disabled)
    if "verify" not in settings.disabled:
        verify(cycle)
    return cycle


def make_cut(traced: Traced, group_bytes: int | None = None, disabled: Collection[str] = ()) -> Cut:
    """Discover the weights of a traced graph and cut it into regions, by default as finely as possible."""
    group_bytes = DEFAULT_GROUP_BYTES if group_bytes is None else group_bytes
    if "rotary" not in disabled:
        traced = in_real_arithmetic(traced)
    return cut(
        traced,
        discover(traced),
        group_bytes,
        dissolve_views="views" not in disabled,
        recompute="recompute" not in disabled,
    )


def choose_cut(traced: Traced, settings: Settings) -> Cut:
    """Cut a traced graph according to ``settings``, by default into as few regions as a good plan needs.

    This is the only place that decides which weights are compressed and which are sharded.  If some weights already are
    compressed or sharded, this choice is kept; otherwise ``settings`` decide.  Raises ChunkflowError if ``settings``
    require sharded weights or divided exchanges, and these are not possible.
    """
    groups = settings.goal.exchange_groups
    if groups == "auto":
        groups = groups_for(traced, settings).groups
    return _cut_as_it_is(in_head_groups(traced, groups) if groups else traced, settings)


def groups_for(traced: Traced, settings: Settings) -> GroupChoice:
    """Choose the number of groups of heads into which the exchanges of a graph are divided, if ``settings`` leave it
    open."""
    hardware, given = settings.hardware, settings.plan or settings.timings
    if given is not None:
        return groups_of_problem(traced, given.problem, lambda graph: _cut_as_it_is(graph, settings).problem.digest)

    def resident_s(graph: Traced) -> float:
        problem = whole_blocks(make_cut(graph, disabled=settings.disabled), settings).problem
        simulator = Simulator(problem, hardware, settings.chunk_bytes)
        return simulator.play(Scheduler(problem, settings.chunk_bytes).step({}), spans=False).step_s

    def planned(graph: Traced) -> Plan:
        problem = _cut_as_it_is(graph, settings).problem
        return plans_of(graph, settings, problem)(problem)

    return choose_groups(traced, resident_s, planned)


def plans_of(traced: Traced, settings: Settings, finest: Problem) -> Callable[[Problem], Plan]:
    """Return a function that plans problems of a graph, so that different cuts can be compared.  ``finest``: problem of
    the graph's finest cut."""

    def plan(problem: Problem, *, goal: Goal, ends: Sequence[int] | None = None) -> Plan:
        one = replace(settings, goal=goal, part=False)
        return make_plan(problem, one, inside=traced.repeats is not None, ends=ends)

    return judged(finest, traced.repeats, settings.goal, plan)


def _cut_as_it_is(traced: Traced, settings: Settings) -> Cut:
    """Cut a graph without changing its exchanges, which have already been divided into groups of heads if required."""
    finest, repeats = make_cut(traced, settings.group_bytes, settings.disabled), traced.repeats
    budget = goal_of_cut(traced, settings).memory is not None
    planned = plans_of(traced, settings, finest.problem)
    # the plan of a part of a model does not show which cut is best for the model
    alone = (settings.part and repeats is None) or settings.preamble
    judge = None if alone or not budget else planned
    finest = on_peers(finest, _peer_weights(finest, settings, None if alone else planned), settings.ranks)
    names = _packed_weights(finest, settings, judge)
    finest = packed(finest, names)
    if alone:
        return finest
    return _in_slices(_coarse(finest, settings, names, planned), finest, settings, planned)


def _coarse(finest: Cut, settings: Settings, names: frozenset[str], planned: Callable[[Problem], Plan]) -> Cut:
    """Return the cut with as few regions as a good plan needs.  ``names``: names of the packed weights.  ``planned``:
    function that plans a problem, see judged."""
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
    """Return the cut with one region for each group of regions of the finest cut.  No weight is packed."""
    views, recompute = "views" not in settings.disabled, "recompute" not in settings.disabled
    discovery = (finest.raw or finest).discovery
    group_bytes = DEFAULT_GROUP_BYTES if settings.group_bytes is None else settings.group_bytes
    return cut(finest.traced, discovery, group_bytes, dissolve_views=views, recompute=recompute, groups=groups)


def whole_blocks(finest: Cut, settings: Settings) -> Cut:
    """Return the cut in which each block without collectives is one region.  No weight is packed."""
    return _grouped(finest, grouped(finest, None), settings)


def _in_slices(chosen: Cut, finest: Cut, settings: Settings, planned: Callable[[Problem], Plan]) -> Cut:
    """Return the cut with blocks split into slices of their tokens, if ``settings`` ask for it or the budget requires
    it.

    ``chosen``: cut with whole blocks.  ``finest``: finest cut, from which ``chosen`` was made.  ``planned``: function
    that plans a problem, see judged.
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
    return best_split(cuts, lambda cut: planned(cut.problem), lambda cut: _least(cut.problem, settings))


def _least(problem: Problem, settings: Settings) -> int:
    """Return the minimum budget in bytes, for weights and activations, for which a problem has a plan."""
    outside = settings.outside + (settings.tables if settings.part else 0)
    machine, arena = settings.hardware, settings.arena
    return problem.live_bytes + least_memory(problem, machine, settings.chunk_bytes, outside, arena, settings.part)


def goal_of_cut(traced: Traced, settings: Settings) -> Goal:
    """Return the goal for which a graph is cut.  If the graph is one of several blocks that run one after the other,
    the goal is for all these blocks together."""
    return settings.goal if traced.repeats is None else traced.repeats.goal


def _packed_weights(finest: Cut, settings: Settings, planned: Callable[[Problem], Plan] | None) -> frozenset[str]:
    """Return the names of the weights to pack according to ``settings``.  ``planned``: function that plans a problem, see
    judged; None if plans cannot be compared."""
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
    """Return the names of the weights to shard according to ``settings``.  ``planned``: function that plans a problem, see
    judged; None if plans cannot be compared."""
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
    return to_peers(finest, planned, settings.ranks, budget, settings.hardware.rate_beside_pulls(settings.ranks))


def _sharded_now(traced: Traced) -> frozenset[str]:
    return frozenset(p.name for p in traced.parameters if p.source.sharded)


def _cut_before(finest: Cut, settings: Settings) -> Groups | None:
    """Return the groups of regions for which the plan or the timings in ``settings`` were made, or with which the graph
    can share the placement of one of ``settings.likes``.  Return None if there are no such groups."""
    given = settings.plan or settings.timings
    structures = [problem.structure for problem, _ in settings.likes]
    if given is None and not structures:
        return None
    for groups in (*candidates(finest), apart(finest)):
        problem = merged(finest, groups)
        if (given is not None and problem.digest == given.problem) or problem.structure in structures:
            return groups
    return None if given is None else apart(finest)


def stages(
    traced: Traced,
    settings: Settings,
    *,
    pieces: Cut | None = None,
    verify_each: bool = False,
    last: StageName = "verified",
) -> Iterator[Stage]:
    """Run the passes in order, up to stage ``last``, and yield each stage as soon as it exists.  ``pieces``: the cut, if it
    exists already.

    ``verify_each``: check the contract of each stage after the caller has received it, so that the caller also gets a stage
    that violates its contract.  Raises ChunkflowError if a pass does not support its input or a contract is violated.
    """
    yield Stage(name="traced", traced=traced)
    if verify_each:
        check_traced(traced)
    if last == "traced":
        return
    pieces = pieces or choose_cut(traced, settings)
    yield Stage(name="regions", traced=traced, cut=pieces)
    if verify_each:
        check_cut(pieces)
    if last == "regions":
        return
    plan = _planned(pieces, settings)
    yield Stage(name="planned", traced=traced, cut=pieces, plan=plan)
    if verify_each:
        check_plan(plan, pieces.problem, settings.goal)
    if last == "planned":
        return
    program = rewrite(pieces, plan, share="sharing" not in settings.disabled)
    yield Stage(name="rewritten", traced=traced, cut=pieces, plan=plan, program=program)
    if last == "verified" and "verify" not in settings.disabled:
        proof = verify(program)
        yield Stage(name="verified", traced=traced, cut=pieces, plan=plan, program=program, proof=proof)
