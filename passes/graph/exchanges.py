"""Exchanges: finds attention ops whose heads are divided among the ranks, and the all-to-alls before and after each of these
ops.

With Ulysses, each rank holds a part of the tokens.  All-to-alls give each rank all tokens for a part of the heads.  The
rank computes attention for these heads.  Another all-to-all then returns to each rank the results for its tokens.

Contract
    On entry: an ATen inference graph, which is not changed.
    On exit: one :class:`Exchange` for each attention op between all-to-alls, in the order of the graph.  Raises
    NoGroups, with the reason as a sentence, if the form of an exchange does not permit dividing it into groups of heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from chunkflow_compile.passes.errors import ChunkflowError

from .discover import collective_kind, completes_itself, completion_of
from .slice_parts import is_attention, op_name, shape_of

# Matrix products and convolutions.  These ops compute the inputs of an exchange or read its results, but none of them is
# between attention and the all-to-alls before and after it.
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "linear", "convolution"))
# Torch computes attention with these matrix products if it does not call a single attention op, for example for
# three-dimensional queries.
_BATCHED = frozenset(("bmm", "baddbmm"))
# The only all-to-all that can be divided: the sizes of the parts that it sends and receives are arguments of the op.
ALL_TO_ALL = "_c10d_functional::all_to_all_single"
# If a node computes the attention of one group of heads, its metadata contains the number of groups under this key.
GROUPS = "exchange_groups"


class NoGroups(ChunkflowError):
    """The exchanges of a graph cannot be divided into groups of heads."""


@dataclass(frozen=True)
class Exchange:
    """An attention op between all-to-alls.

    ``attention``: attention op.  ``sent``: all-to-alls that give this rank queries, keys and values, in the order of
    the graph.  ``back``: all-to-all that returns the result.  ``heads``: number of heads for which this rank computes
    attention.  ``inside``: nodes that depend on the received values, and on which ``back`` depends.
    """

    attention: Node
    sent: tuple[Node, ...]
    back: Node
    heads: int
    inside: frozenset[Node]


def groups_of(nodes: Iterable[Node]) -> int:
    """Return the number of groups into which heads are divided, or 1 if none of the nodes computes the attention of a
    group."""
    return max((node.meta.get(GROUPS, 1) for node in nodes), default=1)


def exchanges(graph: Graph) -> tuple[Exchange, ...]:
    """Return the attention ops of a graph that are between all-to-alls."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    found = (_exchange(node, place) for node in graph.nodes if collective_kind(node) == "all-to-all")
    return tuple(exchange for exchange in found if exchange is not None)


def completion(collective: Node) -> Node:
    """Return the completion of an all-to-all.  Raises NoGroups if a node other than this completion reads the result of the
    all-to-all."""
    if (found := completion_of(collective)) is None:
        raise NoGroups(f"The result of {collective.name} is read before its completion.")
    return found


def splits_of(collective: Node) -> tuple[list[int], list[int]]:
    """Return two lists: the number of elements that an all-to-all sends to each rank, and the number of elements that it
    receives from each rank."""
    names = (argument.name for argument in collective.target._schema.arguments)  # type: ignore[union-attr]
    named: dict[str, Any] = dict(zip(names, collective.args, strict=False)) | collective.kwargs
    value = named["input"].meta["val"]
    row = value.numel() // value.shape[0]
    return [n * row for n in named["input_split_sizes"]], [n * row for n in named["output_split_sizes"]]


def _exchange(back: Node, place: Mapping[Node, int]) -> Exchange | None:
    """Return the exchange that ends with the all-to-all ``back``.  Return None if ``back`` does not return the result of an
    attention op whose operands were exchanged."""
    before = [*_before(back.all_input_nodes, _PRODUCTS)]
    attention = [node for node in before if is_attention(node) or _is_named_attention(node)]
    sent = tuple(sorted(filter(_is_all_to_all, before), key=place.__getitem__))
    if not attention and (product := _product_of_received(back)) is not None:
        raise NoGroups(
            f"The attention before the all-to-all {back.name} is computed by separate products ({product.name}), not by one "
            "attention op: call scaled_dot_product_attention with four-dimensional queries, keys and values."
        )
    if not attention or not sent:
        return None
    for node in (*sent, back):
        _check_known(node)
    if len(attention) > 1:
        raise NoGroups(f"The all-to-all {back.name} returns the results of several attention ops.")
    (op,) = attention
    if not is_attention(op):
        raise NoGroups(f"The attention op {op.target} has no rule by which a part of its heads can be computed.")
    received = dict.fromkeys(completion(node) for node in sent)
    inside = _between(received, back, place)
    for node in (*received, *inside):
        if outside := [user for user in node.users if user not in inside and user is not back]:
            raise NoGroups(f"{outside[0].name} also reads {node.name}, which is part of an exchanged attention.")
    sizes = shape_of(op.all_input_nodes[0])
    if not all(isinstance(size, int) for size in sizes):
        raise NoGroups(
            "The sizes of the graph are symbolic, and heads are divided only at fixed sizes: compile the model with "
            "dynamic=False."
        )
    for node in (*sent, back):
        if len({size for sizes in splits_of(node) for size in sizes}) > 1:
            raise NoGroups(
                f"The ranks have different numbers of tokens or heads ({node.name}): give each rank as many."
            )
    return Exchange(op, sent, back, int(sizes[-3]), frozenset(inside))


def _is_all_to_all(node: Node) -> bool:
    return collective_kind(node) == "all-to-all"


def _is_named_attention(node: Node) -> bool:
    """Return whether an op computes attention according to its name, as flex_attention or a user's kernel may do."""
    return collective_kind(node) is None and ("attn" in str(node.target) or "attention" in str(node.target))


def _product_of_received(back: Node) -> Node | None:
    """Return a matrix product on which the all-to-all ``back`` depends, and whose two factors were both received from other
    ranks, or None.  Attention that consists of matrix products and a softmax contains such products."""
    for node in _before(back.all_input_nodes, _PRODUCTS - _BATCHED):
        factors = (_before([factor], _PRODUCTS) for factor in node.args[-2:] if isinstance(factor, Node))
        if op_name(node) in _BATCHED and all(any(map(_is_all_to_all, nodes)) for nodes in factors):
            return node
    return None


def _check_known(node: Node) -> None:
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == ALL_TO_ALL:
        return
    what = "returns only when it is complete" if completes_itself(node) else "is no all_to_all_single"
    raise NoGroups(
        f"The collective {node.target} ({node.name}) {what}, so that its exchange cannot be divided by heads: exchange heads "
        "with torch.distributed's all_to_all_single."
    )


def _before(nodes: Iterable[Node], ends: Collection[str]) -> Iterator[Node]:
    """Yield ``nodes``, their operands, the operands of these operands, and so on.  The search stops at collectives, which are
    yielded, and at ops whose names are in ``ends``, which are not yielded."""
    todo, seen = [*nodes], set[Node]()
    while todo:
        node = todo.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if op_name(node) in ends:
            continue
        yield node
        if collective_kind(node) is None:
            todo += node.all_input_nodes


def _between(received: Collection[Node], back: Node, place: Mapping[Node, int]) -> Collection[Node]:
    """Return, in the order of the graph, the nodes that depend on the received values, and on which the all-to-all ``back``
    depends."""
    first, inside = min(place[node] for node in received), dict[Node, None]()
    todo, above = [back], set[Node]()
    while todo:
        for node in todo.pop().all_input_nodes:
            if node not in above and node not in received and place[node] > first:
                above.add(node)
                todo.append(node)
    for node in sorted(above, key=place.__getitem__):
        if any(operand in inside or operand in received for operand in node.all_input_nodes):
            inside[node] = None
    return inside.keys()
