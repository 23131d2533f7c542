"""Regions: cut an ATen graph into regions of pure compute, with the collectives between them.

Contract
    On entry: an ATen inference graph and its Discovery.  The graph is not changed.
    Preserved: every node is computed once, except views of weights and of collective results.  These are repeated in
    each region that reads them: they cost nothing, and a view that outlived its region would outlive its slot.  So are
    values that are cheaper to compute again than to hand over (recompute.py).  The order of collectives is that of the graph.
    Cuts: at collectives, where the block changes, and before a weight that would bring a region above ``group_bytes``
    of weights.  A group of regions of such a cut becomes one region (coarsen.py chooses which).

Steps
    assign        give every compute node a segment number, in program order
    dissolve      move segments that hold only views into the regions around them
    recompute     let each segment compute what is cheaper to compute again than to hand over
    sizes         give each region the symbols that its sizes use
    build         build one FX graph per segment; inputs in order of first use, outputs in order of definition
    key           digest a region's structure; regions with equal keys share one lowering
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch.fx import Graph, GraphModule, Node

from chunkflow_compile.passes.cost.count import attention_tiles, gemm_tiles, region_cost
from chunkflow_compile.passes.cost.fusion import Storages
from chunkflow_compile.passes.cost.kernels import INLINED
from chunkflow_compile.passes.cost.live import live_of
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import DEFAULT_GROUP_BYTES
from chunkflow_compile.passes.packing import Layout
from chunkflow_compile.passes.problem import Collective, Problem, Region, RegionCost, Weight

from .discover import (
    Discovery,
    collective_kind,
    collective_of,
    crossing_bytes,
    engine_of,
    group_name,
    is_view,
    is_wait_tensor,
    nbytes,
    viewed,
)
from .exchanges import groups_of
from .keys import structural_key
from .recompute import to_recompute
from .sizes import concrete, is_size, symbol_nodes, symbols_of
from .slice_graphs import Slice
from .traced import Traced


@dataclass(frozen=True)
class Slicing:
    """How the values of a repeated region are taken.  ``repeat``: its calls.  ``inputs``: the slice of each input, None for
    one that every call takes whole.

    ``writes``: for each output its slice, and the position of the input that it overwrites, None for memory of its own.
    After its inputs, the region's code takes the slices of the outputs with memory of their own; it returns nothing.  Code
    that is called once may return its outputs: ``writes`` is empty then.
    """

    repeat: int
    inputs: tuple[Slice | None, ...]
    writes: tuple[tuple[Slice, int | None], ...]


@dataclass(frozen=True)
class CutRegion:
    """A region as a graph.  ``inputs`` and ``outputs``: nodes of the source graph, in the module's order.

    ``slicing``: if its code is called once for each slice of its values (split.py), which ``module`` is the graph of.
    """

    info: Region
    module: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    slicing: Slicing | None = None


@dataclass(frozen=True)
class Cut:
    """What was cut, its regions and its top-level nodes.

    ``sequence``: the regions, collectives and completions, in program order.  ``storages``: the memory of the graph's values.
    ``raw``: the same with no weight packed, if one is.  ``recomputed``: nodes that each region repeats, views of weights
    aside.  ``whole``: the same with no region split, if one is.
    """

    traced: Traced
    discovery: Discovery
    regions: tuple[CutRegion, ...]
    sequence: tuple[CutRegion | Node, ...]
    problem: Problem
    storages: Storages = field(compare=False, repr=False)
    raw: Cut | None = None
    recomputed: frozenset[Node] = frozenset()
    whole: Cut | None = None

    @property
    def source(self) -> GraphModule:
        """The graph that was cut."""
        return self.traced.graph

    @property
    def packed(self) -> frozenset[str]:
        """The names of the packed weights."""
        return frozenset(w.parameter.name for w in self.discovery.weights if w.parameter.source.compressed)

    @property
    def on_peers(self) -> frozenset[str]:
        """The names of the weights that lie in pieces on the devices of the ranks."""
        return frozenset(w.parameter.name for w in self.discovery.weights if w.parameter.source.sharded)

    def at(self, traced: Traced) -> Cut:
        """The cut of the same graph at other sizes: costs and bytes of activations are other ones.  The graph stays that of
        this cut."""
        if traced.graph is not self.traced.graph:
            traced = replace(traced, graph=self.traced.graph)
        regions = {region.info.key: region for region in self.regions}
        costs = {key: cost_at(region.module, traced, region.slicing) for key, region in regions.items()}
        storages = _storages_at(traced, self.discovery, self.sequence)
        peaks = live_of(storages, self.sequence).peaks
        infos = [
            replace(region.info, cost=costs[region.info.key], live=peak)
            for region, peak in zip(self.regions, peaks, strict=True)
        ]
        problem, raw = problem_at(traced, self.discovery, infos, self.sequence), self.raw
        raw = None if raw is None else raw.at(traced)
        return replace(self, traced=traced, problem=problem, storages=storages, raw=raw)

    @cached_property
    def data_flow(self) -> dict[str, str]:
        """Each input, region, output, constant and top-level node, by name -> what it calls and reads, as a line.

        A program has the same lines.
        """
        inputs = self.source.graph.find_nodes(op="placeholder")
        lines = {node.name: flow_line("input", position) for position, node in enumerate(inputs)}
        for node in self.source.graph.nodes:
            if node.op == "get_attr" and not isinstance(getattr(self.source, str(node.target)), GraphModule):
                lines[node.name] = flow_line("constant", str(node.target))
            elif node.op == "output":
                lines[node.name] = flow_line("return", torch.fx.map_arg(node.args, lambda n: n.name))
        for item in self.sequence:
            if isinstance(item, CutRegion):
                lines[item.info.name] = flow_line(item.info.key, [n.name for n in item.inputs])
                lines.update({n.name: flow_line("output", [item.info.name, i]) for i, n in enumerate(item.outputs)})
            else:
                operands = torch.fx.map_arg((item.args, dict(item.kwargs)), lambda n: n.name)
                lines[item.name] = flow_line(str(item.target), operands)
        return lines


def flow_line(target: str, operands: object) -> str:
    """One line of :meth:`Cut.data_flow`."""
    return f"{target} {operands!r}"


def cut(
    traced: Traced,
    discovery: Discovery,
    group_bytes: int = DEFAULT_GROUP_BYTES,
    *,
    dissolve_views: bool = True,
    recompute: bool = True,
    groups: Sequence[Sequence[int]] = (),
) -> Cut:
    """Cut a traced graph into regions.

    ``group_bytes``: most bytes of streamed weights in one region; only the weights of a single op may exceed it.
    ``dissolve_views``: whether segments that hold only views are moved into the regions around them.  ``recompute``: whether
    values that are cheaper to compute again are not handed over.  ``groups``: indices of the regions that would be cut, each
    of which becomes one region; empty for one each.
    Raises ChunkflowError if the graph holds no compute.
    """
    graph = traced.graph
    segments = _Segments(graph, discovery, traced.blocks, group_bytes)
    segments.assign()
    if dissolve_views:
        segments.dissolve()
    if traced.fused and recompute:
        segments.recompute(traced.sizes)
    segments.merge(groups)
    segments.find_symbols()
    regions: list[CutRegion] = []
    costs: dict[str, RegionCost] = {}
    sequence: list[CutRegion | Node] = []
    for item in segments.skeleton():
        if isinstance(item, Node):
            sequence.append(item)
            continue
        region = _build(traced, len(regions), item, segments, costs)
        regions.append(region)
        sequence.append(region)
    if not regions:
        raise ChunkflowError("The graph holds no compute: there is nothing to stream weights for.")
    return cut_into(traced, discovery, sequence, frozenset(segments.recomputed))


def cut_into(
    traced: Traced,
    discovery: Discovery,
    sequence: Sequence[CutRegion | Node],
    recomputed: frozenset[Node],
    whole: Cut | None = None,
) -> Cut:
    """The cut of a traced graph into these regions, which learn their peaks.  ``recomputed``, ``whole``: see :class:`Cut`."""
    storages = _storages_at(traced, discovery, sequence)
    peaks = iter(live_of(storages, sequence).peaks)
    sequence = [
        replace(item, info=replace(item.info, live=next(peaks))) if isinstance(item, CutRegion) else item
        for item in sequence
    ]
    regions = tuple(item for item in sequence if isinstance(item, CutRegion))
    problem = problem_at(traced, discovery, [r.info for r in regions], sequence)
    return Cut(traced, discovery, regions, tuple(sequence), problem, storages, recomputed=recomputed, whole=whole)


class _Segments:
    """The segment in which each node of the source graph is computed.  Top-level nodes have none."""

    def __init__(self, graph: GraphModule, discovery: Discovery, blocks: Mapping[str, str], group_bytes: int) -> None:
        self.graph = graph
        self.discovery = discovery
        self.blocks = blocks
        self.group_bytes = group_bytes
        self.of: dict[Node, int] = {}
        streamable = {w.node for w in discovery.weights if w.keep is None}
        self.lazy: dict[Node, None] = {v: None for v, w in discovery.weight_views.items() if w in streamable}
        self.lazy |= {n: None for n in graph.graph.nodes if is_size(n) and not self._needed_at_top_level(n)}
        self.recomputed = dict[Node, None]()
        self.block_of: dict[int, str] = {}
        self.symbols: dict[int, list[Node]] = {}
        self.sent: set[Node] = set()  # symbols that later segments need

    def assign(self) -> None:
        streamed = {w.node: nbytes(w.node) for w in self.discovery.weights if w.keep is None}
        labels = block_labels(self.graph, self.blocks)
        current, block, held, group = -1, "", dict[Node, None](), 0
        cut_here = True
        for node in self.graph.graph.nodes:
            if self.is_top_level(node):
                cut_here = cut_here or (node.op == "call_function")
                continue
            if node in self.lazy:
                continue
            if node.target is operator.getitem:
                self.of[node] = self.of[node.all_input_nodes[0]]
                continue
            here = labels[node]
            fresh = {w: streamed[w] for w in self._weights(node) if w in streamed and w not in held}
            full = bool(held) and bool(fresh) and group + sum(fresh.values()) > self.group_bytes
            if cut_here or here != block or full:
                current, block, held, group = current + 1, here, {}, 0
                self.block_of[current] = block
                fresh = {w: streamed[w] for w in self._weights(node) if w in streamed}
                cut_here = False
            held.update(dict.fromkeys(fresh))
            group += sum(fresh.values())
            self.of[node] = current

    def dissolve(self) -> None:
        """Move segments that hold only views into the regions around them; Ulysses has some between its all-to-alls."""
        for segment, nodes in self._members().items():
            if not all(is_view(n) for n in nodes):
                continue
            targets = {node: self._home_of_view(node, segment) for node in nodes}
            for node in nodes:
                base = node.all_input_nodes[0]
                if base in targets:
                    targets[node] = targets[base]
                elif base in self.lazy:
                    targets[node] = None
            if any(t is None and self._needed_at_top_level(n) for n, t in targets.items()):
                continue
            for node, target in targets.items():
                if target is None:
                    del self.of[node]
                    self.lazy[node] = None
                else:
                    self.of[node] = target

    def recompute(self, sizes: Mapping[str, int]) -> None:
        """Let each segment compute what is cheaper to compute again than to hand over.  ``sizes``: of the symbols."""
        streamed = {w.node for w in self.discovery.weights if w.keep is None}
        self.recomputed = to_recompute(self.graph.graph, self.of, self.lazy, streamed, sizes)
        self.lazy |= self.recomputed
        self.of = {node: segment for node, segment in self.of.items() if node not in self.recomputed}

    def merge(self, groups: Sequence[Sequence[int]]) -> None:
        """Make one segment of each group.  ``groups``: of positions among the segments, in program order."""
        segments = [self.of[item[0]] for item in self.skeleton() if not isinstance(item, Node)]
        first = {segments[i]: segments[group[0]] for group in groups for i in group}
        self.of = {node: first.get(segment, segment) for node, segment in self.of.items()}

    def find_symbols(self) -> None:
        """Find the nodes that have the values of the symbols in each segment's sizes.

        Inductor takes a symbol from the size of an input only where it is all of that size.
        """
        nodes = symbol_nodes(self.graph)
        needed: dict[int, set[str]] = {}
        for node, segment in self.of.items() if nodes else ():
            for value in self._with_operands(node):
                needed.setdefault(segment, set()).update(symbols_of(value.meta.get("val")))
        for segment, names in needed.items():
            used = [nodes[name] for name in sorted(names) if name in nodes]
            self.symbols[segment] = [n for n in used if self.of.get(n, -1) < segment]
            self.sent |= {n for n in self.symbols[segment] if n in self.of}

    def _with_operands(self, node: Node) -> Iterable[Node]:
        """A node and its operands, and those of the operands that its segment computes again."""
        yield node
        for operand in node.all_input_nodes:
            if operand in self.recomputed:
                yield from self._with_operands(operand)
            else:
                yield operand

    def skeleton(self) -> Iterable[list[Node] | Node]:
        """Segments (as lists of nodes) and collectives, in program order."""
        members = self._members()
        for node in self.graph.graph.nodes:
            if node.op == "call_function" and self.is_top_level(node):
                yield node
            elif nodes := members.pop(self.of.get(node, -1), None):
                yield nodes

    def _members(self) -> dict[int, list[Node]]:
        """The nodes of each segment, in program order."""
        members: dict[int, list[Node]] = {}
        for node, segment in self.of.items():
            members.setdefault(segment, []).append(node)
        return members

    def is_top_level(self, node: Node) -> bool:
        if node.op != "call_function":
            return True
        if node.target is operator.getitem:  # an element of a coalesced collective's list
            return self.is_top_level(node.all_input_nodes[0]) and node.all_input_nodes[0].op == "call_function"
        return collective_kind(node) is not None or is_wait_tensor(node)

    def _home_of_view(self, node: Node, segment: int) -> int | None:
        """The earlier segment that a view can move to; None if each region that reads it must repeat it."""
        home = self.of.get(node.all_input_nodes[0])
        return home if home != segment else None

    def _needed_at_top_level(self, node: Node) -> bool:
        return any(self.is_top_level(user) for user in node.users)

    def _weights(self, node: Node) -> tuple[Node, ...]:
        views = self.discovery.weight_views
        return tuple(dict.fromkeys(views.get(a, a) for a in node.all_input_nodes))


def block_labels(graph: GraphModule, blocks: Mapping[str, str]) -> dict[Node, str]:
    """The block of every call.

    A node without a module stack belongs to the root module or comes from functionalization: it is in a block if the
    nearest nodes with a stack, before and after it, both are.
    """
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    by_stack: dict[Node, str] = {}
    for node in calls:
        stack = node.meta.get("nn_module_stack") or {}
        keys = [str(k).split("@")[0] for k in stack]
        if keys:
            by_stack[node] = next((blocks[k] for k in keys if k in blocks), "")
    labels: dict[Node, str] = {}
    after = {}
    following = ""
    for node in reversed(calls):
        after[node] = following = by_stack.get(node, following)
    current = ""
    for node in calls:
        labels[node] = current = by_stack.get(node, current if current == after[node] else "")
    return labels


def _build(
    traced: Traced, index: int, nodes: Sequence[Node], segments: _Segments, costs: dict[str, RegionCost]
) -> CutRegion:
    """``costs``: of the regions before, by key."""
    graph, members = traced.graph, set(nodes)
    new = Graph()
    root: dict[str, object] = {}
    copies: dict[Node, Node] = {}
    inputs: dict[Node, Node] = {}

    def resolve(node: Node) -> Node:
        if node in copies:
            return copies[node]
        if node.op == "get_attr" and isinstance(getattr(graph, str(node.target)), GraphModule):
            root[str(node.target)] = getattr(graph, str(node.target))
            copies[node] = new.node_copy(node)
        elif node in segments.lazy:
            base = [resolve(a) for a in node.all_input_nodes]
            assert base, "a view has an input"
            copies[node] = new.node_copy(node, resolve)
            if node in segments.recomputed:
                copies[node].meta[INLINED] = True
        else:
            assert node not in members, "regions keep program order"
            computed = (n for n in new.nodes if n.op != "placeholder")
            with new.inserting_before(next(computed, new._root)):
                placeholder = new.placeholder(f"in_{len(inputs)}")
            placeholder.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
            copies[node] = inputs[node] = placeholder
        return copies[node]

    for node in segments.symbols.get(segments.of[nodes[0]], ()):
        resolve(node)
    for node in nodes:
        for argument in node.all_input_nodes:
            resolve(argument)
        copies[node] = new.node_copy(node, resolve)
    outputs = tuple(
        n for n in nodes if n in segments.sent or any(_reads_from_outside(u, members, segments) for u in n.users)
    )
    new.output(tuple(copies[n] for n in outputs))
    new.lint()
    module = GraphModule(root, new)
    key = structural_key(module, index)
    if key not in costs:
        costs[key] = cost_at(module, traced)
    weight_nodes = {w.node: w.parameter.name for w in segments.discovery.weights}
    info = Region(
        index=index,
        name=f"region_{index}",
        key=key,
        block=segments.block_of[segments.of[nodes[0]]],
        nodes=len(nodes),
        weights=tuple(weight_nodes[n] for n in inputs if n in weight_nodes),
        cost=costs[key],
        groups=groups_of(nodes),
    )
    return CutRegion(info, module, tuple(inputs), outputs)


def cost_at(module: GraphModule, traced: Traced, slicing: Slicing | None = None) -> RegionCost:
    """The cost of a region at the sizes of a traced graph: of all its calls, if it is repeated."""
    values = {n: concrete(n.meta.get("val"), traced.sizes) for n in module.graph.nodes}
    cost, repeat = region_cost(values, traced.fused), 1 if slicing is None else slicing.repeat
    tiles = () if slicing is None else _times(gemm_tiles(values), repeat)
    of_group = _times(attention_tiles(values), repeat) if groups_of(module.graph.nodes) > 1 else ()
    return replace(cost.repeated(repeat), tiles=tiles, attention_tiles=of_group)


def _times(tiles: tuple[tuple[int, int], ...], repeat: int) -> tuple[tuple[int, int], ...]:
    return tuple((count, flops * repeat) for count, flops in tiles)


def _storages_at(traced: Traced, discovery: Discovery, sequence: Iterable[CutRegion | Node]) -> Storages:
    """The memory of the values of a traced graph, at its sizes, and of those that only regions of this sequence have."""
    regions = [item for item in sequence if isinstance(item, CutRegion)]
    nodes = dict.fromkeys((*traced.graph.graph.nodes, *(node for region in regions for node in region.outputs)))
    values = {n: concrete(n.meta.get("val"), traced.sizes) for n in nodes}
    own = frozenset(node for region in regions for node in _allocated(region))
    return Storages(values, frozenset(w.node for w in discovery.weights), traced.fused, own)


def _allocated(region: CutRegion) -> Iterable[Node]:
    """The outputs of a split region that have memory of their own, whatever they view in the traced graph."""
    if region.slicing is None:
        return ()
    if region.slicing.writes:
        return region.outputs
    results = region.module.graph.output_node().all_input_nodes
    return (n for n, made in zip(region.outputs, results, strict=True) if viewed(made).op != "placeholder")


def _reads_from_outside(user: Node, members: set[Node], segments: _Segments) -> bool:
    if user in segments.lazy:
        return any(_reads_from_outside(u, members, segments) for u in user.users)
    return user not in members


def problem_at(
    traced: Traced, discovery: Discovery, regions: Sequence[Region], sequence: Sequence[CutRegion | Node]
) -> Problem:
    """The problem of these regions, in this sequence with collectives, at the sizes of a traced graph."""
    readers: dict[str, list[int]] = {}
    for region in regions:
        for name in region.weights:
            readers.setdefault(name, []).append(region.index)
    weights = []
    for discovered in discovery.weights:
        value, source = discovered.node.meta["val"], discovered.parameter.source
        weights.append(
            Weight(
                name=discovered.parameter.name,
                names=discovered.parameter.names,
                index=discovered.parameter.index,
                nbytes=Layout.of(value.numel()).nbytes if source.compressed else nbytes(discovered.node),
                dtype=str(value.dtype).removeprefix("torch."),
                shape=tuple(value.shape),
                stride=tuple(value.stride()),
                uses=tuple(readers.get(discovered.parameter.name, ())),
                keep=discovered.keep,
                source=source,
            )
        )
    before, started, awaited = 0, list[tuple[Node, int]](), dict[Node, int]()
    for item in sequence:
        if isinstance(item, CutRegion):
            before = item.info.index + 1
        elif collective_kind(item) is not None:
            started.append((item, before))
        elif is_wait_tensor(item):
            awaited.setdefault(collective_of(item), before)
    collectives = [
        Collective(
            name=node.name,
            kind=str(collective_kind(node)),
            nbytes=crossing_bytes(node, traced.ranks[group_name(node)], traced.sizes),
            before=at,
            until=awaited.get(node, at),  # some complete themselves
            ranks=traced.ranks[group_name(node)],
            engine=engine_of(node),
        )
        for node, at in started
    ]
    return Problem(
        regions=tuple(regions), collectives=tuple(collectives), weights=tuple(weights), ranks=traced.together
    )
