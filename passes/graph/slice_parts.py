"""Slice parts: types for the parts of values that the slice rules (slice_rules.py) take and return, and functions that
classify ops for slicing.

A *part* is a range of one dimension of a value, such as some of the tokens.  If the batch and the tokens are merged into
one dimension, a part is the same range of tokens in each sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node


@dataclass(frozen=True)
class Part:
    """Elements ``start`` to ``start + count`` of an axis with ``length`` elements.

    Dimension ``dim`` of the value consists of ``outer`` repetitions of this axis: one, or one per sample if the axis is
    merged with the batch.
    """

    dim: int
    length: int
    start: int
    count: int
    outer: int = 1


@dataclass(frozen=True)
class Operand:
    """An operand of an op.  ``part``: part of ``node`` that the op reads, or None if the op reads all of ``node``.

    ``along``: if the op reads all of ``node``, the dimensions along which ``node`` can be computed slice by slice, best
    first.
    """

    node: Node
    part: Part | None = None
    along: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sliced:
    """The arguments with which an op computes a part of its result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class NoRule(Exception):
    """An op cannot compute a part of its result from parts of its operands."""


class Boundary(Exception):
    """A part of the result of a concatenation contains elements of several operands.  ``count``: number of elements in the
    part.  ``before``: number of elements that the part takes from the first of these operands."""

    def __init__(self, before: int, count: int) -> None:
        super().__init__(before, count)
        self.before, self.count = before, count


# Ops that move, select or create values.  Computing their results again costs no more than reading the results.
_MOVES = {
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "permute",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "slice",
        "select",
    ),
    *(
        "split",
        "split_with_sizes",
        "unbind",
        "cat",
        "stack",
        "clone",
        "_to_copy",
        "copy",
        "detach",
        "alias",
        "full",
        "zeros",
    ),
    *(
        "ones",
        "empty",
        "scalar_tensor",
        "arange",
        "empty_like",
        "full_like",
        "zeros_like",
        "ones_like",
        "slice_scatter",
        "select_scatter",
    ),
    *("view_as_real", "view_as_complex", "lift_fresh_copy"),
}
# Views of all elements of their operand; ``expand`` also repeats elements.
_RESHAPES = {"view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand"}


def op_name(node: Node) -> str:
    """Return the name of an ATen op without its overload.  For any other node, return its target as text."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return str(target._opname)
    return str(target)


def is_light(node: Node) -> bool:
    """Return whether an op is pointwise, or only moves, selects or creates values."""
    return op_name(node) in _MOVES or is_pointwise(node)


def is_pointwise(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def is_attention(node: Node) -> bool:
    return "scaled_dot_product" in op_name(node)


def is_reshape(node: Node) -> bool:
    """Return whether a node is a view of its whole operand.  A phase can then pass the operand to the next phase instead of
    the view."""
    return node.op == "call_function" and op_name(node) in _RESHAPES


def shape_of(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
