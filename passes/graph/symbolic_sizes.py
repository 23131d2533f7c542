"""Symbolic sizes: the symbols in the metadata of a graph that was traced with dynamic shapes, and the values of these
symbols.

The symbols in the sizes of inputs have a known value in each call.  All other symbols depend on data, for example after
``nonzero``, and have no value when the graph is planned.  These symbols all get the same estimated value: the largest of
their upper bounds or, if none of them has an upper bound, the largest value of the symbols of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

# An upper bound of this size or more, such as the maximum of an int64, is treated as no bound.
_LARGEST = 1 << 31


def symbols_of(value: Any) -> set[str]:
    """Return the names of the symbols in a value, which is a tensor with symbolic sizes, a symbolic number, or a
    container of them."""
    if isinstance(value, torch.Tensor):
        return {n for s in (*value.shape, *value.stride(), value.storage_offset()) for n in symbols_of(s)}
    if isinstance(value, (list, tuple)):
        return {name for v in value for name in symbols_of(v)}
    if isinstance(value, dict):
        return symbols_of([*value.values()])
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return {symbol.name for symbol in value.node.expr.free_symbols}
    return set()


def symbol_nodes(graph: GraphModule) -> dict[str, Node]:
    """Map each symbol to the first node whose value is this symbol: an input, or a node that reads the size of a tensor."""
    holders: dict[str, Node] = {}
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            holders.setdefault(value.node.expr.name, node)
    return holders


def hints(graph: GraphModule) -> dict[str, int]:
    """Return the values that the symbols of the inputs have in the traced call.  Symbols with unknown values are left out."""
    symbols = {name: node.meta["val"].node for name, node in symbol_nodes(graph).items() if node.op == "placeholder"}
    return {name: int(size.hint) for name, size in symbols.items() if size.has_hint()}


def bounds(graph: GraphModule) -> dict[str, int | None]:
    """Return the upper bound of each symbol that is not a symbol of the inputs, or None if tracing has found no meaningful
    bound for the symbol."""
    inputs = {name for name, node in symbol_nodes(graph).items() if node.op == "placeholder"}
    metas = [node.meta.get("val") for node in graph.graph.nodes]
    return {name: _bound(name, metas) for name in sorted(symbols_of(metas) - inputs)}


def estimated(values: Mapping[str, int], unknown: Mapping[str, int | None]) -> dict[str, int]:
    """Return the value of each symbol.  ``values``: values of the symbols of the inputs.  ``unknown``: upper bounds of all
    other symbols, see :func:`bounds`.

    All unknown symbols get the same value.  With different values, tensors that a model combines, such as query, key and
    value of attention, could have sizes that do not match.
    """
    bounds = [bound for bound in unknown.values() if bound is not None] or [*values.values()]
    return {**values, **dict.fromkeys(unknown, max(bounds, default=1))}


def is_size(node: Node) -> bool:
    """Return whether a node computes a number from other numbers, such as the product of two sizes.  This costs no time on
    the GPU."""
    return (
        node.op == "call_function"
        and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
        and bool(node.all_input_nodes)
        and not any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes)
    )


def concrete(value: Any, sizes: Mapping[str, int]) -> Any:
    """Return a value from a node's metadata, in which each symbol is replaced by its value in ``sizes``.  A tensor with
    symbolic sizes is replaced by a tensor on the meta device.  No guards are added."""
    if not sizes:
        return value
    if isinstance(value, torch.Tensor):
        if not symbols_of(value):
            return value
        shape, stride = ([concrete(n, sizes) for n in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        expression = value.node.expr
        numbers = {symbol: sympy.Integer(sizes[symbol.name]) for symbol in expression.free_symbols}
        return value.node.pytype(expression.xreplace(numbers))
    if isinstance(value, (list, tuple)):
        return type(value)(concrete(v, sizes) for v in value)
    if isinstance(value, dict):
        return {name: concrete(v, sizes) for name, v in value.items()}
    return value


def _bound(name: str, values: Iterable[Any]) -> int | None:
    """Return the upper bound that tracing has found for a symbol, or None if there is no bound below ``_LARGEST``."""
    for value in values:
        if isinstance(value, torch.SymInt) and name in symbols_of(value):
            symbol = next(s for s in value.node.expr.free_symbols if s.name == name)
            upper = value.node.shape_env.bound_sympy(symbol).upper
            return int(upper) if upper.is_finite and upper < _LARGEST else None
    return None
