"""Verify: proves of a program, before it runs, that no reader sees bytes that are not its weight's.

Checked, over a priming and two consecutive steps (which is every pair of neighbouring steps, the program being the
same each time):

* slots lie inside the arena, are aligned, and are as large as their weights;
* each streamed byte is copied exactly once for each step;
* each reader of a weight comes behind a wait that covers all chunks of it;
* each weight is evicted once a step, behind its last reader;
* two weights whose slots overlap are never alive together: the last reader of the one happens before the first chunk
  of the other, wrap-around included;
* regions and collectives are those of the traced graph, in its order, on the values that they have there.

Contract
    Reads the program and its plan, nothing else: it does not trust the passes that made them.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Node
from torch.fx.node import map_arg

from .discover import collective_kind
from .errors import ChunkflowError
from .happens_before import HappensBefore
from .ops import EVICT, PREFETCH, WAIT
from .plan import ALIGNMENT, WeightPlan
from .regions import flow_line
from .rewrite import SOURCE, Program

STEPS = 2


def verify(program: Program) -> None:
    """Raises ChunkflowError naming the weight, the two ops and the missing edge of every violation found."""
    violations = list(check(program))
    if violations:
        shown = "\n".join(f"  {v}" for v in violations[:10])
        more = f"\n  and {len(violations) - 10} more" if len(violations) > 10 else ""
        raise ChunkflowError(f"The program is not safe to run:\n{shown}{more}")


def check(program: Program) -> Iterator[str]:
    """The violations of a program, as sentences."""
    yield from _check_slots(program)
    yield from _check_order(program)
    yield from _check_readers(program)
    yield from _check_data_flow(program)
    order = HappensBefore(program, STEPS)
    lives = _lives(program, order)
    for life in lives.values():
        yield from _check_life(program, order, life)
    yield from _check_overlaps(program, order, lives)


@dataclass
class _Life:
    """What one step does with one streamed weight, as indices of ops."""

    plan: WeightPlan
    step: int
    chunks: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    evicts: list[int] = field(default_factory=list)


def _check_slots(program: Program) -> Iterator[str]:
    plan, sizes = program.plan, {w.name: w.nbytes for w in program.problem.weights}
    names = [w.name for w in plan.weights]
    if sorted(names) != sorted(sizes) or set(program.weight_inputs) != set(sizes):
        yield "the plan or the program has other weights than the traced graph"
    if plan.chunk_bytes <= 0:
        yield f"chunks of {plan.chunk_bytes} bytes carry nothing"
    for weight in plan.weights:
        if weight.nbytes != sizes.get(weight.name):
            yield f"{weight.name}: planned with {weight.nbytes} bytes, but it has {sizes.get(weight.name)}"
        if weight.home == "device":
            if weight.offset is not None:
                yield f"{weight.name}: lives on the device and has a slot, which nothing fills"
            continue
        if weight.offset is None or weight.offset < 0 or weight.offset % ALIGNMENT:
            yield f"{weight.name}: slot offset {weight.offset} is not a multiple of {ALIGNMENT}"
        elif weight.offset + weight.nbytes > plan.arena_bytes:
            end = weight.offset + weight.nbytes
            yield f"{weight.name}: slot ends at byte {end}, outside the arena of {plan.arena_bytes}"


def _check_order(program: Program) -> Iterator[str]:
    nodes = program.module.graph.nodes
    calls = [n for n in nodes if n.op == "call_module"]
    regions, expected = [n.name for n in calls], [r.name for r in program.problem.regions]
    if regions != expected:
        yield _first_difference("region", expected, regions)
    weights = {placeholder: name for name, placeholder in program.weight_inputs.items()}
    for call, region in zip(calls, program.problem.regions, strict=False):
        reads = tuple(weights[str(a)] for a in call.args if str(a) in weights)
        if call.name == region.name and reads != region.weights:
            ours, theirs = (", ".join(names) or "no weight" for names in (reads, region.weights))
            yield f"{region.name} reads {ours}, but the traced graph has {theirs} there"
    collectives = [str(n.meta.get(SOURCE, n.name)) for n in nodes if collective_kind(n) is not None]
    expected = [c.name for c in program.problem.collectives]
    if collectives != expected:
        yield _first_difference("collective", expected, collectives)


def _check_readers(program: Program) -> Iterator[str]:
    """Only regions read streamed weights: what else would is not ordered by waits and evicts."""
    streamed = {program.weight_inputs.get(w.name): w.name for w in program.plan.streamed}
    for node in program.module.graph.nodes:
        if node.op == "placeholder" and node.name in streamed:
            for user in node.users:
                if user.op != "call_module":
                    yield f"{streamed[node.name]}: {user.name} reads it outside a region"


def _check_data_flow(program: Program) -> Iterator[str]:
    """Every region, output of a region, collective and completion takes what it takes in the traced graph."""
    seen = set()
    for node in program.module.graph.nodes:
        if node.op not in ("call_module", "call_function") or node.target in (PREFETCH, WAIT, EVICT):
            continue
        name = str(node.meta.get(SOURCE, node.name))
        seen.add(name)
        if node.op == "call_module":
            known = program.regions.get(str(node.target))
            found = flow_line(known.info.key if known else "?", [_source(n) for n in node.args if isinstance(n, Node)])
        elif node.target is operator.getitem and node.all_input_nodes[0].op == "call_module":
            found = flow_line("output", [_source(node.all_input_nodes[0]), node.args[1]])
        else:
            found = flow_line(str(node.target), map_arg((node.args, dict(node.kwargs)), _source))
        expected = program.data_flow.get(name)
        if found != expected:
            yield f"{name} is {found}, but the traced graph has {expected}"
    for name in sorted(program.data_flow.keys() - seen):
        yield f"{name} of the traced graph is missing"


def _source(node: Node) -> str:
    return str(node.meta.get(SOURCE, node.name))


def _first_difference(what: str, expected: list[str], found: list[str]) -> str:
    for position, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return f"{what} {position} is {b}, but the traced graph has {a} there: ranks would meet in the wrong order"
    return f"the program has {len(found)} {what}s, the traced graph has {len(expected)}"


def _lives(program: Program, order: HappensBefore) -> dict[tuple[str, int], _Life]:
    lives = {(w.name, s): _Life(w, s) for w in program.plan.streamed for s in range(STEPS + 1)}
    for i, op in enumerate(order.ops):
        if op.kind == "chunk":
            if (op.weight, op.serves) in lives:
                lives[op.weight, op.serves].chunks.append(i)
        elif op.kind == "wait" and (op.weight, op.step) in lives:
            lives[op.weight, op.step].waits.append(i)
        elif op.kind == "evict" and (op.weight, op.step) in lives:
            lives[op.weight, op.step].evicts.append(i)
        for weight in op.reads:
            if (weight, op.step) in lives:
                lives[weight, op.step].reads.append(i)
    return lives


def _check_life(program: Program, order: HappensBefore, life: _Life) -> Iterator[str]:
    if life.step >= STEPS:  # the step after the last: only its wrap-around chunks are in sight
        return
    name, ops = life.plan.name, order.ops
    copied = [ops[i].chunk for i in life.chunks]
    chunks = range(program.plan.chunks(life.plan))
    if not set(copied) <= set(chunks):
        yield f"{name}: chunks {sorted(set(copied) - set(chunks))} are prefetched, but it has {len(chunks)}"
    for chunk in chunks:
        if copied.count(chunk) != 1:
            yield f"{name}: chunk {chunk} is prefetched {copied.count(chunk)} times for step {life.step}, not once"
    for read in life.reads:
        waits = [w for w in life.waits if order.ordered(w, read)]
        for chunk in life.chunks:
            if not any(order.ordered(chunk, w) for w in waits):
                yield (
                    f"{name}: {ops[read]} may read before {ops[chunk]} has arrived; missing edge: "
                    f"{ops[chunk].label} -> wait({name!r}) -> {ops[read].label}"
                )
                break
    if len(life.evicts) != 1:
        yield f"{name}: evicted {len(life.evicts)} times in step {life.step}, not once"
    for evict in life.evicts:
        for read in life.reads:
            if not order.ordered(read, evict):
                yield (
                    f"{name}: {ops[evict]} comes before its reader {ops[read]}; missing edge: "
                    f"{ops[read].label} -> {ops[evict].label}"
                )


def _check_overlaps(program: Program, order: HappensBefore, lives: dict[tuple[str, int], _Life]) -> Iterator[str]:
    by_name: dict[str, list[_Life]] = defaultdict(list)
    for (name, _), life in lives.items():
        by_name[name].append(life)
    for a, b in _overlapping(program.plan.streamed):
        for first in by_name[a.name]:
            for then in by_name[b.name]:
                if (a.name, first.step) != (b.name, then.step) and first.chunks and then.chunks:
                    yield from _check_pair(order, first, then)


def _overlapping(weights: tuple[WeightPlan, ...]) -> Iterator[tuple[WeightPlan, WeightPlan]]:
    """Pairs of weights whose slots share bytes, each weight with itself included, by a sweep over offsets."""
    active: list[WeightPlan] = []
    for weight in sorted((w for w in weights if w.offset is not None), key=lambda w: (w.offset or 0, w.name)):
        active = [a for a in active if (a.offset or 0) + a.nbytes > (weight.offset or 0)]
        active.append(weight)
        yield from ((a, weight) for a in active)


def _check_pair(order: HappensBefore, first: _Life, then: _Life) -> Iterator[str]:
    """One of two lives in the same bytes must be over before the first chunk of the other starts."""
    if first.chunks[0] > then.chunks[0]:
        first, then = then, first
    for end in (*first.reads, *first.evicts, *first.chunks[-1:]):
        start = then.chunks[0]
        if not order.ordered(end, start):
            ops = order.ops
            yield (
                f"{then.plan.name}: {ops[start]} overwrites the slot of {first.plan.name} at byte "
                f"{max(first.plan.offset or 0, then.plan.offset or 0)} while {ops[end]} may still use it; missing edge: "
                f"{ops[end].label} -> {ops[start].label}"
            )
            return
