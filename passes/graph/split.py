"""Split: chosen regions become prologues, K and V, and bodies that are called once for each slice of the tokens.

Activations decide what fits a small GPU, and most of them are inside of a block: with its tokens in k slices, a block holds
its residual stream, K and V, and a k-th of everything else (slices.py).

Contract
    On entry: a Cut, and the number of slices by the key of a region.  The Cut is not changed.
    Preserved: what each region computes, to the bit in eager mode.  Other regions, collectives and their order are the same.
    On exit: a region that is split is several, its phases, in its place.  One that is repeated overwrites the residual stream
    where nothing else reads it: neither the caller of the graph nor a later region or collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from chunkflow_compile.passes.problem import Region

from .discover import collective_kind, is_view, is_wait_tensor, nbytes
from .keys import structural_key
from .regions import Cut, CutRegion, cost_at, problem_at
from .slices import Phase, Sliced, phases

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default)


def split(cut: Cut, repeats: Mapping[str, int]) -> Cut:
    """The cut with some of its regions split.  ``repeats``: key of a region -> the number of slices of its tokens.

    Raises Whole if one of them cannot be split into so many.
    """
    cut = cut.whole or cut
    owned = _owned(cut)
    made = dict[object, tuple[CutRegion, tuple[Phase, ...]]]()
    sequence, regions = list[CutRegion | Node](), list[CutRegion]()
    for item in cut.sequence:
        if isinstance(item, Node):
            sequence.append(item)
            continue
        new = [item]
        if (repeat := repeats.get(item.info.key, 1)) > 1:
            mine = owned[item.info.index]
            if (item.info.key, mine) not in made:
                made[item.info.key, mine] = item, phases(item.module, repeat, mine)
            new = [*_regions(cut, item, *made[item.info.key, mine])]
        for region in new:
            info = replace(region.info, index=len(regions), name=f"region_{len(regions)}")
            regions.append(replace(region, info=info))
            sequence.append(regions[-1])
    problem = problem_at(cut.traced, cut.discovery, [r.info for r in regions], sequence)
    return replace(
        cut, regions=tuple(regions), sequence=tuple(sequence), problem=problem, raw=None, whole=cut
    )


def _regions(cut: Cut, region: CutRegion, like: CutRegion, made: tuple[Phase, ...]) -> Iterator[CutRegion]:
    """The regions of a region.  ``like``: an equal region, of whose graph the phases are."""
    source = {node.name: node for node in cut.source.graph.nodes}
    mine = list(region.module.graph.nodes)
    of = dict(zip(region.module.graph.find_nodes(op="placeholder"), region.inputs, strict=True))
    of |= {node: source[node.name] for node in mine if node not in of and node.name in source}
    value = {theirs: of.get(node) for theirs, node in zip(like.module.graph.nodes, mine, strict=True)}
    weights = {w.node: w.parameter.name for w in cut.discovery.weights}
    for phase in made:
        sliced = None
        if phase.writes:
            sliced = Sliced(phase.repeat, phase.slices, tuple((w.slice, w.over) for w in phase.writes))
        inputs, outputs = (tuple(_found(value[node]) for node in nodes) for nodes in (phase.inputs, phase.outputs))
        info = Region(
            index=0,
            name="",
            key=structural_key(phase.module, region.info.index, sliced),
            block=region.info.block,
            nodes=sum(node.op == "call_function" for node in phase.module.graph.nodes),
            weights=tuple(weights[node] for node in inputs if node in weights),
            cost=cost_at(phase.module, cut.traced, sliced),
            repeat=phase.repeat,
        )
        yield CutRegion(info, phase.module, inputs, outputs, sliced)


def _found(node: Node | None) -> Node:
    assert node is not None, "what phases hand over is a value of the traced graph"
    return node


def _owned(cut: Cut) -> list[frozenset[int]]:
    """For each region, the positions of the inputs in whose memory nothing is read later, and which a region has allocated."""
    last = dict[Node, int]()
    for place, item in enumerate(cut.sequence):
        for node in item.inputs if isinstance(item, CutRegion) else item.all_input_nodes:
            last[_base(node)] = place
    (output,) = cut.source.graph.find_nodes(op="output")
    last |= {_base(node): len(cut.sequence) for node in output.all_input_nodes}
    made = {node for region in cut.regions for node in region.outputs if _allocates(_base(node))}
    return [
        frozenset(i for i, node in enumerate(item.inputs) if node in made and last[_base(node)] == place)
        for place, item in enumerate(cut.sequence)
        if isinstance(item, CutRegion)
    ]


def _base(node: Node) -> Node:
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _allocates(node: Node) -> bool:
    """Whether an op surely allocates its result: Inductor returns the operand of an op that changes nothing, as ``x * 1``.

    No op of two tensors of its size changes nothing, nor does a product.
    """
    if node.op != "call_function" or collective_kind(node) is not None or is_wait_tensor(node):
        return False
    size = nbytes(node)
    operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return node.target in _PRODUCTS or sum(n.op != "get_attr" and nbytes(n) >= size for n in operands) > 1
