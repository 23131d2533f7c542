"""Head groups: divides the exchanges around attention into groups of heads, so that one group is exchanged while attention is
computed for another group.

Attention computes each head separately.  Without groups, the all-to-alls of Ulysses before and after attention are exposed:
compute waits until they end.

Contract
    On entry: a Traced, which is not changed, and the number of groups.
    Preserved: the values that the graph computes.  The values are bit-identical if the result of the attention kernel for a
    head does not depend on the number of heads.  In the tests of models on CPUs, the values are bit-identical.  If each
    group consists of a single head with six elements, results on a CPU differ by 4e-7.  There is no test on GPUs, where a
    kernel may split its work differently if there are fewer heads.  All ranks must use the same number of groups.
    On exit: a Traced with the same inputs and results.  First, the all-to-alls before attention are started for all groups,
    one group after the other.  Then compute processes one group after the other.  It waits for the received values of the
    group and computes attention.  It waits for the received values of the next group before it starts the all-to-all that
    returns the result of this group.  After the last group, compute waits for the results of all groups.  Raises NoGroups,
    with the reason as a sentence, if the heads cannot be divided in this way.

Method
    The slice rules (slice_rules.py) give, op by op, the parts of the received values that a group of heads needs.  The values
    that an all-to-all exchanges consist of rows that contain all heads (:class:`_Axis`).  If each rank sends the same part of
    every row, each rank receives that part of every row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from .discover import group_name
from .exchanges import GROUPS, Exchange, NoGroups, completion, exchanges, splits_of
from .group_builder import GroupBuilder
from .slice_graphs import Slice
from .slice_parts import Boundary, NoRule, Part, op_name, shape_of
from .slices import fake_mode
from .traced import Traced

_aten = torch.ops.aten
_VIEWS = ("view", "_unsafe_view", "reshape")


def possible_groups(traced: Traced) -> tuple[int, ...]:
    """Return the numbers of groups (2 or more) into which the heads of every exchanged attention op can be divided.  The
    tuple is empty if the graph contains no exchanged attention op.

    Raises NoGroups if the form of an exchange does not permit dividing it into groups of heads.
    """
    found = exchanges(traced.graph.graph)
    if not found:
        return ()
    heads = reduce(math.gcd, (exchange.heads for exchange in found))
    return tuple(sympy.divisors(heads)[1:])


def in_head_groups(traced: Traced, groups: int) -> Traced:
    """Return the same graph with its exchanges divided into ``groups`` groups of heads.

    A graph that has no exchanges, or whose exchanges have already been divided into ``groups`` groups, is returned unchanged.
    """
    if groups == traced.exchange_groups:
        return traced
    assert traced.exchange_groups == 1, "the exchanges are whole"
    graph, copies = Graph(), dict[Node, Node]()
    for node in traced.graph.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    found = exchanges(graph)
    if not found:
        return traced
    fake = fake_mode(traced.graph)
    for exchange in found:
        _check_heads(exchange, groups)
        _Divided(graph, exchange, groups, fake).write()
    graph.lint()
    return replace(traced, graph=GraphModule(traced.graph, graph), exchange_groups=groups)


def _check_heads(exchange: Exchange, groups: int) -> None:
    heads = exchange.heads
    if heads % groups:
        fits = ", ".join(map(str, sympy.divisors(heads)))
        raise NoGroups(
            f"{groups} groups do not divide the {heads} attention heads of each rank ({exchange.attention.name}): choose one "
            f"of {fits}."
        )


@dataclass(frozen=True)
class _Axis:
    """The position of the heads among the elements of an exchanged tensor.  In the order of memory, the tensor consists of
    ``outer`` rows with ``length`` elements each.  Every row contains all heads, and a group of heads is the same range of
    elements in every row."""

    outer: int
    length: int

    def within(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the dimension of ``shape`` that contains the heads, and how many times all heads are repeated in it.  Return
        None if the heads are not in a single dimension."""
        for dim, size in enumerate(shape):
            before, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
            if before <= self.outer < before * size and self.outer % before == 0:
                outer = self.outer // before
                return (dim, outer) if size % outer == 0 and size // outer * inner == self.length else None
        return None


class _Divided:
    """Divides one exchange into groups of heads, and changes the graph in place."""

    def __init__(self, graph: Graph, exchange: Exchange, groups: int, fake: FakeTensorMode) -> None:
        self.graph, self.exchange, self.groups, self.fake = graph, exchange, groups, fake
        self.received = {completion(node): node for node in exchange.sent}
        self.returned = completion(exchange.back)
        self.result = _unviewed(_operand(exchange.back))
        self.values = {node for node in graph.nodes if node not in exchange.inside}
        self.dim, self.outer = self._found()

    def write(self) -> None:
        """Replace the exchange by one exchange per group."""
        exchange = self.exchange
        built = [self._built(self.dim, self.outer, group, self.fake) for group in range(self.groups)]
        axes = self._axes(built[0][0])
        with self.graph.inserting_before(exchange.sent[-1]):
            parts = [
                [self._part_to_send(node, axes[node], group) for node in exchange.sent] for group in range(self.groups)
            ]
            sent = [
                [self._start(node, axes[node], part) for node, part in zip(exchange.sent, group, strict=True)]
                for group in parts
            ]
        back = _axis_of(self.result, self.dim, self.outer)
        returned = list[Node]()
        with self.graph.inserting_before(exchange.back):
            received = self._awaited(sent[0])
            for (builder, result), ahead in zip(built, [*sent[1:], ()], strict=True):
                mine = self._inlined(builder, result, dict(zip(self.received, received, strict=True)))
                # All-to-alls run one after the other, so the result of this group cannot be sent before the next group has
                # received its values.
                received = self._awaited(ahead)
                returned.append(self._start(exchange.back, back, mine))
        with self.graph.inserting_before(self.returned):
            waits = [self._made(self.returned.target, (start,), self.returned) for start in returned]
        self._join(waits, back)
        self._erase()

    def _awaited(self, sent: Iterable[Node]) -> list[Node]:
        """Add a wait for each all-to-all in ``sent``, and return the waits.  ``sent`` is empty after the last group."""
        return [self._made(wait.target, (start,), wait) for wait, start in zip(self.received, sent, strict=False)]

    def _found(self) -> tuple[int, int]:
        """Find out which dimension of the exchanged result contains the heads.  Return this dimension, and how many times all
        heads are repeated in it (1, or once per rank)."""
        failed = f"they are no dimension of {self.result}"
        for dim, size in enumerate(shape_of(self.result)):
            for outer in dict.fromkeys((1, _ranks_of(self.exchange.back))):
                if size % (outer * self.groups):
                    continue
                builder = self._builder(None)
                try:
                    builder.root(self.result, self._part(dim, outer, 0))
                    if builder.is_by_heads():
                        self._axes(builder)
                        self._check_order(builder, dim, outer)
                        self._check_rows(self.exchange.back, _axis_of(self.result, dim, outer))
                        return dim, outer
                except Boundary:
                    if builder.is_by_heads():
                        failed = "heads are concatenated"
                except NoRule as error:
                    if builder.is_by_heads():
                        failed = str(error)
        raise NoGroups(
            f"The heads of the attention {self.exchange.attention.name} cannot be exchanged in groups: {failed}."
        )

    def _part(self, dim: int, outer: int, group: int) -> Part:
        """Return the part of the result that a group computes."""
        length = shape_of(self.result)[dim] // outer
        count = length // self.groups
        return Part(dim, length, group * count, count, outer)

    def _builder(self, fake: FakeTensorMode | None) -> GroupBuilder:
        return GroupBuilder(self.values, self.received, self.exchange.attention, fake)

    def _built(self, dim: int, outer: int, group: int, fake: FakeTensorMode | None) -> tuple[GroupBuilder, Node]:
        builder = self._builder(fake)
        return builder, builder.root(self.result, self._part(dim, outer, group))

    def _axes(self, builder: GroupBuilder) -> dict[Node, _Axis]:
        """Return, for each all-to-all before attention, the axis of the heads in the tensor that the all-to-all sends.  The
        heads are at the same position in the tensor that it receives."""
        axes = dict[Node, _Axis]()
        for wait, collective in self.received.items():
            if wait not in builder.taken:
                raise NoRule(f"attention does not read {wait}")
            axes[collective] = _axis(shape_of(wait), builder.taken[wait][0])
            self._check_rows(collective, axes[collective])
        return axes

    def _check_order(self, first: GroupBuilder, dim: int, outer: int) -> None:
        """Check that group ``i`` computes its part of the result from part ``i`` of the heads in each received tensor.

        ``first``: the builder of the first group.
        Raises NoRule if attention reads the heads in another order, several times, or only some of them.
        """
        others = (self._built(dim, outer, group, None)[0] for group in range(1, self.groups))
        for group, builder in enumerate((first, *others)):
            for node, (part, _) in builder.taken.items():
                if (part.start, part.count * self.groups) != (group * part.count, part.length):
                    raise NoRule(f"attention reads the heads of {node} in another order, several times or in part")

    def _check_rows(self, collective: Node, axis: _Axis) -> None:
        """Check that each rank sends and receives whole rows of ``axis``, and that a row can be divided into the groups."""
        if any(size % axis.length for sizes in splits_of(collective) for size in sizes) or axis.length % self.groups:
            raise NoRule(f"the ranks divide rows of {collective} that hold all heads")

    def _part_to_send(self, collective: Node, axis: _Axis, group: int) -> Node:
        """Add nodes that take, from the operand of the all-to-all ``collective``, the elements that a group sends."""
        like = _unviewed(_operand(collective))
        source = like
        if source.target is _aten.clone.default and source.args[0].meta["val"].shape == source.meta["val"].shape:  # type: ignore[union-attr]
            source = _operand(source)
        place = axis.within(shape_of(source))
        if place is None or place[1] != 1:
            source = self._view(like, (axis.outer, axis.length))
            place = 1, 1
        dim = place[0]
        count = shape_of(source)[dim] // self.groups
        part = self._made(_aten.slice.Tensor, (source, dim, group * count, (group + 1) * count), like)
        return self._made(_aten.clone.default, (part,), like, memory_format=torch.contiguous_format)

    def _start(self, collective: Node, axis: _Axis, part: Node) -> Node:
        """Add the all-to-all of a group to the graph, and return its node.  ``part``: node with the values to send."""
        taken, given = ([size // self.groups for size in sizes] for sizes in splits_of(collective))
        if not part.meta["val"].is_contiguous():
            part = self._made(_aten.clone.default, (part,), part, memory_format=torch.contiguous_format)
        flat = self._view(part, (part.meta["val"].numel(),))
        value = flat.meta["val"]
        with self.fake:
            result = torch.empty((sum(given),), dtype=value.dtype, device=value.device)
        return self._made(collective.target, (flat, given, taken, group_name(collective)), collective, value=result)

    def _inlined(self, builder: GroupBuilder, result: Node, received: dict[Node, Node]) -> Node:
        """Copy the graph of a group's attention into the graph at the insertion point."""
        copies = dict[Node, Node]()
        for wait, (_, given) in builder.taken.items():
            copies[given] = self._view(received[wait], given.meta["val"].shape)
        for (node, part), given in builder.found.taken.items():
            if given not in copies:
                copies[given] = node if part is None else self._sliced(node, part)
        for node in builder.graph.nodes:
            if node.op != "placeholder":
                copies[node] = self.graph.node_copy(node, copies.__getitem__)
                copies[node].meta[GROUPS] = self.groups
        return copies[result]

    def _join(self, waits: Sequence[Node], axis: _Axis) -> None:
        """Join the results of the groups.  The joined value replaces the undivided result.  If the only reader of that result
        is a chain of views that ends in a contiguous copy, the joined value replaces the copy instead."""
        chain, axes = _moves_to_copy(self.returned, axis)
        last = chain[-1]
        dim, outer = axes[-1]
        shape, value = shape_of(last), last.meta["val"]
        count = shape[dim] // outer // self.groups
        with self.graph.inserting_before(last if last is not self.returned else self.returned.next):
            pieces = [self._moved(wait, chain, axes) for wait in waits]
            rows = (*shape[:dim], outer, count, *shape[dim + 1 :])
            whole = self._made(_aten.cat.default, ([self._view(piece, rows) for piece in pieces], dim + 1), last)
            joined = self._view(whole, shape)
        assert joined.meta["val"].stride() == value.stride() and joined.meta["val"].is_contiguous()
        last.replace_all_uses_with(joined)
        for node in reversed(chain[1:]):
            self.graph.erase_node(node)

    def _moved(self, piece: Node, chain: Sequence[Node], axes: Sequence[tuple[int, int]]) -> Node:
        """Apply the views in ``chain`` to the result of a group, in the same way as to the whole result.  The last op of
        ``chain`` is a copy and is left out."""
        for node, (dim, _) in zip(chain[:-1] or chain, axes, strict=False):
            shape = [size // self.groups if d == dim else size for d, size in enumerate(shape_of(node))]
            if node is chain[0] or op_name(node) in _VIEWS:
                piece = self._view(piece, shape)
            else:
                piece = self._made(node.target, (piece, *node.args[1:]), node)
        return piece

    def _sliced(self, node: Node, part: Slice) -> Node:
        return self._made(_aten.slice.Tensor, (node, part.dim, part.offset, part.offset + part.size), node)

    def _view(self, node: Node, shape: Iterable[int]) -> Node:
        if (shape := [*shape]) == [*shape_of(node)]:
            return node
        return self._made(_aten.view.default, (node, [*shape]), node)

    def _made(self, target: Any, args: tuple[Any, ...], like: Node, *, value: Any = None, **kwargs: Any) -> Node:
        """Add a call of ``target`` to the graph.  The new node gets the metadata of ``like``, except for the value."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {name: each for name, each in like.meta.items() if name != "val"}
        if value is None:
            given = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            with self.fake:
                value = target(*given[0], **given[1])
        node.meta["val"] = value
        return node

    def _erase(self) -> None:
        """Erase the nodes that the groups replace, and the nodes that were read only by these nodes."""
        gone = [self.returned, self.exchange.back, *self.exchange.inside, *self.received, *self.exchange.sent]
        todo = [*gone, *(node for collective in self.exchange.sent for node in _views_to(_operand(collective)))]
        while unread := [node for node in todo if not node.users]:
            for node in unread:
                self.graph.erase_node(node)
            todo = [node for node in todo if node not in unread]


def _operand(node: Node) -> Node:
    operand = node.args[0]
    assert isinstance(operand, Node)
    return operand


def _views_to(node: Node) -> list[Node]:
    """Return the views and copies that end with ``node``, from ``node`` back to the first one.  The value from which they are
    made is left out."""
    found = [node]
    while op_name(node) in (*_VIEWS, "permute", "transpose", "clone"):
        node = _operand(node)
        found.append(node)
    return found[:-1]


def _unviewed(node: Node) -> Node:
    """Return the value of which a node is a reshaped view, or the node itself if it is not a view."""
    while op_name(node) in _VIEWS:
        node = _operand(node)
    return node


def _moves_to_copy(node: Node, axis: _Axis) -> tuple[list[Node], list[tuple[int, int]]]:
    """Return the chain of views that leads from a node to a contiguous copy, including the node and the copy.  Each value in
    the chain is read only by the next value.  If there is no such chain, return a chain that contains only the node.  For
    each value in the chain, also return the dimension that contains the heads, and how many times all heads are repeated in
    this dimension."""
    place = axis.within(shape_of(node))
    assert place is not None, "the axis is one of the node"
    chain, axes = [node], [place]
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        dim, outer = axes[-1]
        if op_name(user) == "clone" and user.kwargs.get("memory_format") is torch.contiguous_format:
            return [*chain, user], [*axes, axes[-1]]
        if op_name(user) == "permute":
            order: Any = user.args[1]
            found: tuple[int, int] | None = [d % len(order) for d in order].index(dim), outer
        elif op_name(user) in _VIEWS:
            found = _axis_of(chain[-1], dim, outer).within(shape_of(user))
        else:
            found = None
        if found is None:
            break
        chain.append(user)
        axes.append(found)
    return [node], [place]


def _axis(shape: Sequence[int], part: Part) -> _Axis:
    inner = math.prod(shape[part.dim + 1 :])
    return _Axis(math.prod(shape[: part.dim]) * part.outer, shape[part.dim] // part.outer * inner)


def _axis_of(node: Node, dim: int, outer: int) -> _Axis:
    shape = shape_of(node)
    return _axis(shape, Part(dim, shape[dim] // outer, 0, 1, outer))


def _ranks_of(collective: Node) -> int:
    return len(splits_of(collective)[0])
