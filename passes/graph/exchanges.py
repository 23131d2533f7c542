"""Exchanges: finds attention ops whose heads are divided among the ranks, with the all-to-alls before and after each of
them.

With Ulysses, each rank holds a part of the tokens.  All-to-alls give each rank all tokens for a part of the heads.  The
rank computes attention for these heads, and another all-to-all returns the result.

Contract
    On entry: an ATen inference graph, which is not changed.
    On exit: one :class:`Exchange` for each attention op between all-to-alls, in the order of the graph.  Raises
    NoGroups, with the reason as a sentence, if one of the exchanges can never be divided by heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from chunkflow_compile.passes.errors import ChunkflowError

from .discover import collective_kind, completes_itself, completion_of
from .slice_parts import is_attention, op_name, shape_of

# Ops that compute the inputs of an exchange, or read its results.  There are no such ops between attention and its
# exchanges.
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "linear", "convolution"))
# The only all-to-all that can be divided: its arguments give the sizes of the parts that it sends and receives.
ALL_TO_ALL = "_c10d_functional::all_to_all_single"
# The key in a node's metadata for the number of groups, if the node computes the attention of one group of heads.
GROUPS = "exchange_groups"


class NoGroups(ChunkflowError):
    """The exchanges of a graph cannot be divided into groups of heads."""


@dataclass(frozen=True)
class Exchange:
    """An attention op between all-to-alls.

    ``attention``: attention op.  ``sent``: all-to-alls that give this rank queries, keys and values, in the order of
    the graph.  ``back``: all-to-all that returns the result.  ``heads``: number of heads of this rank.  ``inside``:
    nodes between ``sent`` and ``back``: they depend on the received values, and ``back`` depends on them.
    """

    attention: Node
    sent: tuple[Node, ...]
    back: Node
    heads: int
    inside: frozenset[Node]


def groups_of(nodes: Iterable[Node]) -> int:
    """Return the number of groups of heads if the nodes compute the attention of one group, otherwise 1."""
    return max((node.meta.get(GROUPS, 1) for node in nodes), default=1)


def exchanges(graph: Graph) -> tuple[Exchange, ...]:
    """Return the attention ops of a graph that are between all-to-alls."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    found = (_exchange(node, place) for node in graph.nodes if collective_kind(node) == "all-to-all")
    return tuple(exchange for exchange in found if exchange is not None)


def completion(collective: Node) -> Node:
    """Return the op that completes an all-to-all.  Raises NoGroups if the result is read in any other way than through
    one completion."""
    if (found := completion_of(collective)) is None:
        raise NoGroups(f"The result of {collective.name} is read before its completion.")
    return found


def _exchange(back: Node, place: Mapping[Node, int]) -> Exchange | None:
    """Return the exchange that ends with the all-to-all ``back``.  Return None if ``back`` does not follow an attention
    op whose operands were exchanged."""
    before = [*_before(back)]
    attention = [node for node in before if is_attention(node) or "attn" in str(node.target)]
    sent = {node for node in before if collective_kind(node) == "all-to-all"}
    if not attention or not sent:
        return None
    for node in (*sent, back):
        _check_known(node)
    if len(attention) > 1:
        raise NoGroups(f"The all-to-all {back.name} returns the results of several attention ops.")
    (op,) = attention
    if not is_attention(op):
        raise NoGroups(f"The attention op {op.target} has no rule by which a part of its heads can be computed.")
    received = {completion(node) for node in sent}
    inside = _between(received, back, place)
    for node in inside:
        if outside := [user for user in node.users if user not in inside and user is not back]:
            raise NoGroups(f"{outside[0].name} also reads {node.name}, which is part of an exchanged attention.")
    sizes = shape_of(op.all_input_nodes[0])
    if not all(isinstance(size, int) for size in sizes):
        raise NoGroups(
            "The sizes of the graph are symbolic, and heads are divided only at fixed sizes: compile the model with "
            "dynamic=False."
        )
    return Exchange(op, tuple(sorted(sent, key=place.__getitem__)), back, int(sizes[-3]), frozenset(inside))


def _check_known(node: Node) -> None:
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == ALL_TO_ALL:
        return
    what = "returns only when it is complete" if completes_itself(node) else "is no all_to_all_single"
    raise NoGroups(
        f"The collective {node.target} ({node.name}) {what}, so that its exchange cannot be divided by heads: exchange heads "
        "with torch.distributed's all_to_all_single."
    )


def _before(back: Node) -> Iterator[Node]:
    """Yield the nodes from which an all-to-all gets its operand, going back to products (which are left out) and other
    collectives (which are included)."""
    todo, seen = [*back.all_input_nodes], set[Node]()
    while todo:
        node = todo.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if op_name(node) in _PRODUCTS:
            continue
        yield node
        if collective_kind(node) is None:
            todo += node.all_input_nodes


def _between(received: Collection[Node], back: Node, place: Mapping[Node, int]) -> set[Node]:
    """Return the nodes that depend on the received values and on which the all-to-all ``back`` depends."""
    first, inside = min(place[node] for node in received), set[Node]()
    todo, above = [back], set[Node]()
    while todo:
        for node in todo.pop().all_input_nodes:
            if node not in above and node not in received and place[node] > first:
                above.add(node)
                todo.append(node)
    for node in sorted(above, key=place.__getitem__):
        if any(operand in inside or operand in received for operand in node.all_input_nodes):
            inside.add(node)
    return inside
