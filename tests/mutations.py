"""Mutations of programs: each breaks one thing at a random place, and returns None if the program has no such place."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch.fx import Node

from chunkflow_compile.passes.graph.discover import collective_kind, is_wait_tensor
from chunkflow_compile.passes.ops import EVICT, PREFETCH, WAIT, prefetch_of
from chunkflow_compile.passes.plan import ALIGNMENT, aligned
from chunkflow_compile.passes.program.lifetimes import releases
from chunkflow_compile.passes.program.rewrite import Program

Mutation = Callable[[Program, random.Random], Program | None]


def caught(refused: bool, wrong: str) -> dict[str, int]:
    """Counts of one mutant: what caught it.  ``refused``: whether verify does.  ``wrong``: what a schedule shows of it, see
    :func:`schedules.goes_wrong`.  Raises AssertionError if it goes wrong and verify accepts it."""
    assert refused or not wrong
    by = {"verify": refused, "wrong numbers": wrong == "number", "an error": wrong == "error"}
    return {"mutants": 1, **{f"caught by {what}": count for what, count in by.items()}}


def listed(count: Counter[str]) -> str:
    """Counts by name, as one line."""
    return ", ".join(f"{number} {what}" for what, number in count.items())


def _pick(program: Program, rng: random.Random, target: object) -> Node | None:
    found = [n for n in program.module.graph.nodes if n.target is target]
    return rng.choice(found) if found else None


def _reader(program: Program, *weights: str) -> Node:
    """The first region that reads one of these weights."""
    placeholders = {program.weight_inputs[weight] for weight in weights}
    return next(n for n in program.module.graph.nodes if n.op == "call_module" and placeholders & set(map(str, n.args)))


def weights_of(wait: Node) -> tuple[str, ...]:
    """The weights that a wait makes readable."""
    return tuple(wait.args[1])  # type: ignore[arg-type]


def _completions(program: Program) -> list[Node]:
    return [n for n in program.module.graph.nodes if is_wait_tensor(n)]


def _with_releases(program: Program) -> Program:
    """The program with the releases that rewrite would give its graph."""
    return replace(program, releases=releases(program.module.graph))


def released(program: Program, value: str, after: str) -> Program:
    """The program with ``value`` released after the node ``after``, and nowhere else."""
    others = {node: tuple(v for v in values if v != value) for node, values in program.releases.items()}
    return replace(program, releases={**others, after: (*others.get(after, ()), value)})


def remove_a_wait(program: Program, rng: random.Random) -> Program | None:
    if (node := _pick(program, rng, WAIT)) is None:
        return None
    program.module.graph.erase_node(node)
    return program


def wait_after_the_reader(program: Program, rng: random.Random) -> Program | None:
    if (node := _pick(program, rng, WAIT)) is None:
        return None
    _reader(program, *weights_of(node)).append(node)
    return program


def wait_for_another_weight(program: Program, rng: random.Random) -> Program | None:
    found = program.module.graph.find_nodes(op="call_function", target=WAIT)
    if len(found) < 2:
        return None
    node, other = rng.sample(list(found), 2)
    node.args = other.args
    return program


def remove_a_prefetch(program: Program, rng: random.Random) -> Program | None:
    if (node := _pick(program, rng, PREFETCH)) is None:
        return None
    program.module.graph.erase_node(node)
    return program


def forget_a_chunk(program: Program, rng: random.Random) -> Program | None:
    nodes = program.module.graph.find_nodes(op="call_function", target=PREFETCH)
    found = [n for n in nodes if n.args[2] - n.args[1] > 1]  # type: ignore[operator]
    if not found:
        return None
    node = rng.choice(found)
    node.args = (*node.args[:2], node.args[2] - 1, *node.args[3:])  # type: ignore[operator]
    return program


def prefetch_after_the_reader(program: Program, rng: random.Random) -> Program | None:
    node = _pick(program, rng, PREFETCH)
    if node is None or (prefetch := prefetch_of(node)) is None or prefetch.copy.next_step:
        return None
    _reader(program, prefetch.copy.weight).append(node)
    return program


def prefetch_before_its_window(program: Program, rng: random.Random) -> Program | None:
    """Lane a prefetch to the start of the step, into the first window."""
    node = _pick(program, rng, PREFETCH)
    first = next((n for n in program.module.graph.nodes if n.op == "call_module"), None)
    if node is None or first is None or node.args[3] == 0:
        return None
    first.prepend(node)
    node.args = (*node.args[:3], 0, *node.args[4:])
    return program


def prefetch_for_the_other_step(program: Program, rng: random.Random) -> Program | None:
    if (node := _pick(program, rng, PREFETCH)) is None:
        return None
    node.args = (*node.args[:4], not node.args[4], node.args[5])
    return program


def prefetch_twice(program: Program, rng: random.Random) -> Program | None:
    node = _pick(program, rng, PREFETCH)
    if node is None or (prefetch := prefetch_of(node)) is None:
        return None
    with program.module.graph.inserting_after(_reader(program, prefetch.copy.weight)):
        program.module.graph.call_function(PREFETCH, node.args, node.kwargs)
    return program


def drop_an_event(program: Program, rng: random.Random) -> Program | None:
    """A copy waits for no opening, or its arrival is not recorded."""
    found = [(n, name) for n in program.module.graph.nodes if n.target is PREFETCH for name in n.kwargs]
    if not found:
        return None
    node, dropped = rng.choice(found)
    node.kwargs = {name: event for name, event in node.kwargs.items() if name != dropped}
    return program


def swap_two_events(program: Program, rng: random.Random) -> Program | None:
    """Of two copies, each records the arrival of the other, or each waits for the opening of the other's window."""
    name = rng.choice(["after", "then"])
    found = [n for n in program.module.graph.nodes if n.target is PREFETCH and name in n.kwargs]
    if len(found) < 2:
        return None
    one, other = rng.sample(found, 2)
    mine, its = one.kwargs[name], other.kwargs[name]
    one.kwargs, other.kwargs = {**one.kwargs, name: its}, {**other.kwargs, name: mine}
    return program


def wait_on_another_stream(program: Program, rng: random.Random) -> Program | None:
    """A lane waits for an arrival in place of compute: before the next copy, whose window is then not opened."""
    nodes = list(program.module.graph.nodes)
    found = [(n, p) for i, n in enumerate(nodes) if n.target is WAIT for p in nodes[i:] if p.target is PREFETCH]
    if not found:
        return None
    node, prefetch = rng.choice(found)
    prefetch.kwargs = {**prefetch.kwargs, "after": node.args[0]}
    program.module.graph.erase_node(node)
    return program


def remove_an_evict(program: Program, rng: random.Random) -> Program | None:
    if (node := _pick(program, rng, EVICT)) is None:
        return None
    program.module.graph.erase_node(node)
    return program


def evict_before_the_reader(program: Program, rng: random.Random) -> Program | None:
    if (node := _pick(program, rng, EVICT)) is None:
        return None
    _reader(program, str(node.args[0])).prepend(node)
    return program


def another_slot(program: Program, rng: random.Random) -> Program | None:
    """Lane a weight to the slot of another."""
    streamed = program.plan.streamed
    if len(streamed) < 2:
        return None
    one, other = rng.sample(streamed, 2)
    if one.offset == other.offset or (other.offset or 0) + one.nbytes > program.plan.arena_bytes:
        return None
    return _with_offset(program, one.name, other.offset or 0)


def slot_off_by_a_line(program: Program, rng: random.Random) -> Program | None:
    streamed = program.plan.streamed
    if not streamed:
        return None
    one = rng.choice(streamed)
    moved = (one.offset or 0) + rng.choice([-1, 1]) * ALIGNMENT
    if moved < 0 or moved + one.nbytes > program.plan.arena_bytes:
        return None
    return _with_offset(program, one.name, moved)


def swap_weights_of_regions(program: Program, rng: random.Random) -> Program | None:
    """Swaps two weights of one shape: each is read in place of the other."""
    shapes = {w.name: (w.shape, w.dtype) for w in program.problem.weights}
    names = [(a, b) for a in shapes for b in shapes if a < b and shapes[a] == shapes[b]]
    if not names:
        return None
    one, other = (program.weight_inputs[n] for n in rng.choice(names))
    nodes = {n.name: n for n in program.module.graph.find_nodes(op="placeholder")}
    for call in program.module.graph.find_nodes(op="call_module"):
        turn = {nodes[one]: nodes[other], nodes[other]: nodes[one]}
        call.args = tuple(turn.get(a, a) for a in call.args)  # type: ignore[arg-type]
    return _with_releases(program)


def keep_every_chunk(program: Program, rng: random.Random) -> Program | None:
    """Keeps all of a weight in a slot of its own.  That is legal if its readers wait for it, and none of them does."""
    if (node := _pick(program, rng, WAIT)) is None:
        return None
    name, graph = weights_of(node)[0], program.module.graph
    for other in list(graph.nodes):
        if other.target is WAIT and name in weights_of(other):
            other.args = (other.args[0], tuple(w for w in weights_of(other) if w != name))
        if other.target is PREFETCH and other.args[0] == name:
            graph.erase_node(other)
    plan = program.plan
    weights = tuple(
        replace(w, offset=plan.arena_bytes, windows=(None,) * len(w.windows)) if w.name == name else w
        for w in plan.weights
    )
    size = next(w.nbytes for w in plan.weights if w.name == name)
    return replace(program, plan=replace(plan, weights=weights, arena_bytes=plan.arena_bytes + aligned(size)))


def _with_offset(program: Program, name: str, offset: int) -> Program:
    weights = tuple(replace(w, offset=offset) if w.name == name else w for w in program.plan.weights)
    return replace(program, plan=replace(program.plan, weights=weights))


def remove_a_completion(program: Program, rng: random.Random) -> Program | None:
    """What read the completed result reads the collective's own."""
    if not (found := _completions(program)):
        return None
    node = rng.choice(found)
    node.replace_all_uses_with(node.all_input_nodes[0])
    program.module.graph.erase_node(node)
    return _with_releases(program)


def complete_after_the_reader(program: Program, rng: random.Random) -> Program | None:
    found = [(n, u) for n in _completions(program) for u in list(n.users)[:1] if u.op == "call_module"]
    if not found:
        return None
    node, reader = rng.choice(found)
    node.replace_all_uses_with(node.all_input_nodes[0])
    reader.append(node)
    return _with_releases(program)


def complete_another_collective(program: Program, rng: random.Random) -> Program | None:
    """A completion waits once more for a collective that was completed before."""
    if len(found := _completions(program)) < 2:
        return None
    later = rng.randrange(1, len(found))
    node, other = found[later], found[rng.randrange(later)]
    node.replace_all_uses_with(node.all_input_nodes[0])
    node.args = (other.all_input_nodes[0],)
    return _with_releases(program)


def release_before_the_completion(program: Program, rng: random.Random) -> Program | None:
    """Releases what a collective sends when the collective has started."""
    found = [n for n in program.module.graph.nodes if collective_kind(n) is not None]
    if not found:
        return None
    node = rng.choice(found)
    return released(program, node.all_input_nodes[0].name, node.name)


def release_before_the_reader(program: Program, rng: random.Random) -> Program | None:
    """Releases what a region computes before another region reads it."""
    calls = [n for n in program.module.graph.nodes if n.op == "call_module"]
    found = [a for call in calls for a in call.all_input_nodes if a.op == "call_function"]
    if not found:
        return None
    value = rng.choice(found).name
    return released(program, value, value)


def take_before_another_reader(program: Program, rng: random.Random) -> Program | None:
    """Lets a region take what a later region reads: the one before that, by which the value is made."""
    calls = [n for n in program.module.graph.nodes if n.op == "call_module"]
    place = {node: i for i, node in enumerate(program.module.graph.nodes)}
    found = [
        (value, before)
        for before, reader in pairwise(calls)
        for value in reader.all_input_nodes
        if place[value] < place[before]
    ]
    if not found:
        return None
    value, before = rng.choice(found)
    return released(program, value.name, before.name)


def write_beside_a_collective(program: Program, rng: random.Random) -> Program | None:
    """Sets to zero what a collective sends, before the collective is completed."""
    found = [n for n in program.module.graph.nodes if collective_kind(n) is not None]
    if not found:
        return None
    node = rng.choice(found)
    with program.module.graph.inserting_after(node):
        program.module.graph.call_function(torch.ops.aten.zero_.default, (node.all_input_nodes[0],))
    return _with_releases(program)


MUTATIONS: tuple[Mutation, ...] = (
    remove_a_wait,
    wait_after_the_reader,
    wait_for_another_weight,
    remove_a_prefetch,
    forget_a_chunk,
    prefetch_after_the_reader,
    prefetch_before_its_window,
    prefetch_for_the_other_step,
    prefetch_twice,
    drop_an_event,
    swap_two_events,
    wait_on_another_stream,
    remove_an_evict,
    evict_before_the_reader,
    another_slot,
    slot_off_by_a_line,
    swap_weights_of_regions,
    keep_every_chunk,
    remove_a_completion,
    complete_after_the_reader,
    complete_another_collective,
    release_before_the_completion,
    release_before_the_reader,
    take_before_another_reader,
    write_beside_a_collective,
)
