"""Mutations of programs: each breaks one thing at a random place, and returns None if the program has no such place."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from torch.fx import Node

from chunkflow_compile.passes.ops import EVICT, PREFETCH, WAIT, prefetch_of
from chunkflow_compile.passes.plan import ALIGNMENT, align
from chunkflow_compile.passes.program.rewrite import Program

Mutation = Callable[[Program, random.Random], Program | None]


def _pick(program: Program, rng: random.Random, target: object) -> Node | None:
    found = [n for n in program.module.graph.nodes if n.target is target]
    return rng.choice(found) if found else None


def _reader(program: Program, weight: str) -> Node:
    """The first region that reads a weight."""
    placeholder = program.weight_inputs[weight]
    return next(n for n in program.module.graph.nodes if n.op == "call_module" and placeholder in map(str, n.args))


def remove_a_wait(program: Program, rng: random.Random) -> Program | None:
    if (node := _pick(program, rng, WAIT)) is None:
        return None
    program.module.graph.erase_node(node)
    return program


def wait_after_the_reader(program: Program, rng: random.Random) -> Program | None:
    if (node := _pick(program, rng, WAIT)) is None:
        return None
    _reader(program, str(node.args[0])).append(node)
    return program


def wait_for_another_weight(program: Program, rng: random.Random) -> Program | None:
    node, other = _pick(program, rng, WAIT), _pick(program, rng, WAIT)
    if node is None or other is None or node.args == other.args:
        return None
    node.args = other.args
    return program


def remove_a_prefetch(program: Program, rng: random.Random) -> Program | None:
    if (node := _pick(program, rng, PREFETCH)) is None:
        return None
    program.module.graph.erase_node(node)
    return program


def forget_a_chunk(program: Program, rng: random.Random) -> Program | None:
    if (node := _pick(program, rng, PREFETCH)) is None or node.args[2] - node.args[1] < 2:  # type: ignore[operator]
        return None
    node.args = (*node.args[:2], node.args[2] - 1, *node.args[3:])  # type: ignore[operator]
    return program


def prefetch_after_the_reader(program: Program, rng: random.Random) -> Program | None:
    node = _pick(program, rng, PREFETCH)
    if node is None or (prefetch := prefetch_of(node)) is None or prefetch.next_step:
        return None
    _reader(program, prefetch.weight).append(node)
    return program


def prefetch_before_its_window(program: Program, rng: random.Random) -> Program | None:
    """Moves a prefetch to the start of the step, into the first window."""
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
    node.args = (*node.args[:4], not (len(node.args) > 4 and node.args[4]))
    return program


def prefetch_twice(program: Program, rng: random.Random) -> Program | None:
    node = _pick(program, rng, PREFETCH)
    if node is None or (prefetch := prefetch_of(node)) is None:
        return None
    with program.module.graph.inserting_after(_reader(program, prefetch.weight)):
        program.module.graph.call_function(PREFETCH, node.args)
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
    """Moves a weight to the slot of another."""
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
    return program


def keep_every_chunk(program: Program, rng: random.Random) -> Program | None:
    """Keeps all of a weight in a slot of its own.  That is legal if its readers wait for it, and none of them does."""
    if (node := _pick(program, rng, WAIT)) is None:
        return None
    name, graph = str(node.args[0]), program.module.graph
    for other in list(graph.nodes):
        if other.target in (PREFETCH, WAIT) and other.args[0] == name:
            graph.erase_node(other)
    plan = program.plan
    weights = tuple(
        replace(w, offset=plan.arena_bytes, windows=(None,) * len(w.windows)) if w.name == name else w
        for w in plan.weights
    )
    size = next(w.nbytes for w in plan.weights if w.name == name)
    return replace(program, plan=replace(plan, weights=weights, arena_bytes=plan.arena_bytes + align(size)))


def _with_offset(program: Program, name: str, offset: int) -> Program:
    weights = tuple(replace(w, offset=offset) if w.name == name else w for w in program.plan.weights)
    return replace(program, plan=replace(program.plan, weights=weights))


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
    remove_an_evict,
    evict_before_the_reader,
    another_slot,
    slot_off_by_a_line,
    swap_weights_of_regions,
    keep_every_chunk,
)
