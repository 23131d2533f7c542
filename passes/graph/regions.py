"""Regions: cuts an ATen graph into regions, with the collectives between them.

Contract
    On entry: an ATen inference graph and its Discovery.  The graph is not changed.
    Preserved: every node is computed once, except for two kinds of values.  A view of a weight or of a collective's result is
    computed in each region that reads it: views cost nothing, and a view of a weight is not valid after the weight has left
    its slot.  Values that are cheaper to recompute than to pass between regions may also be computed in several regions
    (recompute.py).  The order of collectives does not change.
    On exit: the graph is cut at collectives, at the borders of blocks, and before an op whose weights would make the region
    read more than ``group_bytes`` bytes of streamed weights.  If ``groups`` are given, the regions of each group become one
    region (coarsen.py chooses the groups).

Steps
    assign        divide the compute nodes into segments, in program order; each segment becomes a region
    dissolve      move segments that contain only views into neighbouring segments
    recompute     make each segment recompute values that are cheaper to recompute than to pass between regions
    merge         merge the segments of each group
    find_symbols  find the symbols that occur in the sizes of a segment's tensors; they become inputs of the region
    _build        build one FX graph per segment, with inputs in order of first use and outputs in order of definition.  The
                  key of a region is a digest of this graph.  Regions with equal keys are lowered once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    is_wait_tensor,
    nbytes,
    viewed,
)
from .exchanges import groups_of
from .keys import structural_key
from .segments import Segments, reads_from_outside
from .slice_graphs import Slice
from .symbolic_sizes import concrete
from .traced import Traced


@dataclass(frozen=True)
class Slicing:
    """The slices that a region reads and writes if it runs once per slice.  ``repeat``: number of runs.  ``inputs``: for each
    input, the slice that a run takes, or None if every run takes the whole input.

    ``writes``: for each output, the slice that a run writes, and the position of the input that the output overwrites (None
    if the output has separate memory).  The region's code takes as arguments the inputs of the region, and then the slices of
    the outputs that have separate memory.  The code returns nothing.  If ``repeat`` is 1, the code may return the outputs
    instead of writing them, and ``writes`` is then empty.
    """

    repeat: int
    inputs: tuple[Slice | None, ...]
    writes: tuple[tuple[Slice, int | None], ...]


@dataclass(frozen=True)
class CutRegion:
    """A region as a graph.  ``inputs`` and ``outputs``: nodes of the source graph, in the order in which ``module`` takes
    and returns their values.

    ``slicing``: the slices that the region reads and writes if it runs once per slice (split.py), otherwise None.  If it is
    set, ``module`` is the graph of a single run.
    """

    info: Region
    module: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    slicing: Slicing | None = None


@dataclass(frozen=True)
class Cut:
    """A graph that was cut into regions and top-level nodes.  Top-level nodes are collectives and their completions.  At a
    completion, compute waits for the end of a collective.

    ``sequence``: regions and top-level nodes, in program order.  ``storages``: memory of the graph's values.  ``raw``: the
    same cut without packed weights, or None if no weight is packed.  ``recomputed``: nodes that regions recompute, because
    passing their values between regions would cost more.  ``whole``: the same cut without split regions, or None if no
    region is split into slices.
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
        """The names of the weights that are sharded over the devices of the ranks."""
        return frozenset(w.parameter.name for w in self.discovery.weights if w.parameter.source.sharded)

    def at(self, traced: Traced) -> Cut:
        """Return the same cut with the costs and activation sizes for other input sizes.  ``traced``: the same graph, traced
        for these input sizes."""
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
        """A mapping from the name of each input, region, output, constant and top-level node to a line of text.  The line
        contains the called function and its operands.  program/verify.py checks that a program has the same lines."""
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
    """Return a line of :attr:`Cut.data_flow`, which describes the call of ``target`` on ``operands``."""
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

    ``group_bytes``: maximum bytes of streamed weights per region, unless a single op reads more.  ``dissolve_views``:
    whether segments that contain only views are moved into neighbouring regions.  ``recompute``: whether regions recompute
    values that are cheaper to recompute than to pass between regions.  ``groups``: groups of region indices; the regions of
    one group are merged into a single region.  If ``groups`` is empty, no regions are merged.

    Raises ChunkflowError if the graph contains no compute nodes.
    """
    graph = traced.graph
    segments = Segments(graph, discovery, traced.blocks, group_bytes)
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
    """Make a Cut from the regions and top-level nodes of a traced graph, and set the activation peak of each region.
    ``recomputed``, ``whole``: see :class:`Cut`."""
    storages = _storages_at(traced, discovery, sequence)
    peaks = iter(live_of(storages, sequence).peaks)
    sequence = [
        replace(item, info=replace(item.info, live=next(peaks))) if isinstance(item, CutRegion) else item
        for item in sequence
    ]
    regions = tuple(item for item in sequence if isinstance(item, CutRegion))
    problem = problem_at(traced, discovery, [r.info for r in regions], sequence)
    return Cut(traced, discovery, regions, tuple(sequence), problem, storages, recomputed=recomputed, whole=whole)


def _build(
    traced: Traced, index: int, nodes: Sequence[Node], segments: Segments, costs: dict[str, RegionCost]
) -> CutRegion:
    """Build a region from the nodes of a segment.  ``costs``: costs of the regions that were already built, by region key.
    If the key of this region is not in ``costs``, its cost is added."""
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
        n for n in nodes if n in segments.sent or any(reads_from_outside(u, members, segments) for u in n.users)
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
    """Return the cost of a region for the input sizes in ``traced``.  If the region runs once per slice, the result is the
    cost of all runs together."""
    values = {n: concrete(n.meta.get("val"), traced.sizes) for n in module.graph.nodes}
    cost, repeat = region_cost(values, traced.fused), 1 if slicing is None else slicing.repeat
    tiles = () if slicing is None else _times(gemm_tiles(values), repeat)
    of_group = _times(attention_tiles(values), repeat) if groups_of(module.graph.nodes) > 1 else ()
    return replace(cost.repeated(repeat), tiles=tiles, attention_tiles=of_group)


def _times(tiles: tuple[tuple[int, int], ...], repeat: int) -> tuple[tuple[int, int], ...]:
    return tuple((count, flops * repeat) for count, flops in tiles)


def _storages_at(traced: Traced, discovery: Discovery, sequence: Iterable[CutRegion | Node]) -> Storages:
    """Return the Storages of a traced graph.  A split region may return an incomplete value, of which later regions write the
    rest.  The Storages include incomplete values, although the graph contains no nodes for them."""
    regions = [item for item in sequence if isinstance(item, CutRegion)]
    nodes = dict.fromkeys((*traced.graph.graph.nodes, *(node for region in regions for node in region.outputs)))
    values = {n: concrete(n.meta.get("val"), traced.sizes) for n in nodes}
    own = frozenset(node for region in regions for node in _allocated(region))
    return Storages(values, frozenset(w.node for w in discovery.weights), traced.fused, own)


def _allocated(region: CutRegion) -> Iterable[Node]:
    """Return the outputs of a region with ``slicing``, except for outputs that the region returns as views of its inputs.  In
    the traced graph, the nodes of these outputs may be views."""
    if region.slicing is None:
        return ()
    if region.slicing.writes:
        return region.outputs
    results = region.module.graph.output_node().all_input_nodes
    return (n for n, made in zip(region.outputs, results, strict=True) if viewed(made).op != "placeholder")


def problem_at(
    traced: Traced, discovery: Discovery, regions: Sequence[Region], sequence: Sequence[CutRegion | Node]
) -> Problem:
    """Return the Problem for a sequence of regions and collectives, with the input sizes in ``traced``."""
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
            until=awaited.get(node, at),  # a synchronous collective has no completion
            ranks=traced.ranks[group_name(node)],
            engine=engine_of(node),
        )
        for node, at in started
    ]
    return Problem(
        regions=tuple(regions), collectives=tuple(collectives), weights=tuple(weights), ranks=traced.together
    )
