"""Slices: divides the graph of a region into phases.  A phase is a smaller graph that runs once per slice of the tokens.

Contract
    On entry: the ATen graph of a region, or of several merged regions.  The graph is not changed.
    On exit: phases in the order in which they run.  Together they compute the outputs of the graph; ``slice_check`` proves
    this.
    Raises Whole if the graph cannot be computed in slices.

Method
    The largest output is split along one of its dimensions.  The rules in ``slice_rules`` determine, op by op, which
    slices of the inputs are needed for a slice of an output.  Some ops need a whole value that depends on the split
    inputs: for example, attention needs all keys and values.  Then an earlier phase computes this value, also in slices.
    Matrix products that do not depend on the split inputs are computed only once, not once per slice.

Terms
    stream   a sequence of tokens (not a CUDA stream): an input of which the phases take slices, such as the image tokens
             or the text tokens
    root     a value that a phase computes: an output of the graph, or a value that a later phase needs as a whole
    piece    a part of a root that is computed in one run or in ``repeat`` runs.  A root that concatenates several streams
             has one piece per stream
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from chunkflow_compile.passes.errors import ChunkflowError

from .discover import viewed
from .slice_graphs import Builder, Slice, Walk, depends_on, is_view_of_input
from .slice_parts import Boundary, NoRule, Part, is_reshape, op_name, shape_of
from .symbolic_sizes import symbols_of

__all__ = ["Phase", "Slice", "Whole", "Write", "fake_mode", "layout_of", "phases"]


class Whole(ChunkflowError):
    """A graph cannot be computed in slices."""


@dataclass(frozen=True)
class Write:
    """A result that a phase writes, one slice per run.

    ``value``: node of the region's graph of which a slice is written.  ``over``: position, in the region's graph, of the
    placeholder whose memory is overwritten, or None for new memory.  New memory has the strides of the value's metadata.  It
    is allocated before the first phase that writes a slice of the value.
    """

    value: Node
    slice: Slice
    over: int | None


@dataclass(frozen=True)
class Phase:
    """A graph that runs ``repeat`` times.

    ``module``: the graph of a run.  The placeholders of this graph are ``inputs``, and then the destinations of all writes to
    new memory.  If there are ``writes``, the graph copies each result to its destination, or over the input that the result
    replaces, and returns ().  Otherwise the graph returns ``outputs``, and ``repeat`` is 1.  ``inputs``: nodes of the
    region's graph, either placeholders or values that an earlier phase computes.  ``slices``: for each input, the slice that
    a run takes, or None if each run takes the whole input.
    """

    module: GraphModule
    inputs: tuple[Node, ...]
    slices: tuple[Slice | None, ...]
    outputs: tuple[Node, ...]
    writes: tuple[Write, ...]
    repeat: int


def phases(module: GraphModule, repeat: int, owned: Collection[int]) -> tuple[Phase, ...]:
    """Return the phases of a region's graph.  The longest stream is computed in ``repeat`` slices.

    ``owned``: positions of the placeholders whose memory may be overwritten, because nothing outside the region reads it
    later.  Raises Whole with the reason if the graph cannot be computed in slices.
    """
    nodes = [n for n in module.graph.nodes if n.op != "output"]
    if symbols_of([n.meta.get("val") for n in nodes]):
        raise Whole("The sizes of the graph are symbolic: it can be computed in slices only at fixed sizes.")
    outputs = _outputs(module)
    flat = {n: base for n in outputs if (base := _unflattened(n)) is not n}
    computed = [flat.get(n, n) for n in outputs if viewed(n).op != "placeholder"]
    if not computed:
        raise Whole("The graph computes no tensor.")
    largest = max(computed, key=lambda n: math.prod(shape_of(n)))
    failed: Whole | None = None
    for dim in _dims(largest):
        try:
            plan = _Plan(module, repeat, largest, dim)
            plan.find(outputs, flat)
        except (Whole, NoRule) as error:
            said = str(error) if isinstance(error, Whole) else f"The graph cannot be computed in slices: {error}."
            failed = failed or Whole(said)
            continue
        return _finished(module, plan.builds(fake_mode(module)), owned)
    raise failed or Whole(f"{largest} has no dimension that can be split.")


def _outputs(module: GraphModule) -> list[Node]:
    """Return the tensors that a graph computes and returns."""
    (returned,) = module.graph.output_node().args
    nodes = [n for n in dict.fromkeys(returned) if isinstance(n, Node) and n.op == "call_function"]  # type: ignore[arg-type]
    return [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _unflattened(node: Node) -> Node:
    """Return the value of which a one-dimensional output is a view.  If the output is not a view or has several dimensions,
    return the output itself.  Values that are sent to other ranks are one-dimensional views."""
    base = node
    while is_reshape(base) and len(shape_of(node)) == 1:
        base = base.all_input_nodes[0]
    return base if base.op == "call_function" else node


def fake_mode(module: GraphModule) -> FakeTensorMode:
    """Return the FakeTensorMode of a graph's metadata."""
    modes = (getattr(n.meta.get("val"), "fake_mode", None) for n in module.graph.nodes)
    return next((mode for mode in modes if mode is not None), None) or FakeTensorMode(allow_non_fake_inputs=True)


def _dims(node: Node) -> list[int]:
    """Return the dimensions along which a value may be split, longest first.  The last dimension (the features of a
    token) is not split."""
    shape = shape_of(node)
    dims = range(len(shape) - 1) if len(shape) > 1 else range(len(shape))
    return sorted((d for d in dims if shape[d] > 1), key=lambda d: -shape[d])


@dataclass(frozen=True)
class _Piece:
    """A piece of a root (a value that a phase computes).  ``part``: part of the root that is computed, or None if the whole
    root is computed by the same ops as in the graph.  ``repeat``: number of runs in which the piece is computed."""

    part: Part | None
    repeat: int


@dataclass(frozen=True)
class _Root:
    """A value that a phase computes.  ``depends``: values from earlier phases that the root needs."""

    node: Node
    pieces: tuple[_Piece, ...]
    depends: frozenset[Node]


class _Plan:
    """The roots of a graph, that is, the values that phases compute.  ``largest``: largest output of the graph.  ``dim``:
    dimension along which this output is split."""

    def __init__(self, module: GraphModule, repeat: int, largest: Node, dim: int) -> None:
        self.placeholders = module.graph.find_nodes(op="placeholder")
        self.repeat, self.largest, self.dim = repeat, largest, dim
        self.roots: dict[Node, _Root] = {}
        self.needs: dict[Node, tuple[tuple[int, ...], str]] = {}
        self.streams: set[Node] = set()  # inputs of which the largest output reads slices; empty if not known yet
        self.longest = max(part.count for part in self._ranges(largest, dim))
        if self.longest % repeat:
            raise Whole(f"{self.longest} tokens cannot be divided into {repeat} slices of one size.")

    def find(self, outputs: list[Node], flat: dict[Node, Node]) -> None:
        """Find the roots: the outputs and, recursively, the values that roots need as a whole.  ``flat``: for each output
        that is a one-dimensional view, its base (:func:`_unflattened`)."""
        _, walk = self._split(self.largest, self.dim)
        split = [n for n, part in walk.taken if part is not None and is_view_of_input(n)]
        self.streams = {m for n in split for m in self.placeholders if depends_on(n, (m,))}
        if not self.streams:
            reasons = [
                *(f"{why} ({n})" for n, (_, why) in walk.needs.items()),
                f"{self.largest} reads no slice of an input",
            ]
            raise Whole(f"The graph cannot be computed in slices: {reasons[0]}.")
        self._find(self.largest, (self.dim,), "it is the largest output")
        self.roots |= {n: _Root(n, (_Piece(None, 1),), frozenset({base})) for n, base in flat.items()}
        views = [n for n in outputs if viewed(n).op == "placeholder"]
        self.roots |= {n: _Root(n, (_Piece(None, 1),), frozenset()) for n in views}
        for node in dict.fromkeys(flat.get(n, n) for n in outputs):
            if node not in self.roots:
                self._find(node, tuple(sorted(_dims(node), key=lambda d: d != self.dim)), "it is an output")
        while missing := [n for n in self.needs if n not in self.roots]:
            self._find(missing[0], *self.needs[missing[0]])

    def _find(self, node: Node, dims: tuple[int, ...], reason: str) -> None:
        """Find a way to compute ``node`` in phases, and add the node to ``roots``.  ``dims``: dimensions along which the node
        may be split, best first.  ``reason``: clause for an error message that says why a phase must compute the node."""
        failed = f"{op_name(node)} {node}: {reason}"
        for dim in dims:
            try:
                pieces, walk = self._split(node, dim)
            except NoRule as error:
                failed = f"{error}, where {node} is split along dimension {dim}"
                continue
            bad = [n for n, (along, _) in walk.needs.items() if not along and self._depends_on_streams(n)]
            if not bad:
                break
            failed = f"{walk.needs[bad[0]][1]} ({bad[0]})"
        else:
            if self._depends_on_streams(node) or node is self.largest:
                raise Whole(f"The graph cannot be computed in slices: {failed}.")
            builder = Builder((), self.streams)
            builder.root(node, None)
            pieces, walk = (_Piece(None, 1),), builder.found
        for n, need in walk.needs.items():
            self.needs.setdefault(n, need)
        self.roots[node] = _Root(node, pieces, frozenset(n for n, _ in walk.taken if n.op == "call_function"))

    def _depends_on_streams(self, node: Node) -> bool:
        """Return whether a node depends on a sliced input (a stream) and is not just a view of an input."""
        return depends_on(node, self.streams) and not is_view_of_input(node)

    def _split(self, node: Node, dim: int) -> tuple[tuple[_Piece, ...], Walk]:
        """Return the pieces into which ``node`` is divided along dimension ``dim``, and the inputs and values that these
        pieces read."""
        pieces, found = list[_Piece](), Walk()
        for part in self._ranges(node, dim):
            repeat = self.repeat if part.count >= self.longest else 1
            if part.count % repeat:
                raise Whole(f"{part.count} elements of {node} cannot be divided into {repeat} slices of one size.")
            pieces.append(_Piece(part, repeat))
            builder = Builder((), self.streams)
            builder.root(node, replace(part, count=part.count // repeat))
            found.taken |= builder.found.taken
            found.needs |= builder.found.needs
        return tuple(pieces), found

    def _ranges(self, node: Node, dim: int) -> list[Part]:
        """Return the parts that ``node`` concatenates along dimension ``dim``.  If ``node`` is not a concatenation, return a
        single part."""
        size = shape_of(node)[dim]
        found, todo = list[Part](), [Part(dim, size, 0, size)]
        while todo:
            part = todo.pop()
            try:
                Builder((), self.streams).root(node, part)
            except Boundary as boundary:
                before, uneven = divmod(part.count * boundary.before, boundary.count)
                if uneven:
                    raise NoRule(f"{node} is concatenated between two elements of dimension {dim}") from None
                rest = replace(part, start=part.start + before, count=part.count - before)
                todo += [rest, replace(part, count=before)]
            else:
                found.append(part)
        return found

    def builds(self, fake: FakeTensorMode) -> list[_Build]:
        """Return the graphs of the phases, in the order in which the phases run.  Each value is computed as late as possible,
        because it is then live for the shortest time."""
        readers = {n: [r.node for r in self.roots.values() if n in r.depends] for n in self.roots}
        heights: dict[Node, int] = {}

        def height(node: Node) -> int:
            """Return the number of phases that must run after the phase that computes ``node``."""
            if node not in heights:
                heights[node] = max((1 + height(reader) for reader in readers[node]), default=0)
            return heights[node]

        groups = dict[tuple[int, int, int, int], list[tuple[_Root, _Piece]]]()
        for node, root in self.roots.items():
            for piece in root.pieces:
                once = _is_all(node, piece)
                count = 0 if once or piece.part is None else piece.part.count
                # Among phases that are followed by equally many phases, the phase for the longest stream comes last.  No
                # later phase then reads this stream, so the results of the phase can overwrite it.
                order = int(once and height(node) > 0)
                groups.setdefault((-height(node), order, piece.repeat, count), []).append((root, piece))
        return [
            _build(groups[key], Builder({n for n, later in heights.items() if later > -key[0]}, self.streams, fake))
            for key in sorted(groups)
        ]


def _is_all(node: Node, piece: _Piece) -> bool:
    """Return whether a piece contains all of ``node`` and is computed in one run."""
    return piece.part is None or (piece.repeat == 1 and piece.part.count == shape_of(node)[piece.part.dim])


@dataclass
class _Build:
    """The graph of a phase before its outputs or writes are added.  ``results``: a triple for each result: the node of the
    region's graph, the node of the phase's graph that computes it, and the computed slice (None for the whole value)."""

    builder: Builder
    repeat: int
    results: list[tuple[Node, Node, Slice | None]]

    @property
    def taken(self) -> list[tuple[Node, Slice | None]]:
        return list(self.builder.found.taken)

    @property
    def returned(self) -> set[Node]:
        """The inputs of which results of the phase are views."""
        sources = {placeholder: n for (n, _), placeholder in self.builder.found.taken.items()}
        bases = [viewed(made) for _, made, part in self.results if part is None]
        return {sources[base] for base in bases if base in sources}

    def overwritten(self, index: int, fixed: Collection[Node]) -> Node | None:
        """Return the input that result ``index`` can overwrite, or None.  ``fixed``: inputs that must keep their
        values."""
        node, _, part = self.results[index]
        value = node.meta["val"]
        if part is None or part.size * self.repeat != value.shape[part.dim]:
            return None
        others = [_storage(result) for i, (_, result, _) in enumerate(self.results) if i != index]
        read = [n for n, _ in self.taken]
        for (source, taken), placeholder in self.builder.found.taken.items():
            free = source.op == "placeholder" and source not in fixed and taken == part and read.count(source) == 1
            if free and layout_of(source.meta["val"]) == layout_of(value) and _storage(placeholder) not in others:
                return source
        return None

    def finished(self, module: GraphModule, over: dict[int, Node]) -> Phase:
        """Return the finished phase.  ``over``: inputs that results overwrite, by index of the result."""
        graph, taken = self.builder.graph, self.builder.found.taken
        outputs = tuple(node for node, _, _ in self.results)
        positions = {n: i for i, n in enumerate(module.graph.find_nodes(op="placeholder"))}
        inputs, slices = tuple(n for n, _ in taken), tuple(part for _, part in taken)
        if all(part is None for _, _, part in self.results):
            graph.output(tuple(made for _, made, _ in self.results))
            return Phase(GraphModule(module, graph), inputs, slices, outputs, (), 1)
        writes = list[Write]()
        for i, (node, _, part) in enumerate(self.results):
            assert part is not None
            writes.append(Write(node, part, positions[over[i]] if i in over else None))
        targets = [
            taken[over[i], write.slice] if i in over else self.builder.destination(write.value, write.slice)
            for i, write in enumerate(writes)
        ]
        for target, (_, made, _) in zip(targets, self.results, strict=True):
            graph.call_function(torch.ops.aten.copy_.default, (target, made)).meta["val"] = target.meta["val"]
        graph.output(())
        return Phase(GraphModule(module, graph), inputs, slices, outputs, tuple(writes), self.repeat)


def _build(group: Iterable[tuple[_Root, _Piece]], builder: Builder) -> _Build:
    """Build the graph of a phase."""
    results, repeat = list[tuple[Node, Node, Slice | None]](), 1
    for root, piece in group:
        repeat, part = piece.repeat, piece.part
        if part is not None:
            part = replace(part, count=part.count // repeat)
        made = builder.root(root.node, part)
        whole = part is None or _is_all(root.node, piece)
        results.append((root.node, made, None if whole or part is None else Slice(part.dim, part.start, part.count)))
    if any(taken is not None or layout_of(made.meta["val"]) != layout_of(n.meta["val"]) for n, made, taken in results):
        results = [(n, made, taken or Slice(0, 0, shape_of(n)[0])) for n, made, taken in results]
    return _Build(builder, repeat, results)


def _finished(module: GraphModule, builds: list[_Build], owned: Collection[int]) -> tuple[Phase, ...]:
    """Return the finished phases.  Only the last phase that reads an input may overwrite it."""
    placeholders = module.graph.find_nodes(op="placeholder")
    fixed = {n for i, n in enumerate(placeholders) if i not in owned} | set(module.graph.output_node().all_input_nodes)
    fixed |= {n for build in builds for n in build.returned}
    found = list[Phase]()
    for build in reversed(builds):
        over: dict[int, Node] = {}
        for i in range(len(build.results) if build.repeat > 1 else 0):
            node = build.overwritten(i, fixed | set(over.values()))
            if node is not None:
                over[i] = node
        found.append(build.finished(module, over))
        fixed |= {n for n, _ in build.taken}
    return tuple(reversed(found))


def layout_of(value: torch.Tensor) -> tuple[object, ...]:
    """Return the shape, strides, dtype and device of a tensor.  The strides of dimensions of size 1 are left out."""
    strides = tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1)
    return tuple(value.shape), strides, value.dtype, value.device


def _storage(node: Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)
