"""Pipeline: runs the passes in order.  Each row contains a stage, its result, and the passes that produce the result.

traced      the ATen graph, its parameters and process groups      tracing, outside this package
regions     regions, with the collectives between them             head groups, rotary, discover, cut, peers, split, pack
planned     a home, a slot and windows for every weight            place, unless a plan is given
rewritten   the program with its transfer ops                      rewrite
verified    the same program, with the proof that it is safe       verify
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.program.contracts import check_cut, check_plan, check_traced
from chunkflow_compile.passes.program.cycle import Call, Cycle, ends_of, problem_of, write
from chunkflow_compile.passes.program.rewrite import Program, rewrite
from chunkflow_compile.passes.program.verify import Proof, verify

from .cutting import choose_cut
from .errors import BudgetError
from .names import StageName
from .plan import Plan
from .planning import Settings, make_plan, with_joins_decided


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The results of the passes so far; the results of later passes are None."""

    name: StageName
    traced: Traced
    cut: Cut | None = None
    plan: Plan | None = None
    program: Program | None = None
    proof: Proof | None = None


def _planned(cut: Cut, settings: Settings) -> Plan:
    """Return the plan of a cut.  Raises ChunkflowError if no plan meets the goal."""
    goal, traced = settings.goal, cut.traced
    try:
        return make_plan(cut.problem, with_joins_decided(cut.problem, settings))
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
    settings = with_joins_decided(problem, settings, residents_in_arena=True, ends=ends_of(calls))
    plan = make_plan(problem, settings, residents_in_arena=True, ends=ends_of(calls))
    cycle = write(calls, plan, share=settings.enables("sharing"))
    if settings.enables("verify"):
        verify(cycle)
    return cycle


def stages(
    traced: Traced,
    settings: Settings,
    *,
    pieces: Cut | None = None,
    verify_each: bool = False,
    last: StageName = "verified",
) -> Iterator[Stage]:
    """Run the passes in order, up to stage ``last``, and yield each stage as soon as it exists.  ``pieces``: the cut, or None
    if it has not been made yet.

    ``verify_each``: whether to check the contract of each stage.  A stage is checked after the caller has received it, so
    that the caller can also show a stage that violates its contract.  Raises ChunkflowError if a pass does not support its
    input or a contract is violated.
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
    program = rewrite(pieces, plan, share=settings.enables("sharing"))
    yield Stage(name="rewritten", traced=traced, cut=pieces, plan=plan, program=program)
    if last == "verified" and settings.enables("verify"):
        proof = verify(program)
        yield Stage(name="verified", traced=traced, cut=pieces, plan=plan, program=program, proof=proof)
