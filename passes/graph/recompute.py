"""Recompute: finds values that are cheaper to recompute in each region than to pass between regions.

A value that is passed between regions is written once, read by each region that needs it, and occupies memory in between.
For example, Wan2.2 with one timestep per token adds a table to 6 vectors per token, in float32.  The sum takes 1.9 GiB for
121 frames.  The sum is computed from half as many bytes, which all blocks read anyway.

Contract
    On entry: a graph, and the segment of each node.  Neither is changed.
    On exit: the nodes to recompute.  They include values that several segments need.  They also include the nodes between
    each value and its *sources*, the nodes from which a segment recomputes the value.  The sources take fewer bytes than the
    value and are not streamed weights.

Recomputing does not change results.  All recomputed ops are elementwise in float32 or float64.  Their results are not rounded
when they are stored, and are the same in every kernel.  A value that a multiplication computes is not recomputed, because a
GPU would fuse the multiplication with an addition that follows.  Only pointwise ops read a recomputed value, so the value is
computed in their kernels and never stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch.fx import Graph, Node

from .discover import is_view, nbytes, viewed
from .slice_parts import is_pointwise

# Values of fewer bytes than this are not recomputed: moving such a value takes less time than starting a kernel.
LEAST_BYTES = 1 << 20
# Multiplications.  The set includes neg, because a GPU fuses a multiplication with an addition even if neg is between them.
_PRODUCTS = frozenset(("aten::mul", "aten::neg"))
# Ops whose results are the same in every kernel into which Inductor fuses them.
_OPS = frozenset(("aten::_to_copy", "aten::add", "aten::sub", "aten::div", "aten::where")) | _PRODUCTS

_FULL = (torch.float32, torch.float64)
# Ops whose results are always stored, and are therefore always rounded to their dtype.
_STORED = frozenset(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"))


def to_recompute(
    graph: Graph, of: Mapping[Node, int], lazy: Collection[Node], streamed: Collection[Node], sizes: Mapping[str, int]
) -> dict[Node, None]:
    """Return the nodes to recompute.  Each segment that reads such a node is to compute the node again.  ``of``: for each
    node, the segment that computes the node.  ``lazy``: nodes that each segment computes for itself in any case.
    ``streamed``: weights that may be streamed.  ``sizes``: values of the symbols in the sizes of tensors."""
    found = dict[Node, None]()

    def is_inside(node: Node) -> bool:
        """Return whether a node is read only inside segments."""
        return all(user in of or user in lazy or user in found for user in node.users)

    for value in graph.nodes:
        if value not in of or not _is_exact(value) or value.target._schema.name in _PRODUCTS:
            continue
        views = [*_views(value, of, lazy)]
        readers = {user for node in (value, *views) for user in node.users}.difference(views)
        if nbytes(value, sizes) < LEAST_BYTES or not all(user in of and _is_pointwise(user) for user in readers):
            continue
        if all(of[user] == of[value] for user in readers):
            continue
        between, sources, todo = dict[Node, None](), dict[Node, None](), [value]
        while todo:
            between[node := todo.pop()] = None
            for operand in node.all_input_nodes:
                here = of.get(operand) == of[value] and is_inside(operand)
                if operand in found or (here and (_is_exact(operand) or is_view(operand))):
                    todo.append(operand)
                else:
                    sources[viewed(operand)] = None
        rounded = any(of.get(source) == of[value] and _is_rounded(source) for source in sources)
        read = sum(nbytes(source, sizes) for source in sources)
        if not rounded and read < nbytes(value, sizes) and sources.keys().isdisjoint(streamed):
            found |= between | dict.fromkeys(views)
    return found


def _views(value: Node, of: Mapping[Node, int], lazy: Collection[Node]) -> Iterator[Node]:
    """Yield the views of a value that belong to the segment of the value or to ``lazy``."""
    todo = [value]
    while todo:
        for user in todo.pop().users:
            if is_view(user) and (user in lazy or of.get(user) == of[value]):
                todo.append(user)
                yield user


def _is_exact(node: Node) -> bool:
    """Return whether a node computes a float32 or float64 tensor element by element, and gives the same result in every fused
    kernel."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in _FULL:
        return False
    given = (operand.meta["val"] for operand in node.all_input_nodes)
    here = all(isinstance(each, torch.Tensor) and each.device == value.device for each in given)
    return here and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _OPS


def _is_rounded(node: Node) -> bool:
    """Return whether a value may be rounded when it is stored, although it is not rounded inside a fused kernel."""
    value = node.meta["val"]
    full = isinstance(value, torch.Tensor) and value.dtype in _FULL
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    return (_is_pointwise(node) and not _is_exact(node)) or (not full and name not in _STORED)


def _is_pointwise(node: Node) -> bool:
    return is_pointwise(node) or node.target is torch.ops.aten._to_copy.default
