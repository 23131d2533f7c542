"""Live: computes the bytes of activations that are live on the device while each region runs.  Weights and the workspaces
of kernels are not included.

Inputs of the graph are always live, because the caller holds them.  Results of the graph are live from the time at which
they are computed.  Any other value is freed as soon as the last kernel that reads it has run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.fx import GraphModule, Node

from chunkflow_compile.passes.problem import Region

from .fusion import Profile, RegionNodes, Storages

_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True, kw_only=True)
class Live:
    """The live bytes of a cut, that is, of a graph that was divided into regions.  ``peaks``: for each region, the peak of
    live bytes while the region or a collective directly before it runs.  ``between``: for each region, the bytes that are
    live directly before the region runs."""

    peaks: tuple[int, ...]
    between: tuple[int, ...]


class Slicing(Protocol):
    """The slices of a region that runs once per slice.  This protocol is used instead of ``Slicing`` in graph/regions.py,
    because this package cannot import that module."""

    @property
    def writes(self) -> Sequence[tuple[object, int | None]]: ...


class Regional(Protocol):
    """A region of a cut.  This protocol is used instead of ``CutRegion`` in graph/regions.py, because this package cannot
    import that module."""

    @property
    def info(self) -> Region: ...
    @property
    def module(self) -> GraphModule: ...
    @property
    def slicing(self) -> Slicing | None: ...
    @property
    def inputs(self) -> tuple[Node, ...]: ...
    @property
    def outputs(self) -> tuple[Node, ...]: ...


def live_of(storages: Storages, sequence: Sequence[Regional | Node], groups: Sequence[Sequence[int]] = ()) -> Live:
    """Return the live bytes of a cut.  ``sequence``: regions, collectives and completions, in program order.  ``groups``:
    groups of region indices; the regions of one group count as a single region.  If ``groups`` is empty, no regions are
    merged.
    """
    group_of = {i: group for group in groups for i in group}
    # for each node, the position in ``sequence`` of the last item that reads the node
    outside = {node: n for n, item in enumerate(sequence) for node in _read(item)}
    results = {a for n in storages.values if n.op == "output" for a in n.all_input_nodes}
    parts = list[RegionNodes | Node]()
    regions = {
        item.info.index: (position, item) for position, item in enumerate(sequence) if not isinstance(item, Node)
    }
    for item in sequence:
        if isinstance(item, Node):
            parts.append(item)
            continue
        group = group_of.get(item.info.index, (item.info.index,))
        if group[-1] == item.info.index:
            members = [regions[i] for i in group]
            if item.slicing is not None and item.info.key not in storages.profiles:
                storages.profiles[item.info.key] = _profile_in_slices(storages, item, item.slicing)
            parts.append(_joined([r for _, r in members], members[-1][0], outside, results))
    return _in_turn(storages, parts)


def _joined(
    regions: Sequence[Regional], end: int, outside: Mapping[Node, int], results: Collection[Node]
) -> RegionNodes:
    """Merge several regions into one.  ``end``: position in the sequence of the last region to merge.  ``outside``: for each
    node, the position in the sequence of its last reader.  ``results``: nodes that the graph returns."""
    if len(regions) == 1:
        return RegionNodes(key=regions[0].info.key, inputs=regions[0].inputs, outputs=regions[0].outputs)
    made = [n for region in regions for n in region.outputs]
    inputs = tuple(dict.fromkeys(n for region in regions for n in region.inputs if n not in made))
    outputs = tuple(n for n in made if n in results or outside.get(n, -1) > end)
    number = {node: i for i, node in enumerate((*inputs, *made))}
    wiring = tuple((r.info.key, tuple(number[n] for n in (*r.inputs, *r.outputs))) for r in regions)
    return RegionNodes(key=(wiring, tuple(number[n] for n in outputs)), inputs=inputs, outputs=outputs)


def _profile_in_slices(storages: Storages, region: Regional, slicing: Slicing) -> Profile:
    """Return the profile of a region that runs once per slice.  The inputs of the region are live until the last run ends."""
    nodes = region.module.graph.nodes
    taken = tuple(node for node in nodes if node.op == "placeholder")
    written = tuple(node for node in nodes if node.target is _COPY)
    values = {node: node.meta.get("val") for node in nodes}
    outputs = written if slicing.writes else tuple(region.module.graph.output_node().all_input_nodes)
    inside = Storages(values, frozenset((*taken, *written)), storages.fused)
    own = inside.profile(RegionNodes(key=region.info.key, inputs=taken, outputs=outputs)).own
    made = zip(region.outputs, slicing.writes, strict=False)
    fresh = sum(storages.nbytes(storages.bases[node]) for node, (_, over) in made if over is None)
    return Profile(own=tuple(fresh + now for now in own), until=(len(own) - 1,) * len(region.inputs))


def _in_turn(storages: Storages, sequence: Sequence[RegionNodes | Node]) -> Live:
    """Return the live bytes of a sequence of regions and top-level nodes (collectives and completions).  The operands of a
    collective are live until its completion."""
    inputs = [n for n in storages.values if n.op == "placeholder" and n.users]
    results = [a for n in storages.values if n.op == "output" for a in n.all_input_nodes]
    top = {item for item in sequence if isinstance(item, Node)}
    kept = {storages.bases[n] for n in (*inputs, *results)}
    last = {base: i for i, item in enumerate(sequence) for base in _used(storages, item, top)}
    dying: list[set[Node]] = [set() for _ in sequence]
    for base in last.keys() - kept:
        dying[last[base]].add(base)
    alive = {storages.bases[n] for n in inputs}
    now = most = sum(map(storages.nbytes, alive))
    peaks, between = list[int](), list[int]()
    for item, freed in zip(sequence, dying, strict=True):
        made = {storages.bases[n] for n in ((item,) if isinstance(item, Node) else item.outputs)} - alive
        added = sum(map(storages.nbytes, made))
        if isinstance(item, Node):
            most = max(most, now + added)
        else:
            between.append(now)
            peaks.append(max(most, _peak(storages, item, now, freed)))
            most = 0
        alive = (alive | made) - freed
        now += added - sum(map(storages.nbytes, freed))
        most = max(most, now)
    return Live(peaks=tuple(peaks), between=tuple(between))


def _used(storages: Storages, item: RegionNodes | Node, top: Collection[Node]) -> Iterator[Node]:
    """Yield the nodes whose memory ``item`` uses.  ``top``: all collectives and completions of the sequence."""
    for node in _read(item):
        base = storages.bases[node]
        yield base
        if isinstance(item, Node) and base in top:  # ``item`` is a completion, and ``base`` is its collective
            yield from (storages.bases[n] for n in base.all_input_nodes)


def _peak(storages: Storages, part: RegionNodes, before: int, dying: Collection[Node]) -> int:
    """Return the peak of live bytes while a region runs.  ``before``: bytes that are live before the region runs.
    ``dying``: values that are freed while the region runs."""
    profile = storages.profile(part)
    until = dict.fromkeys(dying, -1)
    for node, position in zip(part.inputs, profile.until, strict=True):
        if (base := storages.bases[node]) in until:
            until[base] = max(until[base], position)
    freed = [0] * (len(profile.own) + 1)
    for base, position in until.items():
        freed[position + 1] += storages.nbytes(base)
    most = now = before
    for own, gone in zip(profile.own, freed, strict=False):
        now -= gone
        most = max(most, now + own)
    return most


def _read(item: RegionNodes | Regional | Node) -> Iterable[Node]:
    return item.all_input_nodes if isinstance(item, Node) else item.inputs
