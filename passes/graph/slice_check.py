"""Slice check: proves that phases (slices.py) compute the same results as the graph of their region.  This must hold for
every order of the runs of a phase."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from chunkflow_compile.passes.errors import FindingError

from .discover import viewed
from .slice_graphs import Builder, Slice, part_of
from .slice_parts import Boundary, NoRule, Part, shape_of
from .slices import Phase, Write, fake_mode, layout_of


def check_phases(module: GraphModule, phases: tuple[Phase, ...], owned: Collection[int] | None = None) -> None:
    """Prove that phases compute the outputs of a graph.  ``owned``: positions of the placeholders whose memory the phases may
    overwrite (see :func:`slices.phases`), or None if these positions are not known.

    It is proved that each element of a value is written exactly once, that a value is complete before it is read, and that
    each phase computes the slices of its results in the same way as the graph.  If a run overwrites a slice of an input, it
    is also proved that no other run and no later phase reads this slice.  Raises FindingError for the first violation.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    complete, views = set(placeholders), {n for phase in phases for n in _viewed(phase)}
    fake = fake_mode(module)
    for number, phase in enumerate(phases):
        if late := [n.name for n in phase.inputs if n not in complete]:
            _wrong(number, f"reads {late[0]} before all of it is computed")
        later = {n for other in phases[number + 1 :] for n in other.inputs} | set(
            module.graph.output_node().all_input_nodes
        )
        for write in phase.writes:
            _check_overwritten(number, phase, write, placeholders, later | views, owned)
        _check_graph(number, phase, placeholders, fake)
        _check_results(number, phase, fake)
        for node in phase.outputs:
            if node in complete:
                _wrong(number, f"computes {node} again")
            if not phase.writes or _covered(number, node, phase, phases[: number + 1]):
                complete.add(node)
    for node in module.graph.output_node().all_input_nodes:
        if node not in complete:
            raise FindingError(f"No phase computes all of {node}, which the region returns.")


def _wrong(number: int, fault: str) -> NoReturn:
    raise FindingError(f"Phase {number} {fault}.")


def _covered(number: int, node: Node, phase: Phase, phases: tuple[Phase, ...]) -> bool:
    """Return whether ``phases`` (the phases up to ``phase``) together write all elements of a value.  Raises FindingError if
    an element is written twice."""
    writes = [(w, p.repeat) for p in phases for w in p.writes if w.value is node]
    if len({w.slice.dim for w, _ in writes}) > 1 or len({w.over for w, _ in writes}) > 1:
        _wrong(number, f"writes {node} along another dimension, or elsewhere, than an earlier phase")
    end, size = 0, shape_of(node)[writes[0][0].slice.dim]
    for write, repeat in sorted(writes, key=lambda w: w[0].slice.offset):
        if write.slice.offset < end or write.slice.offset + repeat * write.slice.size > size:
            _wrong(number, f"writes a part of {node} twice, or beyond its end")
        if write.slice.offset > end:
            return False
        end += repeat * write.slice.size
    return end == size


def _viewed(phase: Phase) -> set[Node]:
    """Return the inputs of which a phase returns views."""
    if phase.writes:
        return set()
    sources = dict(zip(phase.module.graph.find_nodes(op="placeholder"), phase.inputs, strict=False))
    bases = [viewed(n) for n in phase.module.graph.output_node().all_input_nodes]
    return {sources[base] for base in bases if base in sources}


def _check_overwritten(
    number: int,
    phase: Phase,
    write: Write,
    placeholders: list[Node],
    later: Collection[Node],
    owned: Collection[int] | None,
) -> None:
    """If a result overwrites an input, check that nothing else reads or overwrites this input, and that the result has the
    layout of the input."""
    if write.over is None:
        return
    source = placeholders[write.over]
    taken = [part for n, part in zip(phase.inputs, phase.slices, strict=True) if n is source]
    if taken != [write.slice]:
        _wrong(number, f"overwrites {source} slice by slice, and reads {'other parts' if taken else 'no part'} of it")
    if source in later:
        _wrong(number, f"overwrites {source}, which is read later, or of which another value is a view")
    if owned is not None and write.over not in owned:
        _wrong(number, f"overwrites {source}, which the region does not own")
    if [w.over for w in phase.writes].count(write.over) != 1:
        _wrong(number, f"overwrites {source} with two results")
    if layout_of(source.meta["val"]) != layout_of(write.value.meta["val"]):
        _wrong(number, f"overwrites {source} with {write.value}, which has another layout")


def _check_graph(number: int, phase: Phase, sources: list[Node], fake: FakeTensorMode) -> None:
    """Check the graph of a phase.  Its placeholders must have the shapes and layouts of the phase's inputs and destinations.
    Slices must be within their values.  The graph may write only at its end, and only to its destinations."""
    placeholders = phase.module.graph.find_nodes(op="placeholder")
    metas = [part_of(n, part, fake) for n, part in zip(phase.inputs, phase.slices, strict=True)]
    metas += [part_of(w.value, w.slice, fake) for w in phase.writes if w.over is None]
    if [layout_of(n.meta["val"]) for n in placeholders] != [layout_of(value) for value in metas]:
        _wrong(number, "takes other inputs than its graph")
    for node, part in [*zip(phase.inputs, phase.slices, strict=True), *((w.value, w.slice) for w in phase.writes)]:
        if part is not None and not _is_inside(node, part, phase.repeat):
            _wrong(number, f"takes a slice of {node} that is not in it")
    if not phase.writes and phase.repeat != 1:
        _wrong(number, "is repeated and returns its results")
    last = [n for n in phase.module.graph.nodes if n.op == "call_function"]
    copies = last[len(last) - len(phase.writes) :]
    mutable = [n for n in last if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable]
    if mutable != copies or any(n.target is not torch.ops.aten.copy_.default for n in copies):
        _wrong(number, "writes anything but its results, once each, at its end")
    if [n.args[0] for n in copies] != _targets(phase, sources):
        _wrong(number, "writes its results elsewhere")
    for i, copy in enumerate(copies):
        made = copy.args[1]
        if isinstance(made, Node) and viewed(made) in [n.args[0] for j, n in enumerate(copies) if j != i]:
            _wrong(number, f"writes {viewed(made)}, of which another result is a view")


def _targets(phase: Phase, sources: list[Node]) -> list[Node | None]:
    """Return the placeholders to which a phase writes, in the order of its writes.  ``sources``: placeholders of the
    region's graph."""
    given = phase.module.graph.find_nodes(op="placeholder")
    fresh = iter(given[len(phase.inputs) :])
    taken = dict(zip(zip(phase.inputs, phase.slices, strict=True), given, strict=False))
    return [next(fresh) if w.over is None else taken.get((sources[w.over], w.slice)) for w in phase.writes]


def _check_results(number: int, phase: Phase, fake: FakeTensorMode) -> None:
    """Check that a phase computes each result from its inputs by the same expression as the region's graph does."""
    table: dict[object, int] = {}
    given = phase.module.graph.find_nodes(op="placeholder")[: len(phase.inputs)]
    leaves = dict(zip(given, zip(phase.inputs, phase.slices, strict=True), strict=True))
    numbers = _numbered(phase.module.graph, leaves, table)
    results: Any
    if phase.writes:
        results = [n.args[1] for n in phase.module.graph.nodes if n.target is torch.ops.aten.copy_.default]
        wanted = [(w.value, _parts(w.value, w.slice)) for w in phase.writes]
    else:
        (results,) = phase.module.graph.output_node().args
        wanted = [(n, _parts(n, None)) for n in phase.outputs]
    if len(results) != len(wanted) or [n for n, _ in wanted] != list(phase.outputs):
        _wrong(number, "has other results than its graph")
    values = {n for n in phase.inputs if n.op == "call_function"}
    for result, (node, parts) in zip(results, wanted, strict=True):
        if all(_number_of(node, part, values, fake, table) != numbers[result] for part in parts):
            _wrong(number, f"computes another value than {node}, or from other slices")


def _parts(node: Node, part: Slice | None) -> list[Part | None]:
    """Return all parts that describe a slice of a node.  If the slice is the whole node, the result contains None and the
    full range of each dimension."""
    shape = shape_of(node)
    if part is None or part.size == shape[part.dim]:
        return [None, *(Part(d, size, 0, size) for d, size in enumerate(shape))]
    return [Part(part.dim, shape[part.dim], part.offset, part.size)]


def _number_of(
    node: Node, part: Part | None, values: Collection[Node], fake: FakeTensorMode, table: dict[object, int]
) -> int:
    """Return the number (:func:`_numbered`) of a part of a node, if the part is computed as the slice rules say.  Return -1
    if there is no rule for the part."""
    builder = Builder(values, fake=fake, closed=True)
    try:
        made = builder.root(node, part)
    except (NoRule, Boundary):
        return -1
    return _numbered(builder.graph, {p: taken for taken, p in builder.found.taken.items()}, table)[made]


def _numbered(graph: Graph, leaves: Mapping[Node, object], table: dict[object, int]) -> dict[Node, int]:
    """Return a number for each node.  Equal ops on equal operands have the same number.  ``leaves``: for each placeholder, a
    key that identifies its input.  ``table``: numbers that were assigned before; new numbers are added."""
    numbers: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            key: object = leaves.get(node, node)
        elif node.op == "call_function":
            operands = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{numbers[n]}")
            key = (str(node.target), repr(operands))
        else:
            continue
        numbers[node] = table.setdefault(key, len(table))
    return numbers


def _is_inside(node: Node, part: Slice, repeat: int) -> bool:
    return part.offset >= 0 and part.size > 0 and part.offset + repeat * part.size <= shape_of(node)[part.dim]
