"""Pack: chosen weights come into their regions packed, and are unpacked there before they are read.

Contract
    On entry: a Cut, and names of weights that :func:`packable` returns for it.  The Cut is not changed.
    Preserved: what each region computes.  Regions that read none of the weights are the same ones.
    On exit: a packed weight has the bytes of its packed form.  The region that reads it takes that form, and has an
    ``unpack`` before its readers (passes/packing.py), with its cost.  Equal regions that unpack the same inputs stay equal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from chunkflow_compile.passes.packing import UNPACK, Layout, can_pack
from chunkflow_compile.passes.problem import Region, RegionCost

from .discover import nbytes
from .keys import structural_key
from .regions import Cut, CutRegion, cost_at, problem_at


def takes_packed(cut: Cut) -> frozenset[str]:
    """The weights that a graph can take packed: streamed, bfloat16, contiguous, read by one region, and not small.

    One that several regions read would be unpacked by each.
    """
    once = {w.name for w in cut.problem.weights if w.keep is None and len(w.uses) == 1}
    values = {w.parameter.name: w.node.meta["val"] for w in cut.discovery.weights}
    return frozenset(name for name in once if can_pack(values[name], values[name].dtype))


def packable(cut: Cut) -> frozenset[str]:
    """Those of :func:`takes_packed` that are packed, or can be where they lie."""
    return takes_packed(cut) & {w.parameter.name for w in cut.discovery.weights if w.parameter.compressible}


def packed(cut: Cut, names: Collection[str]) -> Cut:
    """The cut with these weights packed, and no others."""
    cut = cut.raw or cut
    if not names:
        return cut
    traced = cut.traced
    nodes = {w.node: nbytes(w.node) for w in cut.discovery.weights if w.parameter.name in names}
    weights = tuple(w.with_source(values=nodes.get(w.node, 0)) for w in cut.discovery.weights)
    discovery = replace(cut.discovery, weights=weights)
    done: dict[object, tuple[GraphModule, str, RegionCost]] = {}
    regions = dict[str, CutRegion]()
    for region in cut.regions:
        places = tuple(i for i, node in enumerate(region.inputs) if node in nodes)
        if not places:
            regions[region.info.name] = region
            continue
        unpacking = done.get((region.info.key, places))
        if unpacking is None:
            module = _unpacking(region.module, places)
            key = structural_key(module, region.info.index)
            unpacking = done[region.info.key, places] = module, key, cost_at(module, traced)
        module, key, cost = unpacking
        info = replace(region.info, key=key, cost=cost, nodes=region.info.nodes + len(places))
        regions[region.info.name] = replace(region, info=info, module=module)
    sequence = tuple(regions[item.info.name] if isinstance(item, CutRegion) else item for item in cut.sequence)
    ordered: Sequence[Region] = [regions[region.info.name].info for region in cut.regions]
    problem = problem_at(traced, discovery, ordered, sequence)
    return Cut(traced, discovery, tuple(regions[r.name] for r in ordered), sequence, problem, cut.storages, cut)


def _unpacking(module: GraphModule, places: Sequence[int]) -> GraphModule:
    """A region whose inputs at these places are packed."""
    graph, copies = Graph(), dict[Node, Node]()
    inputs = module.graph.find_nodes(op="placeholder")
    chosen = [inputs[place] for place in places]
    for node in module.graph.nodes:
        copies[node] = copied = graph.node_copy(node, copies.__getitem__)
        if node in chosen:
            value: torch.Tensor = node.meta["val"]
            copied.meta["val"] = value.new_empty(Layout.of(value.numel()).words, dtype=torch.int32)
    for node in chosen:
        before = copies[node]
        with graph.inserting_before(next(iter(before.users))):  # as late as it can be: values take memory from here on
            values = graph.call_function(UNPACK, (before, list(node.meta["val"].shape)))
        values.meta["val"] = node.meta["val"]
        before.replace_all_uses_with(values, delete_user_cb=lambda user: user.target is not UNPACK)
    graph.lint()
    return GraphModule(module, graph)
