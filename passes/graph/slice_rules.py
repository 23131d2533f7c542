"""Slice rules: for each ATen op, a rule that determines which parts of the operands (slice_parts.py) the op must read to
compute a part of its result.

A rule returns the arguments with which the op computes the part.  Some of these arguments are parts of operands.  The op
reads its other operands as a whole, for example the weights of a product, or the keys and values of attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .slice_parts import Boundary, NoRule, Operand, Part, Sliced, is_pointwise, op_name, shape_of

Rule = Callable[[Node, Part, "int | None"], "Sliced | Operand"]
_RULES: dict[str, Rule] = {}


def sliced(node: Node, part: Part, item: int | None = None) -> Sliced | Operand:
    """Return the arguments with which the op of ``node`` computes a part of its result.  If the op only selects elements, as
    ``slice`` does, the part of the result is also a part of an operand.  Then return this part of the operand instead.

    ``item``: if the op has several results, the index of the result to which the part belongs, otherwise None.  Raises
    NoRule if there is no rule for the part, and Boundary if the part contains elements of several concatenated operands.
    """
    name = op_name(node)
    if name in _RULES:
        return _RULES[name](node, part, item)
    if is_pointwise(node):
        return _pointwise(node, part)
    raise NoRule(f"{name} has no rule to compute a part of its result")


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _named(node: Node) -> dict[str, Any]:
    """Return the arguments of an op by their names in its schema, including defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    values = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {**values, **dict(zip((a.name for a in schema), node.args, strict=False)), **node.kwargs}


def _with(node: Node, **changed: Any) -> Sliced:
    """Return the arguments of an op with some of them replaced.  ``changed``: new values, by name of the argument."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    args = tuple(changed.pop(name, given) for name, given in zip(names, node.args, strict=False))
    return Sliced(args, {**node.kwargs, **changed})


def _dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _size(part: Part) -> int:
    """Return the size of a part along its dimension."""
    return part.outer * part.count


def _aligned(operand: Any, result: Node, part: Part) -> Any:
    """Return the part of an operand whose elements are broadcast to a part of the result.  If the operand does not vary along
    the dimension of the part, return the whole operand."""
    if not isinstance(operand, Node) or not isinstance(operand.meta.get("val"), torch.Tensor):
        return operand
    dim = part.dim - len(shape_of(result)) + len(shape_of(operand))
    if dim < 0 or shape_of(operand)[dim] == 1:
        return Operand(operand)
    return Operand(operand, replace(part, dim=dim))


def _pointwise(node: Node, part: Part) -> Sliced:
    args = tuple(_aligned(a, node, part) for a in node.args)
    return Sliced(args, {name: _aligned(a, node, part) for name, a in node.kwargs.items()})


def _first(node: Node, part: Part) -> Sliced:
    """Return the arguments of an op that reads ``part`` of its first operand, and its other operands as a whole."""
    return Sliced((Operand(_operand(node), part), *node.args[1:]), dict(node.kwargs))


def _operand(node: Node) -> Node:
    operand = node.args[0]
    assert isinstance(operand, Node)
    return operand


@_rule("clone", "_to_copy", "detach", "alias", "lift_fresh_copy", "empty_like", "full_like", "zeros_like", "ones_like")
def _same(node: Node, part: Part, item: int | None) -> Sliced:
    return _first(node, part)


@_rule("view_as_real", "view_as_complex")
def _complex(node: Node, part: Part, item: int | None) -> Sliced:
    if part.dim >= min(len(shape_of(node)), len(shape_of(_operand(node)))):
        raise NoRule("a part of the real and imaginary parts")
    return _first(node, part)


@_rule("full", "zeros", "ones", "empty")
def _created(node: Node, part: Part, item: int | None) -> Sliced:
    return _with(node, size=_resized(node, part))


def _resized(node: Node, part: Part) -> list[int]:
    """Return the shape of a part of a node's result."""
    return [_size(part) if i == part.dim else size for i, size in enumerate(shape_of(node))]


@_rule("view", "_unsafe_view", "reshape")
def _view(node: Node, part: Part, item: int | None) -> Sliced:
    given, made = shape_of(_operand(node)), shape_of(node)
    if isinstance(node.args[1], torch.dtype):
        raise NoRule("view changes the dtype")
    rows = math.prod(made[: part.dim]) * part.outer  # the number of repetitions of the part's axis in the result
    befores = [math.prod(given[:d]) for d in range(len(given))]
    dims = [d for d, before in enumerate(befores) if before <= rows < before * given[d]]
    if not dims:
        raise NoRule(f"{op_name(node)} reshapes {given} to {made}")
    dim, before = dims[0], befores[dims[0]]
    outer, remainder = divmod(rows, before)
    length, uneven = divmod(given[dim], outer)
    if remainder or uneven:
        raise NoRule(f"{op_name(node)} reshapes {given} to {made}")
    source = _rescaled(part, length)
    if source is None:
        raise NoRule(f"{op_name(node)} from {given} to {made} divides slices of {part.count} of {part.length}")
    operand = Operand(_operand(node), replace(source, dim=dim, outer=outer))
    return Sliced((operand, _resized(node, part)), {})


def _rescaled(part: Part, length: int) -> Part | None:
    """Return the same part for another shape of the value, in which the part's axis has ``length`` elements.  Return None if
    the part would begin or end inside an element, or if neither of ``length`` and ``part.length`` is a multiple of the
    other."""
    numbers = [n * length for n in (part.start, part.count)]
    if any(n % part.length for n in numbers) or max(length, part.length) % min(length, part.length):
        return None
    start, count = (n // part.length for n in numbers)
    return replace(part, length=length, start=start, count=count)


@_rule("permute")
def _permute(node: Node, part: Part, item: int | None) -> Sliced:
    dims: Any = node.args[1]
    return _first(node, replace(part, dim=_dim(dims[part.dim], len(dims))))


@_rule("transpose", "t")
def _transpose(node: Node, part: Part, item: int | None) -> Sliced:
    rank = len(shape_of(node))
    first, second = (_dim(int(d), rank) for d in (node.args[1:] or (0, rank - 1)))  # type: ignore[arg-type]
    return _first(node, replace(part, dim={first: second, second: first}.get(part.dim, part.dim)))


@_rule("unsqueeze")
def _unsqueeze(node: Node, part: Part, item: int | None) -> Sliced:
    new = _dim(int(node.args[1]), len(shape_of(node)))  # type: ignore[arg-type]
    return _first(node, replace(part, dim=part.dim - (part.dim > new)))


@_rule("squeeze")
def _squeeze(node: Node, part: Part, item: int | None) -> Sliced:
    """Rule for squeeze, which may drop several dimensions of size 1.  The dimension of the part must not be dropped."""
    given = shape_of(_operand(node))
    dims: Any = node.args[1] if len(node.args) > 1 else range(len(given))
    dropped = {_dim(d, len(given)) for d in ([dims] if isinstance(dims, int) else dims)}
    kept = [d for d in range(len(given)) if d not in dropped or given[d] != 1]
    if kept[part.dim] in dropped and _size(part) == 1:
        raise NoRule("squeeze would drop a dimension of one element")
    return _first(node, replace(part, dim=kept[part.dim]))


@_rule("expand")
def _expand(node: Node, part: Part, item: int | None) -> Sliced:
    return Sliced((_aligned(_operand(node), node, part), _resized(node, part)), dict(node.kwargs))


@_rule("select", "unbind")
def _select(node: Node, part: Part, item: int | None) -> Sliced:
    given = shape_of(_operand(node))
    dim = _dim(int(_named(node)["dim"]), len(given))
    return _first(node, replace(part, dim=part.dim + (part.dim >= dim)))


@_rule("slice")
def _slice(node: Node, part: Part, item: int | None) -> Sliced | Operand:
    given, named = shape_of(_operand(node)), _named(node)
    dim = _dim(named["dim"], len(given))
    if dim != part.dim:
        return _first(node, part)
    if named["step"] != 1 or part.outer != 1:
        raise NoRule("slice takes every n-th element")
    start = min(_dim(named["start"] or 0, given[dim]), given[dim])
    return Operand(_operand(node), replace(part, length=given[dim], start=part.start + start))


@_rule("split", "split_with_sizes")
def _split(node: Node, part: Part, item: int | None) -> Sliced | Operand:
    given, named = shape_of(_operand(node)), _named(node)
    dim = _dim(named["dim"], len(given))
    if dim != part.dim:
        return _first(node, part)
    assert item is not None
    sizes = named.get("split_sizes") or [named["split_size"]] * item
    return Operand(_operand(node), replace(part, length=given[dim], start=part.start + sum(sizes[:item])))


@_rule("cat")
def _cat(node: Node, part: Part, item: int | None) -> Sliced | Operand:
    operands: Any = node.args[0]
    dim = _dim(_named(node)["dim"], len(shape_of(node)))
    if dim != part.dim:
        return Sliced(([Operand(x, part) for x in operands], *node.args[1:]), dict(node.kwargs))
    if part.outer != 1:
        raise NoRule("cat concatenates a dimension that is merged with another")
    begin = 0
    for x in operands:
        size = shape_of(x)[dim]
        if begin <= part.start < begin + size:
            if part.start + part.count > begin + size:
                raise Boundary(begin + size - part.start, part.count)
            return Operand(x, replace(part, length=size, start=part.start - begin))
        begin += size
    raise NoRule("cat of nothing")


@_rule("stack")
def _stack(node: Node, part: Part, item: int | None) -> Sliced:
    operands: Any = node.args[0]
    dim = _dim(_named(node)["dim"], len(shape_of(node)))
    if dim == part.dim:
        raise NoRule("stack makes the dimension")
    inside = replace(part, dim=part.dim - (part.dim > dim))
    return Sliced(([Operand(x, inside) for x in operands], *node.args[1:]), dict(node.kwargs))


@_rule("slice_scatter")
def _slice_scatter(node: Node, part: Part, item: int | None) -> Sliced | Operand:
    named, shape = _named(node), shape_of(node)
    if _dim(named["dim"], len(shape)) == part.dim:
        raise NoRule("slice_scatter writes a part of the dimension")
    return _with(node, self=Operand(_operand(node), part), src=Operand(named["src"], part))


@_rule("select_scatter")
def _select_scatter(node: Node, part: Part, item: int | None) -> Sliced:
    named, dim = _named(node), _dim(int(_named(node)["dim"]), len(shape_of(node)))
    if dim == part.dim:
        raise NoRule("select_scatter writes a part of the dimension")
    inside = replace(part, dim=part.dim - (part.dim > dim))
    return _with(node, self=Operand(_operand(node), part), src=Operand(named["src"], inside))


@_rule("copy")
def _copy(node: Node, part: Part, item: int | None) -> Sliced:
    return _pointwise(node, part)


@_rule("constant_pad_nd")
def _pad(node: Node, part: Part, item: int | None) -> Sliced:
    pads: Any = node.args[1]
    if part.dim >= len(shape_of(node)) - len(pads) // 2:
        raise NoRule("constant_pad_nd pads the dimension")
    return _first(node, part)


@_rule("embedding")
def _embedding(node: Node, part: Part, item: int | None) -> Sliced:
    indices = _named(node)["indices"]
    if part.dim >= len(shape_of(indices)):
        raise NoRule("embedding makes the dimension")
    return _with(node, weight=Operand(_operand(node)), indices=Operand(indices, part))


@_rule("mm", "_int_mm", "addmm", "bmm", "baddbmm")
def _product(node: Node, part: Part, item: int | None) -> Sliced:
    """Rule for matrix products.  A part of the result consists of some rows or, for batched products, of some samples of the
    batch."""
    rows = len(shape_of(node)) - 2
    if part.dim > rows:
        raise NoRule(f"{op_name(node)} reads all rows of a weight for some of its columns")
    first, second = node.args[-2:]
    assert isinstance(first, Node) and isinstance(second, Node)
    factor = Operand(second, None, (rows + 1, rows)) if part.dim == rows else Operand(second, part)
    bias = [_aligned(x, node, part) for x in node.args[:-2]]
    return Sliced((*bias, Operand(first, part), factor), dict(node.kwargs))


@_rule("linear")
def _linear(node: Node, part: Part, item: int | None) -> Sliced:
    if part.dim == len(shape_of(node)) - 1:
        raise NoRule("linear reads all rows of a weight for some of its columns")
    return _first(node, part)


@_rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def _norm(node: Node, part: Part, item: int | None) -> Sliced:
    normalized: Any = node.args[1]
    if part.dim >= len(shape_of(_operand(node))) - len(normalized):
        raise NoRule(f"{op_name(node)} normalizes the dimension")
    return _first(node, part)


@_rule("mean", "sum", "amax", "amin", "var", "var_mean", "logsumexp", "linalg_vector_norm", "prod", "any", "argmax")
def _reduction(node: Node, part: Part, item: int | None) -> Sliced:
    rank, named = len(shape_of(_operand(node))), _named(node)
    dims: Any = named.get("dim")
    dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    reduced = {_dim(d, rank) for d in dims}
    left = [d for d in range(rank) if d not in reduced or named.get("keepdim")]
    if left[part.dim] in reduced:
        raise NoRule(f"{op_name(node)} reduces the dimension")
    return _first(node, replace(part, dim=left[part.dim]))


@_rule("_softmax", "_safe_softmax", "softmax", "_log_softmax", "cumsum", "flip", "roll", "sort", "topk")
def _along(node: Node, part: Part, item: int | None) -> Sliced:
    """Rule for ops that combine elements along given dimensions.  The part must be along another dimension."""
    named, rank = _named(node), len(shape_of(_operand(node)))
    dims = named["dims"] if "dims" in named else named["dim"]
    if part.dim in {_dim(d, rank) for d in ([dims] if isinstance(dims, int) else dims)} or dims == []:
        raise NoRule(f"{op_name(node)} works along the dimension")
    return _first(node, part)


@_rule(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
    "scaled_dot_product_attention",
)
def _attention(node: Node, part: Part, item: int | None) -> Sliced:
    """Rule for attention.  A part of the result is computed from some queries and all keys and values, or from the queries,
    keys and values of some samples or heads."""
    named = _named(node)
    rank = len(shape_of(named["query"]))
    if item not in (0, None) or part.dim == rank - 1:
        raise NoRule(f"{op_name(node)} gives more than its result")
    changed: dict[str, Any] = {"query": Operand(named["query"], part)}
    queries = part.dim == rank - 2
    if (queries and named["is_causal"]) or named["dropout_p"]:
        raise NoRule(f"{op_name(node)} is causal or drops out")
    for name in ("key", "value"):
        if not queries and shape_of(named[name])[part.dim] != shape_of(named["query"])[part.dim]:
            raise NoRule(f"{op_name(node)} has fewer heads of keys and values than of queries")
        changed[name] = Operand(named[name], None, (rank - 2,)) if queries else Operand(named[name], part)
    for name in ("attn_mask", "attn_bias"):
        if isinstance(named.get(name), Node):
            changed[name] = _aligned(named[name], named["query"], part)
    return _with(node, **changed)
