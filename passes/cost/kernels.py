"""Kernels: counts the kernels of a region other than products (GEMMs, convolutions, attention), and the bytes that these
kernels move.

Inductor fuses consecutive pointwise ops and reductions if there is no product between them.  All ops of a fused group run in
one kernel.  The kernel reads each value from outside the group once, and writes the values that are used outside the group.
A node that is marked as ``INLINED`` is computed again in each group that reads it.  If a group reads only a fraction of an
inlined node, it reads the same fraction of the operands of this node.  In eager mode, each op is a kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from networkx.utils import UnionFind
from torch.fx import Node

Values = Mapping[Node, Any]
# A pointwise node with this key in its metadata is computed again in each kernel that reads it.
INLINED = "inlined"


def other_kernels(values: Values, products: Collection[Node], fused: bool) -> tuple[int, Mapping[int, int]]:
    """Return the number of kernels for the ops that are not in ``products``, and the traffic of these kernels.  The traffic
    maps a tensor size in bytes to the bytes that the kernels read and write in tensors of this size.

    ``values``: for each node of the region, its value, as fake tensors.  ``products``: nodes whose cost is counted
    separately, such as GEMMs, convolutions and attention.  ``fused``: whether Inductor fuses ops into groups; otherwise each
    op is a kernel.
    """
    bases, depths = bases_of(values), _depths(values, products)
    inlined = {n for n in values if fused and n.meta.get(INLINED)}
    others = (n for n in values if n not in products and n.op == "call_function" and not _moves_nothing(n))
    ops = [n for n in others if tensors(values[n]) and n not in inlined]
    groups = UnionFind(ops)
    if fused:
        members = set(ops)
        for op in ops:
            groups.union(op, *(b for n in op.all_input_nodes if (b := bases[n]) in members and depths[b] == depths[op]))
    kernels = [set(group) for group in groups.to_sets()] if ops else []
    traffic = Counter[int]()
    for group in kernels:
        for tensor, moved in _moved(group, values, bases, inlined):
            traffic[tensor] += moved
    return len(kernels), traffic


def _moves_nothing(node: Node) -> bool:
    """Return whether a node moves no bytes, because its result is a number or shares the memory of an operand."""
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target.overloadpacket.__name__  # a completion returns the result of its collective
        return node.target.is_view or name in ("_unsafe_view", "wait_tensor", "wait_tensors")
    # all other calls, except for higher-order ops, return an element of a tuple or a number
    return node.op == "call_function" and not isinstance(node.target, torch._ops.HigherOrderOperator)


def bases_of(values: Values, own: Collection[Node] = ()) -> dict[Node, Node]:
    """Map each node to the node that allocated its memory.  ``own``: view nodes that nevertheless allocate memory."""
    bases: dict[Node, Node] = {}
    for node in values:
        inputs = node.all_input_nodes
        is_base = not inputs or node.op == "output" or node in own or not _moves_nothing(node)
        bases[node] = node if is_base else bases.get(inputs[0], inputs[0])
    return bases


def _depths(values: Values, products: Collection[Node]) -> dict[Node, int]:
    """Map each node to the maximum number of nodes in ``products`` on a path that ends at the node."""
    depths: dict[Node, int] = {}
    for node in values:
        depths[node] = max((depths.get(n, 0) for n in node.all_input_nodes), default=0) + (node in products)
    return depths


def _moved(
    group: set[Node], values: Values, bases: Mapping[Node, Node], inlined: Collection[Node]
) -> Iterator[tuple[int, int]]:
    """Yield a pair for each tensor that a kernel reads or writes: the size of the tensor in bytes, and the number of these
    bytes that the kernel moves.  A kernel that reads several views of a tensor moves at most the size of the tensor.
    ``group``: ops that are fused into the kernel."""
    read: dict[Node, int] = {}
    todo = [(node, tensor_bytes(values[node])) for node in dict.fromkeys(n for m in group for n in m.all_input_nodes)]
    for node, moved in todo:  # the list grows by the operands of inlined nodes
        if (base := bases[node]) in inlined:
            whole = tensor_bytes(values[base])
            todo += [(n, tensor_bytes(values[n]) * moved // whole) for n in base.all_input_nodes]
        elif base not in group:
            read[base] = read.get(base, 0) + moved
    for base, moved in read.items():
        yield tensor_bytes(values[base]), min(moved, tensor_bytes(values[base]))
    for node in group:
        if _leaves(node, group, bases):
            yield tensor_bytes(values[node]), tensor_bytes(values[node])


def _leaves(node: Node, group: set[Node], bases: Mapping[Node, Node]) -> bool:
    """Return whether the result of ``node`` is used outside ``group``, directly or through a view."""
    return any(
        _leaves(user, group, bases) if bases.get(user, user) is not user else user not in group for user in node.users
    )


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):  # the result of a user's Triton kernel
        value = [*value.values()]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def tensor_bytes(value: Any) -> int:
    """Return the total size in bytes of the tensors in a value."""
    return sum(t.numel() * t.element_size() for t in tensors(value))
