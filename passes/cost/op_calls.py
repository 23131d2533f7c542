"""Op calls: finds the op that a node calls, in the form that torch.utils.flop_counter expects.

In a traced graph, some calls are wrapped in another op.  A call of an op that writes to its operands is wrapped in
``auto_functionalized``, and a call of a user's Triton kernel is wrapped in a higher-order op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import sdpa_flop_count

from chunkflow_compile.passes.kernel_calls import is_kernel_call, kernel_name, kernel_of
from chunkflow_compile.passes.names import KNOWN_NAMESPACES

from .kernels import Values


@dataclass(frozen=True)
class Called:
    """The op that a node calls.  ``op``: key of the op's FLOP formula in the registry of torch.utils.flop_counter.
    ``args``, ``kwargs``: operands of the call, with fake tensors.  ``nested``: graphs that the op may run, such as the
    branches of ``cond``.  ``of_others``: whether the op comes neither from torch nor from a known library.
    """

    op: Any
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    nested: tuple[GraphModule, ...] = ()
    of_others: bool = False


def called(node: Node, values: Values) -> Called | None:
    """Return the op that a node calls, or None if it calls no op."""
    if node.op != "call_function":
        return None
    operands: Any = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    args, kwargs = operands
    target: Any = node.target
    if is_kernel_call(node):
        return Called(kernel_of(node), kernel_name(node), args, kwargs, of_others=True)
    if target in (auto_functionalized, auto_functionalized_v2):
        return _of_overload(args[0], _inside(args[0], kwargs), {})
    if isinstance(target, torch._ops.OpOverload):
        return _of_overload(target, args, kwargs)
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return None
    return Called(target, str(target), args, kwargs, _nested(node))


def is_opaque(node: Node) -> bool:
    """Return whether a node is a higher-order op, such as a user's Triton kernel or an op with nested graphs.  Inductor
    never fuses such a node."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)


def like_attention(call: Called) -> int:
    """Return the FLOPs of a call if it looks like attention, otherwise 0.  A call looks like attention if its first three 4-D
    floating-point tensors have the shapes of query, key and value: [batch, heads, tokens, depth] or [batch, tokens, heads,
    depth].  If both layouts are possible, the larger of the two middle dimensions is taken as the number of tokens.
    """
    if not call.of_others and "attention" not in call.name:
        return 0
    operands = [*call.args, *call.kwargs.values()]
    tensors = [t for t in operands if isinstance(t, torch.Tensor) and t.dim() == 4 and t.is_floating_point()]
    if len(tensors) < 3:
        return 0
    q, k, v = (tuple(t.shape) for t in tensors[:3])
    if k != v or (q[0], q[3]) != (k[0], k[3]) or (q[1] != k[1] and q[2] != k[2]):
        return 0
    tokens = 1 if q[1] != k[1] or (q[2] == k[2] and q[1] > q[2]) else 2
    if tokens == 1:
        q, k, v = ((s[0], s[2], s[1], s[3]) for s in (q, k, v))
    return int(sdpa_flop_count(q, k, v))


def _of_overload(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Called:
    name = op._schema.name
    others = op.namespace not in KNOWN_NAMESPACES and not op.is_view
    return Called(op.overloadpacket, name, args, kwargs, of_others=others)


def _inside(op: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the operands of the op that ``auto_functionalized`` wraps, in the order of the op's schema.  If the op writes to
    a view, the result contains the base of the view instead of the view."""
    bases = kwargs.get("_all_bases", ())
    operands = []
    for argument in op._schema.arguments:
        position = kwargs.get(f"_{argument.name}_base_index")
        operands.append(kwargs.get(argument.name) if position is None else bases[position])
    return tuple(operands)


def _nested(node: Node) -> tuple[GraphModule, ...]:
    module = node.graph.owning_module
    graphs = [getattr(module, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
    return tuple(graph for graph in graphs if isinstance(graph, GraphModule))
