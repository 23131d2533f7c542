"""Split: divides selected regions into phases, each of which runs once per slice of the tokens.  For example, one phase
computes K and V, and a second phase computes the rest of the block.

On a small GPU, activations limit which models fit, and most activations exist only inside a block.  If the tokens of a
block are split into k slices, the block needs memory only for its residual stream, K and V, and 1/k of all other
activations (slices.py).

Contract
    On entry: a Cut, which is not changed, and the number of slices for each region key.
    Preserved: the results of each region, bit for bit in eager mode.  Collectives and regions that are not split do not
    change, and keep their order.
    On exit: each split region is replaced by its phases, which are regions.  A phase overwrites the residual stream if
    neither the caller of the graph nor a later region or collective reads the old values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from chunkflow_compile.passes.problem import Region

from .discover import collective_kind, is_wait_tensor, nbytes, viewed
from .keys import structural_key
from .regions import Cut, CutRegion, Slicing, cost_at, cut_into
from .slice_check import check_phases
from .slices import Phase, Whole, layout_of, phases

_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten._to_copy.default)
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default)


def split(cut: Cut, repeats: Mapping[str, int]) -> Cut:
    """Return the cut with some of its regions split.  ``repeats``: for the key of each region to split, the number of slices.

    Raises Whole if a region cannot be split into its number of slices, and FindingError if the phases of a region do not
    compute the same results as the region.
    """
    cut = cut.whole or cut
    owned = _owned(cut)
    made = dict[object, tuple[GraphModule, tuple[_Calls, ...]]]()
    sequence, count = list[CutRegion | Node](), 0
    for item in cut.sequence:
        if isinstance(item, Node):
            sequence.append(item)
            continue
        new = [item]
        if (repeat := repeats.get(item.info.key, 1)) > 1:
            mine = owned[item.info.index]
            if (item.info.key, mine) not in made:
                made[item.info.key, mine] = _split(item.module, repeat, mine)
            new = [*_regions(cut, item, *made[item.info.key, mine])]
        for region in new:
            info = replace(region.info, index=count, name=f"region_{count}")
            sequence.append(replace(region, info=info))
            count += 1
    return cut_into(cut.traced, cut.discovery, sequence, cut.recomputed, cut)


def why_whole(region: CutRegion, repeat: int) -> str:
    """Return a sentence that explains why a region cannot be split into ``repeat`` slices.  Return an empty string if the
    region can be split."""
    try:
        _ = [*_calls(region.module, phases(region.module, repeat, ()))]
    except Whole as error:
        return str(error)
    return ""


def _split(module: GraphModule, repeat: int, owned: Collection[int]) -> tuple[GraphModule, tuple[_Calls, ...]]:
    """Return the graph of a region, and the phases that compute it.  Some inputs of the returned graph may have another
    layout than in ``module``.

    ``owned``: see :func:`phases`.  If only the transposed layout of an input prevents a result from overwriting the input,
    an additional first phase copies the input to a contiguous layout.  The copy takes time, but saves memory.  Without the
    copy, the input, the result, K and V would all be live at the same time.
    """
    found, copies = phases(module, repeat, owned), list[_Calls]()
    for place in _transposed(module, found, owned):
        other, copy = _with_copy(module, place)
        again = phases(other, repeat, owned)
        if _overwritten(again) > _overwritten(found):
            module, found = other, again
            copies.append(copy)
    check_phases(module, found, owned)
    streams = {node: part for copy in copies for part, node in copy.parts.items()}
    calls = (replace(c, inputs=tuple(streams.get(n, n) for n in c.inputs)) for c in _calls(module, found))
    return module, (*copies, *calls)


def _overwritten(found: Sequence[Phase]) -> int:
    """Return the number of inputs that the phases overwrite."""
    return sum(write.over is not None for phase in found for write in phase.writes)


def _transposed(module: GraphModule, found: Sequence[Phase], owned: Collection[int]) -> list[int]:
    """Return the positions of the inputs in ``owned`` that are not contiguous, but whose contiguous copies would have the
    layout of a result.  Only results that are written to new memory count."""
    fresh = [w.value for phase in found if phase.repeat > 1 for w in phase.writes if w.over is None]
    results = {layout_of(node.meta["val"]) for node in fresh}
    given = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    return [
        place
        for place in sorted(owned)
        if not given[place].is_contiguous() and layout_of(given[place].contiguous()) in results
    ]


def _with_copy(module: GraphModule, place: int) -> tuple[GraphModule, _Calls]:
    """Return the graph with a contiguous input at position ``place``, and the phase that makes the contiguous copy of the
    original input."""
    graph, copy = Graph(), Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    stream, given = graph.find_nodes(op="placeholder")[place], copy.placeholder("in_0")
    given.meta = {"val": stream.meta["val"]}
    made = copy.call_function(_aten.clone.default, (given,), {"memory_format": torch.contiguous_format})
    made.meta = {"val": stream.meta["val"].contiguous()}
    stream.meta = dict(made.meta)
    copy.output((made,))
    rows = Graph().placeholder("rows")
    calls = _Calls(GraphModule(module, copy), (stream,), (rows,), Slicing(1, (None,), ()), {rows: stream})
    return GraphModule(module, graph), calls


def _regions(cut: Cut, region: CutRegion, like: GraphModule, made: Sequence[_Calls]) -> Iterator[CutRegion]:
    """Yield the regions that replace a region.  ``made``: phases of this region, or of a region with an equal graph.
    ``like``: graph that was divided into these phases."""
    source = {node.name: node for node in cut.source.graph.nodes}
    theirs, mine = like.graph.nodes, region.module.graph.nodes
    inputs = zip(like.graph.find_nodes(op="placeholder"), region.inputs, strict=True)
    value: dict[Node, Node] = dict(inputs)
    for node, other in zip(theirs, mine, strict=True):
        if node not in value and other.name in source:
            value[node] = source[other.name]
    weights = {w.node: w.parameter.name for w in cut.discovery.weights}
    parts = Graph()
    for calls in made:
        for part, whole in calls.parts.items():
            value[part] = placeholder = parts.placeholder(f"{value[whole].name}_{part.name}")
            placeholder.meta = {"val": whole.meta["val"]}
        taken, module = tuple(map(value.__getitem__, calls.inputs)), calls.module
        info = Region(
            index=0,
            name="",
            key=structural_key(module, region.info.index, calls.slicing),
            block=region.info.block,
            nodes=sum(node.op == "call_function" for node in module.graph.nodes),
            weights=tuple(dict.fromkeys(weights[node] for node in taken if node in weights)),
            cost=cost_at(module, cut.traced, calls.slicing),
            repeat=1 if calls.slicing is None else calls.slicing.repeat,
            groups=region.info.groups,
        )
        yield CutRegion(info, module, taken, tuple(map(value.__getitem__, calls.outputs)), calls.slicing)


@dataclass(frozen=True)
class _Calls:
    """A phase in the form of a region, with a graph, inputs, outputs and slicing.  ``inputs`` and ``outputs`` are nodes of
    the graph that was divided into phases.  ``parts``: for each output that is incomplete after this phase, the node of the
    complete value.  Later phases write the rest of the value."""

    module: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    slicing: Slicing | None
    parts: Mapping[Node, Node]


def _calls(module: GraphModule, found: Sequence[Phase]) -> Iterator[_Calls]:
    """Yield the phases of a graph in the form of regions.  If several phases write slices of a value, the incomplete value
    has a separate node after each of these phases except the last."""
    placeholders = module.graph.find_nodes(op="placeholder")
    left = Counter(write.value for phase in found for write in phase.writes)
    begun, states = dict[Node, Node](), Graph()
    for phase in found:
        if not phase.writes:
            slicing = Slicing(1, phase.slices, ()) if any(phase.slices) else None
            yield _Calls(phase.module, phase.inputs, phase.outputs, slicing, {})
            continue
        if len({write.value for write in phase.writes}) < len(phase.writes):
            raise Whole("The graph cannot be computed in slices: two streams of tokens have the same length.")
        inputs, slices, outputs, parts = [*phase.inputs], [*phase.slices], list[Node](), dict[Node, Node]()
        over = list[int | None]()
        for write in phase.writes:
            if write.over is not None:
                over.append(list(zip(inputs, slices, strict=True)).index((placeholders[write.over], write.slice)))
            elif (
                write.value in begun
            ):  # the phase takes the incomplete value as an input, and writes its slices into it
                over.append(len(inputs))
                inputs.append(begun[write.value])
                slices.append(write.slice)
            else:
                over.append(None)
            left[write.value] -= 1
            outputs.append(write.value)
            if left[write.value]:
                outputs[-1] = begun[write.value] = part = states.placeholder(f"part_{left[write.value]}")
                parts[part] = write.value
        writes = tuple((write.slice, place) for write, place in zip(phase.writes, over, strict=True))
        graph = _with_inputs_first(phase, over)
        yield _Calls(graph, tuple(inputs), tuple(outputs), Slicing(phase.repeat, tuple(slices), writes), parts)


def _with_inputs_first(phase: Phase, over: Sequence[int | None]) -> GraphModule:
    """Return the graph of a phase with its placeholders in the order of a region's inputs.  The inputs come first, including
    incomplete values that the phase continues to write.  The destinations in new memory follow.  ``over``: for each write,
    the position of the overwritten input, or None for new memory."""
    given = [place is not None for write, place in zip(phase.writes, over, strict=True) if write.over is None]
    if not any(given) or all(given):
        return phase.module
    graph = Graph()
    graph.output(graph.graph_copy(phase.module.graph, {}))
    destinations = graph.find_nodes(op="placeholder")[len(phase.inputs) :]
    first = destinations[0]
    for destination, is_given in zip(destinations, given, strict=True):
        if is_given and destination is not first:
            first.prepend(destination)
    return GraphModule(phase.module, graph)


def _owned(cut: Cut) -> list[frozenset[int]]:
    """Return, for each region, the positions of the inputs that it may overwrite.  The memory of such an input was allocated
    by another region, and nothing reads this memory after the region."""
    last = dict[Node, int]()
    for place, item in enumerate(cut.sequence):
        for node in item.inputs if isinstance(item, CutRegion) else item.all_input_nodes:
            last[viewed(node)] = place
    (output,) = cut.source.graph.find_nodes(op="output")
    last |= {viewed(node): len(cut.sequence) for node in output.all_input_nodes}
    made = {node for region in cut.regions for node in region.outputs if _allocates(viewed(node))}
    return [
        frozenset(i for i, node in enumerate(item.inputs) if node in made and last[viewed(node)] == place)
        for place, item in enumerate(cut.sequence)
        if isinstance(item, CutRegion)
    ]


def _allocates(node: Node) -> bool:
    """Return whether an op certainly allocates memory for its result.  Inductor removes ops that change nothing, such as
    ``x * 1``, and returns the operand instead.  Inductor never removes a matrix product, or an op that has two operands as
    large as the result.
    """
    if node.op != "call_function" or collective_kind(node) is not None or is_wait_tensor(node):
        return False
    if node.target in _COPIES:  # such an op certainly allocates memory if it changes the dtype or the layout
        (source,) = (n.meta["val"] for n in node.all_input_nodes)
        return (source.dtype, source.stride()) != (node.meta["val"].dtype, node.meta["val"].stride())
    size = nbytes(node)
    operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return node.target in _PRODUCTS or sum(n.op != "get_attr" and nbytes(n) >= size for n in operands) > 1
