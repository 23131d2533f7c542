"""Rewrite: turns a Cut and a Plan into the program, a top-level FX graph with transfer ops.

    prefetch = torch.ops.chunkflow.prefetch.default('blocks.1.ffn.0.weight', 0, 2, 3, False, 'copy', after=5, then=9)
    wait = torch.ops.chunkflow.wait.default(4, ('blocks.0.attn1.to_q.weight',))
    region_3 = self.lowered_1(view, blocks_0_attn1_to_q_weight)
    evict = torch.ops.chunkflow.evict.default('blocks.0.attn1.to_q.weight')

Contract
    On entry: a Cut and a Plan of its Problem.
    Preserved: the program has the same regions and collectives as the Cut, in the same order and with the same operands.
    Collectives keep their names from the source graph.
    Added: the transfer ops of the step (step.py) with their events, and the releases of values (lifetimes.py).
    A prefetch is placed where its window opens.  A wait is placed before the first reader of a weight or at a barrier, and an
    evict is placed after the last reader.  Structurally equal regions share one submodule.

:attr:`Program.ops` is the step, including releases, as it is read back from the graph.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from chunkflow_compile.passes.graph.discover import awaited, collective_kind, completes_itself, is_wait_tensor, list_of
from chunkflow_compile.passes.graph.listing import SLICING, listing
from chunkflow_compile.passes.graph.regions import Cut, CutRegion
from chunkflow_compile.passes.ops import transfer_of, unfolded, write
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.step import Evaluate, Finish, Op, Release, Run, Start, Step, Transfers, order, transfers

from .lifetimes import releases

# The key in a node's metadata for the name of the corresponding node in the source graph. verify identifies nodes by
# this name.
SOURCE = "chunkflow_source"


@dataclass(frozen=True)
class Program:
    """A rewritten graph.  ``module``: graph with the same placeholders as the traced graph, including the weights, in the
    same order.

    ``weight_inputs``: for each weight, the name of its placeholder.  ``regions``: for the name of each submodule, the region
    from which the submodule was made; equal regions share a submodule.  ``releases``: for each node, the names of the values
    that the executor drops there.  ``data_flow``: :attr:`Cut.data_flow`, with which verify compares the program.  ``start``:
    if the plan is for a cycle, the window of the plan that opens before the first region of this program.
    """

    module: GraphModule
    problem: Problem
    plan: Plan
    weight_inputs: Mapping[str, str]
    regions: Mapping[str, CutRegion]
    releases: Mapping[str, tuple[str, ...]]
    data_flow: Mapping[str, str]
    start: int = 0

    @property
    def offloaded(self) -> frozenset[str]:
        """The weights that are kept in host memory because this plan or another plan of the model streams them.  Under the
        policy "resident", there are no such weights."""
        if self.plan.policy == "resident":
            return frozenset()
        return frozenset(w.name for w in self.problem.weights if w.keep is None)

    def same_as(self, other: Program) -> bool:
        """Return whether two programs have the same regions and the same plan."""
        regions, others = self.problem.regions, other.problem.regions
        return self.plan == other.plan and [r.key for r in regions] == [r.key for r in others]

    @cached_property
    def ops(self) -> Step:
        """The ops that the program issues.  The ops are read from the graph only once, so the ops that are issued are the ops
        that were proved."""
        return tuple(op for _, ops in issued(self) for op in ops)

    def __str__(self) -> str:
        return listing(self.module)


@dataclass(frozen=True)
class CyclePlace:
    """The place of a program in a cycle.

    ``problem``: problem of the cut, with the names that weights have in the cycle.  ``names``: for each weight of the
    cut, its name in the cycle.  ``transfers``: transfer ops of the whole cycle.  ``start``: see :class:`Program`.
    ``collectives``: for each collective of the cut, its index in the cycle.
    """

    problem: Problem
    names: Mapping[str, str]
    transfers: Transfers
    start: int
    collectives: Mapping[str, int]


def rewrite(cut: Cut, plan: Plan, *, share: bool = True, place: CyclePlace | None = None) -> Program:
    """Build the program of ``cut`` under ``plan``.  ``share``: whether equal regions share one submodule.

    ``place``: place in the cycle, if the plan is for a cycle.  Raises ChunkflowError if the plan was made for another
    problem.
    """
    if place is None:
        plan.check_problem(cut.problem)
        names = {w.name: w.name for w in cut.problem.weights}
        collectives = {c.name: i for i, c in enumerate(cut.problem.collectives)}
        place = CyclePlace(cut.problem, names, transfers(order(cut.problem, plan)), 0, collectives)
    return _ProgramWriter(cut, plan, share, place).write()


class _ProgramWriter:
    def __init__(self, cut: Cut, plan: Plan, share: bool, place: CyclePlace) -> None:
        self.cut = cut
        self.plan = plan
        self.share = share
        self.place = place
        self.before, self.after = place.transfers
        self.graph = Graph()
        self.values: dict[Node, Node] = {}
        self.root: dict[str, object] = {}
        self.shared: dict[str, str] = {}
        self.inputs: set[str] = set()
        self.regions: dict[str, CutRegion] = {}
        self.weight_names = {w.node: place.names[w.parameter.name] for w in cut.discovery.weights}

    def write(self) -> Program:
        source, place = self.cut.source.graph, self.place
        for node in source.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr" and not isinstance(getattr(self.cut.source, str(node.target)), GraphModule):
                self.root[str(node.target)] = getattr(self.cut.source, str(node.target))
                self.values[node] = copy = self.graph.node_copy(node)
                copy.meta[SOURCE] = node.name
        for item in self.cut.sequence:
            if isinstance(item, CutRegion):
                self._region(item)
            else:
                if item.name in place.collectives:
                    write(self.graph, self.before[Start(place.collectives[item.name])])
                self.values[item] = copy = self.graph.node_copy(item, self.values.__getitem__)
                copy.meta[SOURCE] = item.name
        output = next(n for n in source.nodes if n.op == "output")
        self.graph.node_copy(output, self.values.__getitem__)
        self.graph.lint()
        # a lazy module generates no Python code; the executor needs none, because it runs the graph node by node
        module = _LazyGraphModule(self.root, self.graph, class_name="ChunkflowProgram")
        names = {name: str(self.values[node].name) for node, name in self.weight_names.items()}
        dropped, flow = releases(self.graph), self.cut.data_flow
        return Program(module, place.problem, self.plan, names, self.regions, dropped, flow, place.start)

    def _placeholder(self, node: Node) -> None:
        name = self.weight_names.get(node)
        target = _identifier(name) if name else node.name
        while target in self.inputs:  # the identifiers of weights a.b and a_b are both a_b
            target += "_"
        self.inputs.add(target)
        new = self.graph.placeholder(target)
        new.meta = {**node.meta, SOURCE: node.name}
        self.values[node] = new

    def _region(self, region: CutRegion) -> None:
        run = Run(self.place.start + region.info.index)
        write(self.graph, self.before[run])
        key = region.info.key if self.share else region.info.name
        target = self.shared.setdefault(key, f"lowered_{len(self.shared)}")
        if target not in self.root:
            self.root[target] = region.module
            self.regions[target] = region
        inputs = tuple(self.values[n] for n in region.inputs)
        call = self.graph.create_node("call_module", target, inputs, name=region.info.name)
        if region.slicing is not None:
            call.meta[SLICING] = region.slicing
        for position, value in enumerate(region.outputs):
            element = self.graph.create_node("call_function", operator.getitem, (call, position), name=value.name)
            element.meta = {**value.meta, SOURCE: value.name}
            self.values[value] = element
        write(self.graph, self.after[run])


def _identifier(name: str) -> str:
    identifier = re.sub(r"\W|^(?=\d)", "_", name)
    return f"{identifier}_" if keyword.iskeyword(identifier) else identifier


def issued(program: Program) -> Iterator[tuple[Node, Step]]:
    """Yield every node of a program with the ops that it stands for.  Inputs have no ops.

    The indices of regions and collectives are positions in ``program.problem``, or -1 if the problem does not contain
    them.  Windows and events are numbered as in the plan.  The Release of a node is its last op, but the Release of a region
    comes before its Run.
    """
    regions = {r.name: r.index for r in program.problem.regions}
    collectives = {c.name: i for i, c in enumerate(program.problem.collectives)}
    opened = set[int]()
    for node in program.module.graph.nodes:
        ops: list[Op] = []
        if (transfer := transfer_of(node)) is not None:
            ops += unfolded(transfer, opened)
        elif collective_kind(node) is not None:
            index = collectives.get(source_of(node), -1)
            ops += (Start(index), Finish(index)) if completes_itself(node) else (Start(index),)
        elif is_wait_tensor(node) and (ended := awaited(node)):
            ops += (Finish(collectives.get(source_of(collective), -1)) for collective in ended)
        elif node.op == "call_module":
            ops.append(Run(regions.get(node.name, -1)))
        elif node.op != "placeholder":
            ops.append(Evaluate("compute" if list_of(node) is None else "collective", node.name))
        if values := program.releases.get(node.name):
            ops.insert(0 if node.op == "call_module" else len(ops), Release(values))
        yield node, tuple(ops)


def source_of(node: Node) -> str:
    """Return the name of the node of the traced graph from which ``node`` was made."""
    return str(node.meta.get(SOURCE, node.name))
