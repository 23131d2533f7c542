"""Slices: a region's graph as phases, each a smaller graph that is called for one slice of the tokens at a time.

Contract
    On entry: the ATen graph of a region, or of several regions that are merged.  It is not changed.
    On exit: phases in the order in which they run.  Together they compute the outputs of the graph; :func:`check_phases`
    proves it.
    Raises Whole if the graph cannot be computed in slices.

Method
    The largest output is split along one of its dimensions.  The rules in ``slice_rules`` give, op by op, the slices of
    the inputs that a slice of an output needs.  Where an op needs the whole of a value that depends on the split inputs,
    as attention needs its keys and values, an earlier phase computes that value, itself in slices.  Products that do not
    depend on the split inputs are computed once.

Terms
    root     a value that a phase computes: an output of the graph, or a value that a later phase needs whole
    piece    a part of a root that is computed alike, in one call or in ``repeat`` calls: a root that concatenates streams
             of tokens has one piece per stream
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from chunkflow_compile.passes.errors import ChunkflowError

from .sizes import symbols_of
from .slice_rules import Boundary, NoRule, Operand, Part, Sliced, is_light, is_reshape, op_name, shape_of, sliced

# Bytes to which the slices of a value are aligned: kernels that read whole vectors need it.
ALIGNMENT = 16


class Whole(ChunkflowError):
    """A graph cannot be computed in slices."""


@dataclass(frozen=True)
class Slice:
    """The part of a value for call ``i`` of a phase: ``narrow(dim, offset + i * size, size)``."""

    dim: int
    offset: int
    size: int


@dataclass(frozen=True)
class Write:
    """A result that a phase writes, one slice per call.

    ``value``: the node of the region's graph that is written in parts.  ``over``: the position of the placeholder of the
    region's graph whose memory it overwrites; None for fresh memory, with the strides of the value's metadata, which is
    allocated at the first phase that writes a part of the value.
    """

    value: Node
    slice: Slice
    over: int | None


@dataclass(frozen=True)
class Phase:
    """A graph that is called ``repeat`` times.

    ``module``: its placeholders are ``inputs``, then the destination of each write to fresh memory.  With ``writes``, it
    copies each result into its destination, or over the input that it replaces, and returns ().  Without, it returns
    ``outputs``, and ``repeat`` is 1.
    ``inputs``: nodes of the region's graph: its placeholders, or values that an earlier phase computes.  ``slices``: the
    part of each that a call takes, None for the whole.
    """

    module: GraphModule
    inputs: tuple[Node, ...]
    slices: tuple[Slice | None, ...]
    outputs: tuple[Node, ...]
    writes: tuple[Write, ...]
    repeat: int


def phases(module: GraphModule, repeat: int, owned: Collection[int]) -> tuple[Phase, ...]:
    """The phases of a region's graph, of which the longest stream is computed in ``repeat`` calls.

    ``owned``: positions of the placeholders whose memory may be overwritten: nobody else reads them, under any name.
    Raises Whole, with the reason.
    """
    nodes = [n for n in module.graph.nodes if n.op != "output"]
    if symbols_of([n.meta.get("val") for n in nodes]):
        raise Whole("The sizes of the graph are symbolic: it can be computed in slices only at fixed sizes.")
    outputs = _outputs(module)
    if not outputs:
        raise Whole("The graph computes no tensor.")
    largest = max(outputs, key=lambda n: math.prod(shape_of(n)))
    failed: Whole | None = None
    for dim in _dims(largest):
        try:
            plan = _Plan(repeat, largest, dim)
            plan.find(outputs)
        except Whole as error:
            failed = failed or error
            continue
        return _finished(module, plan.builds(_fake_mode(nodes)), owned)
    raise failed or Whole(f"{largest} has no dimension that can be split.")


def _outputs(module: GraphModule) -> list[Node]:
    """The tensors that a graph computes and returns."""
    (returned,) = module.graph.output_node().args
    nodes = [n for n in dict.fromkeys(returned) if isinstance(n, Node) and n.op == "call_function"]  # type: ignore[arg-type]
    return [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _fake_mode(nodes: Iterable[Node]) -> FakeTensorMode:
    """The mode of the metadata of a graph."""
    modes = (getattr(n.meta.get("val"), "fake_mode", None) for n in nodes)
    return next((mode for mode in modes if mode is not None), None) or FakeTensorMode(allow_non_fake_inputs=True)


def _dims(node: Node) -> list[int]:
    """The dimensions along which a value may be split: the last holds the features of a token."""
    shape = shape_of(node)
    dims = range(len(shape) - 1) if len(shape) > 1 else range(len(shape))
    return sorted((d for d in dims if shape[d] > 1), key=lambda d: -shape[d])


def depends_on(node: Node, inputs: Collection[Node]) -> bool:
    """Whether a node is computed from one of these inputs, or is one."""
    seen, todo = set[Node](), [node]
    while todo:
        if (n := todo.pop()) in inputs:
            return True
        if n not in seen:
            seen.add(n)
            todo += n.all_input_nodes
    return False


@dataclass
class _Walk:
    """What a walk from a root back to the inputs has found.

    ``taken``: the inputs, by node and part (None for the whole).  ``needs``: values that earlier phases must compute ->
    the dimensions along which they can be split, and why they are needed whole.
    """

    taken: dict[tuple[Node, Slice | None], Node] = field(default_factory=dict)
    needs: dict[Node, tuple[tuple[int, ...], str]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Step:
    """How a builder computes a node, or a part of it.

    ``reads``: the nodes and parts that it reads.  ``call``: the op, None if the value is an input.  ``item``: which of its
    results the node is.  ``operands``: the arguments of the op, with an Operand for each node; or the one that is the value.
    """

    reads: tuple[tuple[Node, Part | None], ...]
    call: Node | None = None
    item: Any = None
    operands: Any = None


class _Builder:
    """Builds the graph of a phase.

    ``values``: nodes that earlier phases compute.  ``streams``: inputs that are split; empty if they are not known.
    ``fake``: the mode in which metadata is computed; None to find only what is needed.
    """

    def __init__(self, values: Collection[Node], streams: Collection[Node], fake: FakeTensorMode | None = None) -> None:
        self.values = values
        self.streams = streams
        self.fake = fake
        self.graph = Graph()
        self.found = _Walk()
        self._anchor = self.graph._root
        self._copies: dict[tuple[Node, Part | None], Node] = {}
        self._calls: dict[tuple[Node, str], Node] = {}
        self._steps: dict[tuple[Node, Part | None], _Step] = {}
        self._making: Node | None = None
        self._inline = False

    def root(self, node: Node, part: Part | None) -> Node:
        """Compute a root, or a part of it.  The whole of one is computed from the inputs and ``values`` alone."""
        self._making, self._inline = node, part is None
        todo: list[tuple[Node, Part | None]] = [(node, part)]
        while todo:  # a graph is deeper than Python's stack
            key = todo[-1]
            if key not in self._steps:
                self._steps[key] = self._step(*key)
            missing = [k for k in self._steps[key].reads if k not in self._copies]
            if not missing:
                self._copies.setdefault(key, self._write(key, self._steps[key]))
                todo.pop()
            todo += reversed(missing)
        return self._copies[node, part]

    def _step(self, node: Node, part: Part | None) -> _Step:
        """How a node, or a part of it, is computed."""
        if self._is_given(node):
            return _Step(())
        call, item = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, None)
        assert isinstance(call, Node)
        if call.op == "get_attr":
            raise NoRule(f"{call} is a nested graph")
        rule: Sliced | Operand = Sliced(call.args, dict(call.kwargs))
        if part is not None:
            try:
                rule = sliced(call, part, item)  # type: ignore[arg-type]
            except NoRule as reason:
                if node is self._making:
                    raise
                self.found.needs.setdefault(node, ((), str(reason)))
                return _Step(())
        reads = list[tuple[Node, Part | None]]()

        def read(operand: Any) -> Any:
            operand = Operand(operand) if isinstance(operand, Node) else operand
            if isinstance(operand, Operand):
                reads.append((operand.node, operand.part))
                if operand.part is None:
                    self._note(operand, call)
            return operand

        given: Any = rule if isinstance(rule, Operand) else (rule.args, rule.kwargs)
        given = map_aggregate(given, read)
        return _Step(tuple(reads), call, item, given)

    def _note(self, operand: Operand, reader: Node) -> None:
        """Note the value that an earlier phase must compute so that an operand can be read whole, if there is one."""
        node, along = operand.node, operand.along
        if self._inline or self._is_given(node) or not (self._is_split(node, along) or self._is_heavy(node)):
            return
        base, dims = self._base(node, along)
        if base is not self._making and not self._is_given(base):
            self.found.needs[base] = (dims, f"{op_name(reader)} reads all of it")

    def _write(self, key: tuple[Node, Part | None], step: _Step) -> Node:
        """Write a node, whose operands are there."""
        node, part = key
        if step.call is None:
            return self._take(node, part)
        if isinstance(step.operands, Operand):
            return self._copies[step.operands.node, step.operands.part]
        args, kwargs = map_aggregate(
            step.operands, lambda x: self._copies[x.node, x.part] if isinstance(x, Operand) else x
        )
        call = step.call, repr((args, kwargs))
        if call not in self._calls:
            self._calls[call] = self._made(step.call, step.call.target, args, kwargs)
        made = self._calls[call]
        return made if step.item is None else self._made(node, operator.getitem, (made, step.item), {})

    def _is_given(self, node: Node) -> bool:
        if node is self._making:
            return False
        return node.op == "placeholder" or node in self.values or node in self.found.needs

    def _is_split(self, node: Node, along: tuple[int, ...]) -> bool:
        """Whether the whole of a node is computed from split inputs, in slices."""
        return bool(along) and (not self.streams or depends_on(node, self.streams))

    def _is_heavy(self, node: Node) -> bool:
        """Whether computing a node in each call would repeat more than pointwise ops."""
        todo, seen = [node], set[Node]()
        while todo:
            n = todo.pop()
            if n in seen or n.op != "call_function" or self._is_given(n):
                continue
            if n.target is not operator.getitem and not is_light(n):
                return True
            seen.add(n)
            todo += n.all_input_nodes
        return False

    def _base(self, node: Node, along: tuple[int, ...]) -> tuple[Node, tuple[int, ...]]:
        """What a node is a view of, and the dimensions ``along`` in it."""
        while is_reshape(node) and not self._is_given(node):
            dims = [self._behind(node, dim) for dim in along]
            if along and None in dims:
                break
            node, along = node.all_input_nodes[0], tuple(d for d in dims if d is not None)
        return node, along

    def _behind(self, view: Node, dim: int) -> int | None:
        """The dimension of a view's operand that is ``dim`` of the view; None if it is not one by itself."""
        size = shape_of(view)[dim]
        try:
            rule = sliced(view, Part(dim, size, 0, size))
        except NoRule:
            return None
        part = rule.args[0].part if isinstance(rule, Sliced) else None
        alone = part is not None and part.outer == 1 and shape_of(view.all_input_nodes[0])[part.dim] == size
        return part.dim if part is not None and alone else None

    def _take(self, node: Node, part: Part | None) -> Node:
        if part is not None and part.outer != 1:
            raise NoRule(f"the tokens of {node} are merged with another dimension")
        taken = None if part is None else Slice(part.dim, part.start, part.count)
        key = (node, taken)
        if key not in self.found.taken:
            with self.graph.inserting_after(self._anchor):
                self._anchor = self.graph.placeholder(f"in_{len(self.found.taken)}")
            self._anchor.meta = {"val": self._slice_of(node, taken)}
            self.found.taken[key] = self._anchor
        return self.found.taken[key]

    def destination(self, node: Node, part: Slice) -> Node:
        """A further placeholder, for the memory of a slice of a node."""
        with self.graph.inserting_after(self._anchor):
            self._anchor = self.graph.placeholder(f"out_{node.name}")
        self._anchor.meta = {"val": self._slice_of(node, part)}
        return self._anchor

    def _slice_of(self, node: Node, part: Slice | None) -> Any:
        """The metadata of a node, or of a slice of it."""
        value = node.meta["val"]
        if part is None or self.fake is None:
            return value
        shape = [part.size if d == part.dim else n for d, n in enumerate(value.shape)]
        with self.fake:
            return torch.empty_strided(shape, value.stride(), dtype=value.dtype, device=value.device)

    def _made(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {name: value for name, value in node.meta.items() if name != "val"}
        if self.fake is None:
            return made
        try:
            made.meta["val"] = self._computed(made)
        except (RuntimeError, ValueError):
            if op_name(node) not in ("view", "_unsafe_view"):
                raise
            # A slice of a batch is not contiguous.
            self.graph.erase_node(made)
            source = self._made(
                node, torch.ops.aten.clone.default, args[:1], {"memory_format": torch.contiguous_format}
            )
            made = self._made(node, target, (source, *args[1:]), kwargs)
        return made

    def _computed(self, node: Node) -> Any:
        """The metadata of a call."""
        assert self.fake is not None and callable(node.target)
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])  # type: ignore[misc]
        with self.fake:
            return node.target(*args, **kwargs)


@dataclass(frozen=True)
class _Piece:
    """A part of a root; None for the whole, computed by the ops of the graph as they are."""

    part: Part | None
    repeat: int


@dataclass(frozen=True)
class _Root:
    """A value that a phase computes.  ``depends``: the values that it needs from earlier phases."""

    node: Node
    pieces: tuple[_Piece, ...]
    depends: frozenset[Node]


class _Plan:
    """The roots of a graph whose largest output is split along dimension ``dim``."""

    def __init__(self, repeat: int, largest: Node, dim: int) -> None:
        self.repeat, self.largest, self.dim = repeat, largest, dim
        self.roots: dict[Node, _Root] = {}
        self.needs: dict[Node, tuple[tuple[int, ...], str]] = {}
        self.streams: set[Node] = set()  # inputs of which the largest output reads slices; empty if they are not known
        try:
            self.longest = max(part.count for part in self._ranges(largest, dim))
        except NoRule as error:
            raise Whole(f"The graph cannot be computed in slices: {error}.") from None
        if self.longest % repeat:
            raise Whole(f"{self.longest} tokens cannot be divided into {repeat} slices of one size.")

    def find(self, outputs: list[Node]) -> None:
        """Find the roots: the outputs, and the values that they need, and so on."""
        _, walk = self._split(self.largest, self.dim)
        self.streams = {n for n, part in walk.taken if part is not None and n.op == "placeholder"}
        if not self.streams:
            raise Whole(f"The graph cannot be computed in slices: {self.largest} reads no slice of an input.")
        self._find(self.largest, (self.dim,), "it is the largest output")
        for node in outputs:
            if node is not self.largest:
                self._find(node, tuple(sorted(_dims(node), key=lambda d: d != self.dim)), "it is an output")
        while missing := [n for n in self.needs if n not in self.roots]:
            self._find(missing[0], *self.needs[missing[0]])

    def _find(self, node: Node, dims: tuple[int, ...], reason: str) -> None:
        """Find how a root can be computed."""
        failed = f"{op_name(node)} {node}: {reason}"
        for dim in dims:
            try:
                pieces, walk = self._split(node, dim)
            except NoRule as error:
                failed = f"{error}, where {node} is split along dimension {dim}"
                continue
            bad = [n for n, (along, _) in walk.needs.items() if not along and depends_on(n, self.streams)]
            if not bad:
                break
            failed = f"{walk.needs[bad[0]][1]} ({bad[0]})"
        else:
            if depends_on(node, self.streams) or node is self.largest:
                raise Whole(f"The graph cannot be computed in slices: {failed}.")
            builder = _Builder((), self.streams)
            builder.root(node, None)
            pieces, walk = (_Piece(None, 1),), builder.found
        for n, need in walk.needs.items():
            self.needs.setdefault(n, need)
        self.roots[node] = _Root(node, pieces, frozenset(n for n, _ in walk.taken if n.op == "call_function"))

    def _split(self, node: Node, dim: int) -> tuple[tuple[_Piece, ...], _Walk]:
        """The pieces of a root that is split along a dimension, and what they read."""
        pieces, found = list[_Piece](), _Walk()
        for part in self._ranges(node, dim):
            repeat = self.repeat if part.count >= self.longest else 1
            if part.count % repeat:
                raise Whole(f"{part.count} elements of {node} cannot be divided into {repeat} slices of one size.")
            pieces.append(_Piece(part, repeat))
            builder = _Builder((), self.streams)
            builder.root(node, replace(part, count=part.count // repeat))
            found.taken |= builder.found.taken
            found.needs |= builder.found.needs
        return tuple(pieces), found

    def _ranges(self, node: Node, dim: int) -> list[Part]:
        """The parts of a root that are concatenated along a dimension."""
        size = shape_of(node)[dim]
        found, todo = list[Part](), [Part(dim, size, 0, size)]
        while todo:
            part = todo.pop()
            try:
                _Builder((), self.streams).root(node, part)
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
        """The graphs of the phases, in the order in which they run."""
        levels: dict[Node, int] = {}

        def level(node: Node) -> int:
            if node not in levels:
                levels[node] = 1 + max((level(n) for n in self.roots[node].depends), default=-1)
            return levels[node]

        last = max(level(node) for node in self.roots)
        read = {n for root in self.roots.values() for n in root.depends}
        levels |= dict.fromkeys(self.roots.keys() - read, last)
        groups = dict[tuple[int, int, int], list[tuple[_Root, _Piece]]]()
        for node, root in self.roots.items():
            for piece in root.pieces:
                count = 0 if piece.part is None or _is_all(node, piece) else piece.part.count
                groups.setdefault((levels[node], piece.repeat, count), []).append((root, piece))
        return [
            _build(groups[key], _Builder({n for n, at in levels.items() if at < key[0]}, self.streams, fake))
            for key in sorted(groups)
        ]


def _is_all(node: Node, piece: _Piece) -> bool:
    """Whether a piece is all of its root, in one call."""
    return piece.part is None or (piece.repeat == 1 and piece.part.count == shape_of(node)[piece.part.dim])


@dataclass
class _Build:
    """The graph of a phase before its results are written.  ``results``: each root, its node in the graph, and its slice;
    None for all of it."""

    builder: _Builder
    repeat: int
    results: list[tuple[Node, Node, Slice | None]]

    @property
    def taken(self) -> list[tuple[Node, Slice | None]]:
        return list(self.builder.found.taken)

    def overwritten(self, index: int, fixed: Collection[Node]) -> Node | None:
        """The input that result ``index`` can overwrite.  ``fixed``: those that must keep their values."""
        node, _, part = self.results[index]
        value = node.meta["val"]
        if part is None or part.size * self.repeat != value.shape[part.dim]:
            return None
        others = [_storage(result) for i, (_, result, _) in enumerate(self.results) if i != index]
        read = [n for n, _ in self.taken]
        for (source, taken), placeholder in self.builder.found.taken.items():
            free = source.op == "placeholder" and source not in fixed and taken == part and read.count(source) == 1
            if free and _layout(source.meta["val"]) == _layout(value) and _storage(placeholder) not in others:
                return source
        return None

    def finished(self, module: GraphModule, over: dict[int, Node]) -> Phase:
        """The phase.  ``over``: the inputs that results overwrite, by position among the results."""
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


def _build(group: Iterable[tuple[_Root, _Piece]], builder: _Builder) -> _Build:
    """Build the graph of a phase."""
    results, repeat = list[tuple[Node, Node, Slice | None]](), 1
    for root, piece in group:
        repeat, part = piece.repeat, piece.part
        if part is not None:
            part = replace(part, count=part.count // repeat)
        made = builder.root(root.node, part)
        whole = part is None or _is_all(root.node, piece)
        results.append((root.node, made, None if whole or part is None else Slice(part.dim, part.start, part.count)))
    if any(taken is not None or _layout(made.meta["val"]) != _layout(n.meta["val"]) for n, made, taken in results):
        results = [(n, made, taken or Slice(0, 0, shape_of(n)[0])) for n, made, taken in results]
    for node, taken in [*builder.found.taken, *((n, taken) for n, _, taken in results)]:
        _check_alignment(node, taken, repeat)
    return _Build(builder, repeat, results)


def _finished(module: GraphModule, builds: list[_Build], owned: Collection[int]) -> tuple[Phase, ...]:
    """The phases.  An input is overwritten by the last phase that reads it, if by any."""
    placeholders = module.graph.find_nodes(op="placeholder")
    fixed = {n for i, n in enumerate(placeholders) if i not in owned} | set(module.graph.output_node().all_input_nodes)
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


def _check_alignment(node: Node, part: Slice | None, repeat: int) -> None:
    if part is None:
        return
    value = node.meta["val"]
    step = value.element_size() * value.stride(part.dim)
    if part.offset * step % ALIGNMENT or (repeat > 1 and part.size * step % ALIGNMENT):
        raise Whole(
            f"Slices of {part.size * step} bytes of {node}, from byte {part.offset * step} on, are not aligned to "
            f"{ALIGNMENT} bytes."
        )


def _layout(value: torch.Tensor) -> tuple[object, ...]:
    """Shape, strides, dtype and device; a dimension of one element has no stride."""
    strides = tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1)
    return tuple(value.shape), strides, value.dtype, value.device


def _storage(node: Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)
