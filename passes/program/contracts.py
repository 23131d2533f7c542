"""Contracts: checks the results of the stages traced, regions and planned.  (``verify`` checks the program.)

Each check raises FindingError for the first violation.  The checks only find bugs in ChunkFlow itself, so they run only on
request (``--verify-each``).
"""

from __future__ import annotations

from collections import Counter

from torch.fx import Node

from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.discover import collective_kind, group_name, is_view
from chunkflow_compile.passes.graph.regions import Cut, CutRegion
from chunkflow_compile.passes.graph.symbolic_sizes import is_size
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.packing import UNPACK
from chunkflow_compile.passes.plan import ALIGNMENT, Plan, chunk_count
from chunkflow_compile.passes.problem import Problem


def check_traced(traced: Traced) -> None:
    """Check that the graph is valid, every placeholder identifies its input, and the size of the process group of every
    collective is known."""
    traced.graph.graph.lint()
    for node in traced.graph.graph.nodes:
        if node.op == "placeholder" and node.meta.get("desc") is None:
            _broken("traced", f"the input {node.name} does not say where it comes from")
        if node.op == "call_function" and "val" not in node.meta:
            _broken("traced", f"{node.name} has no shape")
        if collective_kind(node) is not None and group_name(node) not in traced.ranks:
            _broken("traced", f"the group {group_name(node)!r} of {node.name} has no size")


def check_cut(cut: Cut) -> None:
    """Check that no op is lost, that only views and recomputed values are repeated, and that regions read only results
    that have been computed before.

    If blocks of the cut are split into slices, the ops are checked in the cut from which the slices were made.
    """
    _check_computed(cut.whole or cut)
    ready = {n for n in cut.source.graph.nodes if n.op in ("placeholder", "get_attr")}
    top: list[Node] = []
    for item in cut.sequence:
        inputs = item.inputs if isinstance(item, CutRegion) else tuple(item.all_input_nodes)
        late = [n.name for n in inputs if n not in ready]
        name = item.info.name if isinstance(item, CutRegion) else item.name
        if late:
            _broken("regions", f"{name} reads {', '.join(late)}, which comes only after it")
        if isinstance(item, CutRegion):
            ready.update(item.outputs)
        else:
            top.append(item)
            ready.add(item)
    expected = [n for n in cut.source.graph.nodes if collective_kind(n) is not None]
    if [n for n in top if collective_kind(n) is not None] != expected:
        _broken("regions", "the order of the collectives is not that of the traced graph")
    if [r.index for r in cut.problem.regions] != list(range(len(cut.regions))):
        _broken("regions", "the regions are not numbered in program order")
    (output,) = cut.source.graph.find_nodes(op="output")
    if missing := [n.name for n in output.all_input_nodes if n not in ready]:
        _broken("regions", f"no region or collective computes the results {', '.join(missing)}")


def _check_computed(cut: Cut) -> None:
    """Check that every op of the graph is in exactly one region.  Only views and recomputed values may be in several
    regions."""
    expected, computed = Counter[str](), Counter[str]()
    top = {item for item in cut.sequence if isinstance(item, Node)}
    for counts, nodes in (
        (expected, [n for n in cut.source.graph.nodes if n not in top]),
        (computed, [n for r in cut.sequence if isinstance(r, CutRegion) for n in _computed(r)]),
    ):
        counts.update(str(n.target) for n in nodes if n.op == "call_function" and not is_view(n) and not is_size(n))
    again = {str(node.target) for node in cut.recomputed}
    for target in sorted(expected | computed):
        if computed[target] < expected[target] or (computed[target] > expected[target] and target not in again):
            _broken("regions", f"{target} is computed {computed[target]} times, {expected[target]} in the traced graph")


def _computed(region: CutRegion) -> list[Node]:
    return [node for node in region.module.graph.nodes if node.target is not UNPACK]


def check_plan(plan: Plan, problem: Problem, goal: Goal) -> None:
    """Check that the plan has the weights, chunks and windows of this problem, that its slots are inside its arena, and that
    it fits in the budget."""
    plan.check_problem(problem)
    count = len(problem.regions)
    if len(plan.regions) != count:
        _broken("planned", f"{len(plan.regions)} windows for {count} regions")
    if goal.memory is not None and plan.device_bytes > goal.memory:
        _broken("planned", f"{plan.device_bytes} bytes on the device, above the budget of {goal.memory}")
    weights = {w.name: w for w in problem.weights}
    for weight in plan.weights:
        expected = weights[weight.name]  # the weight exists, because check_problem has compared the digests
        if weight.nbytes != expected.nbytes:
            _broken("planned", f"{weight.name} has {weight.nbytes} bytes, in the model {expected.nbytes}")
        ranks, expected_ranks = weight.source.ranks, expected.source.ranks
        if ranks != expected_ranks or weight.home == ("host" if ranks else "peers"):
            where = f"in pieces on {ranks} devices" if ranks else "in no pieces"
            _broken(
                "planned", f"{weight.name} is planned {where} with home {weight.home}, in the model {expected_ranks}"
            )
        if weight.home == "device":
            continue
        if expected.keep is not None:
            _broken("planned", f"{weight.name} is streamed, but must stay: {expected.keep}")
        if weight.offset is None or weight.offset % ALIGNMENT or weight.offset + weight.nbytes > plan.arena_bytes:
            _broken("planned", f"the slot of {weight.name} at {weight.offset} is not aligned or leaves the arena")
        if len(weight.windows) != chunk_count(weight.nbytes, plan.chunk_bytes):
            _broken("planned", f"{weight.name} has {len(weight.windows)} chunks")
        if odd := [w for w in weight.windows if w is not None and not 0 <= w < count]:
            _broken("planned", f"{weight.name} starts in window {odd[0]}")
    collectives = {c.name for c in problem.collectives}
    if unknown := [b.collective for b in plan.barriers if b.collective not in collectives]:
        _broken("planned", f"a barrier stands before {unknown[0]}, which is not a collective")


def _broken(stage: str, what: str) -> None:
    raise FindingError(
        f"The contract of stage {stage} is broken: {what}. This is a bug in ChunkFlow; please report it."
    )
