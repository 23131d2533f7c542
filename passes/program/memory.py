"""Memory: determines in which memory each value of a program may be stored, and which nodes read or write this memory.

The schema of an op says which operands it writes to.  An op without a schema, such as ``cond``, is assumed to write to all of
its operands if one of its nested graphs writes to an input.  For a call of a user's kernel, Triton finds the writes in the
source of the kernel.  Graphs that AOTAutograd traced for inference are functional, so they contain no writes.  A graph that
was built by hand may contain writes, for example by a collective that writes to its input buffer (``all_reduce_``).  Inductor
adds no writes: it writes to an input of a region only if the region's graph does.

Contract
    The functions read only a program.  If it is not known whether two values share memory, they are assumed to share it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from chunkflow_compile.passes.graph.discover import collective_kind, is_view, is_wait_tensor, list_of
from chunkflow_compile.passes.graph.regions import CutRegion
from chunkflow_compile.passes.kernel_calls import is_kernel_call, returns_copies, written_by

from .rewrite import Program


@dataclass(frozen=True)
class Uses:
    """The memory that a node uses.  ``reads``: memory that it reads.  ``writes``: memory that it writes to or allocates for
    its results.

    A collective uses all of this memory from its start to its end.
    """

    reads: frozenset[str]
    writes: frozenset[str]


@dataclass(frozen=True)
class Memory:
    """The memory of the values of a program.  ``of``: for each value, the memory in which it may be stored.  ``uses``:
    for each region, collective or other top-level op, the memory that it uses.

    A piece of memory has the name of the node that allocates it.  If a region allocates it, the name consists of the name
    of the region and the name of the node in the region.
    """

    of: Mapping[str, frozenset[str]]
    uses: Mapping[str, Uses]


@dataclass(frozen=True)
class Effects:
    """The effects of a region on memory.  The memory of an input is identified by the position of the input.  Memory that the
    region allocates is identified by a name, for example the name of the node that allocates it.

    ``outputs``: for each output, the memory in which it may be stored.  ``writes``: positions of the inputs to which the
    region writes.
    """

    outputs: tuple[frozenset[int | str], ...]
    writes: frozenset[int]


def program_memory(program: Program) -> Memory:
    """Return the memory of every value of a program, and the uses of this memory."""
    slots = {program.weight_inputs[w.name] for w in program.plan.streamed if w.name in program.weight_inputs}
    effects = {target: _effects(region) for target, region in program.regions.items()}
    of = {node.name: frozenset({node.name}) for node in program.module.graph.nodes}
    uses: dict[str, Uses] = {}
    for node in program.module.graph.nodes:
        taken = _union(of[n.name] for n in node.all_input_nodes)
        if node.op == "call_module" and (effect := effects.get(str(node.target))):
            written = [a for i, a in enumerate(node.args) if i in effect.writes and isinstance(a, Node)]
            allocated = frozenset(f"{node.name}.{n}" for places in effect.outputs for n in places if isinstance(n, str))
            uses[node.name] = Uses(taken, allocated | _union(of[n.name] for n in written))
        elif node.op != "call_function":
            continue
        elif node.target is operator.getitem and node.all_input_nodes[0].op == "call_module":
            # an output cannot be stored in a slot, because the executor would copy it to other memory
            of[node.name] = _output(node, effects, of) - slots or of[node.name]
        elif is_wait_tensor(node) or list_of(node) is not None:
            of[node.name] = taken  # the node allocates nothing: its value is a result of the collective
        else:
            of[node.name] = _result_memory(node, of[node.name], {n: of[n.name] for n in node.all_input_nodes})
            allocated = of[node.name] if collective_kind(node) is not None else frozenset()
            uses[node.name] = Uses(
                taken, allocated | _union(of[n.name] for n in _written_operands(node, program.module))
            )
    return Memory(of, uses)


def _output(node: Node, effects: Mapping[str, Effects], of: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the memory of an output of a region."""
    call, position = node.all_input_nodes[0], node.args[1]
    outputs = effects[str(call.target)].outputs if str(call.target) in effects else ()
    if not isinstance(position, int) or position >= len(outputs):
        return of[node.name]
    memory: set[str] = set()
    for place in outputs[position]:
        operand = call.args[place] if isinstance(place, int) and place < len(call.args) else None
        memory |= of[operand.name] if isinstance(operand, Node) else {f"{call.name}.{place}"}
    return frozenset(memory)


def _effects(region: CutRegion) -> Effects:
    if region.slicing is None or not region.slicing.writes:
        return effects_of(region.module)
    overwritten = [over for _, over in region.slicing.writes]
    outputs = tuple(frozenset({f"out_{i}" if over is None else over}) for i, over in enumerate(overwritten))
    return Effects(outputs, frozenset(over for over in overwritten if over is not None))


def effects_of(module: GraphModule) -> Effects:
    """Return the effects on memory of a region, or of a graph that is nested in a region."""
    of: dict[Node, frozenset[int | str]] = {}
    writes: set[int] = set()
    results: Any = ()
    inputs = 0
    for node in module.graph.nodes:
        of[node] = frozenset({node.name})
        if node.op == "placeholder":
            of[node] = frozenset({inputs})
            inputs += 1
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args
        elif node.op != "get_attr":
            of[node] = _result_memory(node, of[node], of)
            writes.update(i for n in _written_operands(node, module) for i in of[n] if isinstance(i, int))
    outputs = tuple(of[r] if isinstance(r, Node) else frozenset[int | str]() for r in results)
    return Effects(outputs, frozenset(writes))


def _result_memory(node: Node, own: frozenset[Any], of: Mapping[Node, frozenset[Any]]) -> frozenset[Any]:
    """Return the memory in which the result of an op may be stored.  ``own``: memory that the op may allocate.  ``of``:
    memory of its operands."""
    target: Any = node.target
    if is_view(node) or target is operator.getitem:
        return _union(of[n] for n in _marked(node) or node.all_input_nodes)
    if returns_copies(node):
        return own
    if not isinstance(target, torch._ops.OpOverload):
        return own | _union(of[n] for n in node.all_input_nodes)
    if all(result.alias_info is None for result in target._schema.returns):
        return own
    return own | _union(of[n] for n in _marked(node))


def _written_operands(node: Node, module: GraphModule) -> list[Node]:
    """Return the operands that an op writes to, according to its schema.

    For an op with nested graphs and without a schema, return all operands if a nested graph writes to an input,
    otherwise none.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        return _marked(node, write=True)
    if is_kernel_call(node):
        return written_by(node)
    nested = [getattr(module, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
    if any(effects_of(graph).writes for graph in nested if isinstance(graph, GraphModule)):
        return [n for n in node.all_input_nodes if n.op != "get_attr"]
    return []


def _marked(node: Node, write: bool = False) -> list[Node]:
    """Return the operands with which a result of an op may share memory, according to the op's schema.  ``write``: whether
    to return only the operands to which the op writes."""
    marked: list[Node] = []
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return marked
    for position, argument in enumerate(target._schema.arguments):
        alias = argument.alias_info
        if alias is not None and (alias.is_write or not write):
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            map_arg(value, marked.append)
    return marked


def _union(sets: Iterable[frozenset[Any]]) -> frozenset[Any]:
    nothing: frozenset[Any] = frozenset()
    return nothing.union(*sets)
