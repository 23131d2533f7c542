"""Contracts: what must hold of each stage before the next pass may trust it; ``verify`` has the program's own.

Each check raises FindingError with the first thing that is wrong.  They cost little beside the passes, but find only
faults of ChunkFlow itself, so that they run when asked for (``--verify-each``).
"""

from __future__ import annotations

from collections import Counter

from torch.fx import Node

from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.graph.discover import collective_kind, group_name, is_view
from chunkflow_compile.passes.graph.regions import Cut, CutRegion
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.plan import ALIGNMENT, Plan, chunk_count
from chunkflow_compile.passes.problem import Problem


def check_traced(traced: Traced) -> None:
    """The graph is sound, every placeholder says which input it is, every collective's group has a size."""
    traced.graph.graph.lint()
    for node in traced.graph.graph.nodes:
        if node.op == "placeholder" and node.meta.get("desc") is None:
            _broken("traced", f"the input {node.name} does not say where it comes from")
        if node.op == "call_function" and "val" not in node.meta:
            _broken("traced", f"{node.name} has no shape")
        if collective_kind(node) is not None and group_name(node) not in traced.ranks:
            _broken("traced", f"the group {group_name(node)!r} of {node.name} has no size")


def check_cut(cut: Cut) -> None:
    """Nothing is lost and nothing is computed twice but views; regions read only what is there by then."""
    _check_computed(cut)
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
        _broken("regions", "the collectives stand in another order than in the traced graph")
    if [r.index for r in cut.problem.regions] != list(range(len(cut.regions))):
        _broken("regions", "the regions are not numbered in their order")
    (output,) = cut.source.graph.find_nodes(op="output")
    if missing := [n.name for n in output.all_input_nodes if n not in ready]:
        _broken("regions", f"the results {', '.join(missing)} are computed nowhere")


def _check_computed(cut: Cut) -> None:
    """Every op of the graph stands in one region, views, which cost nothing, in one or more."""
    expected, found = Counter[str](), Counter[str]()
    top = {item for item in cut.sequence if isinstance(item, Node)}
    for counts, nodes in (
        (expected, [n for n in cut.source.graph.nodes if n not in top]),
        (found, [n for r in cut.sequence if isinstance(r, CutRegion) for n in r.module.graph.nodes]),
    ):
        counts.update(str(n.target) for n in nodes if n.op == "call_function" and not is_view(n))
    for target in sorted(expected | found):
        if expected[target] != found[target]:
            _broken("regions", f"{target} is computed {found[target]} times, {expected[target]} in the traced graph")


def check_plan(plan: Plan, problem: Problem, memory: int | None) -> None:
    """The plan is of this problem: its weights, chunks and windows, inside its arena and the budget."""
    plan.check_problem(problem)
    count = len(problem.regions)
    if len(plan.regions) != count:
        _broken("planned", f"{len(plan.regions)} windows for {count} regions")
    if memory is not None and plan.device_bytes > memory:
        _broken("planned", f"{plan.device_bytes} bytes on the device, above the budget of {memory}")
    weights = {w.name: w for w in problem.weights}
    for weight in plan.weights:
        known = weights[weight.name]  # the digest says that they are the same
        if weight.nbytes != known.nbytes:
            _broken("planned", f"{weight.name} has {weight.nbytes} bytes, in the model {known.nbytes}")
        if weight.home == "device":
            continue
        if known.keep is not None:
            _broken("planned", f"{weight.name} is streamed, but must stay: {known.keep}")
        if weight.offset is None or weight.offset % ALIGNMENT or weight.offset + weight.nbytes > plan.arena_bytes:
            _broken("planned", f"the slot of {weight.name} at {weight.offset} is not aligned or leaves the arena")
        if len(weight.windows) != chunk_count(weight.nbytes, plan.chunk_bytes):
            _broken("planned", f"{weight.name} has {len(weight.windows)} chunks")
        if odd := [w for w in weight.windows if w is not None and not 0 <= w < count]:
            _broken("planned", f"{weight.name} starts in window {odd[0]}")
    collectives = {c.name for c in problem.collectives}
    if unknown := [b.collective for b in plan.barriers if b.collective not in collectives]:
        _broken("planned", f"a barrier stands before {unknown[0]}, which is no collective")


def _broken(stage: str, what: str) -> None:
    raise FindingError(
        f"The contract of stage {stage} is broken: {what}. This is a fault of ChunkFlow; please report it."
    )
