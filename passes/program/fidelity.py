"""Fidelity: checks that a program computes the same as the traced graph, in the same order and from the same values.

Contract
    The checks read only programs, and do not trust the passes that made them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, MutableMapping

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from chunkflow_compile.passes.graph.discover import collective_kind
from chunkflow_compile.passes.graph.keys import structural_key
from chunkflow_compile.passes.graph.regions import flow_line
from chunkflow_compile.passes.kernel_calls import kernel_name, written_by
from chunkflow_compile.passes.names import LANES
from chunkflow_compile.passes.ops import transfer_of
from chunkflow_compile.passes.step import weights_of

from .memory import Memory
from .rewrite import Program, issued, source_of


def check_order(program: Program) -> Iterator[str]:
    """Check that the program has the same regions, weights and collectives as the traced graph, in the same order."""
    nodes = program.module.graph.nodes
    calls = [n for n in nodes if n.op == "call_module"]
    regions, expected = [n.name for n in calls], [r.name for r in program.problem.regions]
    if regions != expected:
        yield _first_difference("region", expected, regions)
    weights = {placeholder: name for name, placeholder in program.weight_inputs.items()}
    for call, region in zip(calls, program.problem.regions, strict=False):
        reads = tuple(dict.fromkeys(weights[str(a)] for a in call.args if str(a) in weights))
        if call.name == region.name and reads != region.weights:
            ours, theirs = (", ".join(names) or "no weight" for names in (reads, region.weights))
            yield f"{region.name} reads {ours}, but the traced graph has {theirs} there"
    collectives = [source_of(n) for n in nodes if collective_kind(n) is not None]
    expected = [c.name for c in program.problem.collectives]
    if collectives != expected:
        yield _first_difference("collective", expected, collectives)


def check_readers(program: Program, memory: Memory) -> Iterator[str]:
    """Check the ops that use streamed weights:

    * Only regions read streamed weights: waits and evicts are placed around regions only, so any other reader would not be
      ordered with the copies.
    * No region writes to a streamed weight: the next copy from host memory would undo the write.
    * Only streamed weights are copied, waited for or evicted, and each copy is in the lane that the plan assigns to the
      weight.
    """
    moved = {w.name for w in program.plan.streamed}
    streamed = {place: name for name, place in program.weight_inputs.items() if name in moved}
    for node, ops in issued(program):
        for op in ops:
            for weight in weights_of(op):
                if weight not in moved:
                    yield f"{weight}: {node.name} moves it, but it is not streamed"
                elif op.stream in LANES and op.stream != program.plan.lane(weight):
                    yield f"{weight}: {node.name} copies it in lane {op.stream!r}, but the plan has another"
    for node in program.module.graph.nodes:
        if node.op == "placeholder" and node.name in streamed:
            for user in node.users:
                if user.op != "call_module":
                    yield f"{streamed[node.name]}: {user.name} reads it outside a region"
    for name, uses in memory.uses.items():
        for place in sorted(place for place in uses.writes if place in streamed):
            by = _kernels(program, name)
            yield f"{streamed[place]}: {name}{by} writes it, but its slot is filled from host memory only"


def _kernels(program: Program, name: str) -> str:
    """Return a phrase that names the user's kernels with which a region writes to its inputs.  The phrase is empty if
    there are none."""
    call = next(n for n in program.module.graph.nodes if n.name == name)
    region = program.regions.get(str(call.target))
    nodes = () if region is None else region.module.graph.nodes
    kernels = dict.fromkeys(kernel_name(n) for n in nodes if written_by(n))
    return f" (by the kernel {', '.join(kernels)})" if kernels else ""


def check_operands(program: Program) -> Iterator[str]:
    """Check that every operand comes before its readers.  The other checks rely on this order, because they follow operands
    to their origin."""
    before = set[Node]()
    for node in program.module.graph.nodes:
        for operand in node.all_input_nodes:
            if operand not in before:
                yield f"{node.name} takes {operand.name}, which comes only after it"
        before.add(node)


def check_data_flow(program: Program, keys: MutableMapping[GraphModule, str]) -> Iterator[str]:
    """Check that every node of the program, except transfers, is the same as in the traced graph, with the same operands.

    ``keys``: cache of the structural keys of regions, by the module of the region; several calls of this function can share
    it.
    """
    for target, region in program.regions.items():
        held = getattr(program.module, target)
        if held not in keys:
            keys[held] = structural_key(held, region.info.index, region.slicing)
        if keys[held] != region.info.key:
            yield f"{target} holds other code than its region"
    inputs = {node: i for i, node in enumerate(program.module.graph.find_nodes(op="placeholder"))}
    seen = set[str]()
    for node in program.module.graph.nodes:
        if transfer_of(node) is not None:
            continue
        name = source_of(node)
        seen.add(name)
        line = flow_line("input", inputs[node]) if node in inputs else _flow(program, node)
        expected = program.data_flow.get(name)
        if line != expected:
            yield f"{name} is {line}, but the traced graph has {expected}"
    for name in sorted(program.data_flow.keys() - seen):
        yield f"{name} of the traced graph is missing"


def _flow(program: Program, node: Node) -> str:
    """Return the line that describes a node, in the format of :meth:`Cut.data_flow`."""
    if node.op == "get_attr":
        return flow_line("constant", str(node.target))
    if node.op == "output":
        return flow_line("return", map_arg(node.args, source_of))
    if node.op == "call_module":
        region = program.regions.get(str(node.target))
        operands = [
            source_of(a) if isinstance(a, Node) else f"the value {a!r}" for a in (*node.args, *node.kwargs.values())
        ]
        return flow_line(region.info.key if region else "?", operands)
    if node.target is operator.getitem and node.all_input_nodes[0].op == "call_module":
        return flow_line("output", [source_of(node.all_input_nodes[0]), node.args[1]])
    return flow_line(str(node.target), map_arg((node.args, dict(node.kwargs)), source_of))


def _first_difference(what: str, expected: list[str], actual: list[str]) -> str:
    for position, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            return f"{what} {position} is {b}, but the traced graph has {a} there: ranks would meet in the wrong order"
    return f"the program has {len(actual)} {what}s, the traced graph has {len(expected)}"
