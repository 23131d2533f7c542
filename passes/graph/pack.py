"""Pack: changes regions so that they take selected weights in packed form and unpack them before their first use.

Contract
    On entry: a Cut, and names of weights that :func:`packable` returns for this Cut.  The Cut is not changed.
    Preserved: the results of each region.  Regions that read none of the selected weights are not replaced.
    On exit: ``nbytes`` of a packed weight is the size of its packed form.  The region that reads the weight takes the
    packed form as an input, and unpacks it (passes/packing.py) before the first op that reads the weight.  The cost of the
    region includes unpacking.  If equal regions unpack the same inputs, the new regions are equal, too.
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
    """Return the weights that a graph can take in packed form: weights that may be streamed, are bfloat16, contiguous and
    not small, and are read by only one region.  A weight that several regions read is left out, because each of these
    regions would have to unpack it.
    """
    once = {w.name for w in cut.problem.weights if w.keep is None and len(w.uses) == 1}
    values = {w.parameter.name: w.node.meta["val"] for w in cut.discovery.weights}
    return frozenset(name for name in once if can_pack(values[name], values[name].dtype))


def packable(cut: Cut) -> frozenset[str]:
    """Return the weights from :func:`takes_packed`, except for weights whose values are known to be incompressible."""
    return takes_packed(cut) & {w.parameter.name for w in cut.discovery.weights if w.parameter.compressible}


def packed(cut: Cut, names: Collection[str]) -> Cut:
    """Return the cut in which exactly the weights ``names`` are packed."""
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
            key = structural_key(module, region.info.index, region.slicing)
            unpacking = done[region.info.key, places] = module, key, cost_at(module, traced, region.slicing)
        module, key, cost = unpacking
        info = replace(region.info, key=key, cost=cost, nodes=region.info.nodes + len(places))
        regions[region.info.name] = replace(region, info=info, module=module)
    sequence = tuple(regions[item.info.name] if isinstance(item, CutRegion) else item for item in cut.sequence)
    ordered: Sequence[Region] = [regions[region.info.name].info for region in cut.regions]
    problem = problem_at(traced, discovery, ordered, sequence)
    return replace(
        cut,
        discovery=discovery,
        regions=tuple(regions[r.name] for r in ordered),
        sequence=sequence,
        problem=problem,
        raw=cut,
    )


def _unpacking(module: GraphModule, places: Sequence[int]) -> GraphModule:
    """Return a copy of a region's graph in which the inputs at the positions ``places`` are packed."""
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
        # unpack directly before the first reader, because the unpacked values need memory from then on
        with graph.inserting_before(next(iter(before.users))):
            values = graph.call_function(UNPACK, (before, list(node.meta["val"].shape)))
        values.meta["val"] = node.meta["val"]
        before.replace_all_uses_with(values, delete_user_cb=lambda user: user.target is not UNPACK)
    graph.lint()
    return GraphModule(module, graph)
