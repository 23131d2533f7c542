"""Rotary: replaces the complex products of rotary embeddings by real arithmetic.

Qwen-Image, Z-Image, Lumina and other models rotate queries and keys by multiplying complex numbers.  Inductor generates no
code for complex products, but calls torch's kernels.  Each of these kernels writes its result to memory, in float32 or a
larger dtype.  If the product is computed in real arithmetic, Inductor can fuse it with the ops before and after it.

Contract
    On entry: a Traced, which is not changed.
    On exit: a Traced with the same inputs and results.  If Inductor will compile the graph, products in which a complex
    view of a real tensor is rotated are replaced by real arithmetic.  A product is replaced only if all its readers are
    real views, and if the result is bit-identical.

The operations are in the same order as in torch's kernel, ``(a + bi)(c + di) = (ac - bd) + (ad + bc)i``.  The last bit of a
result depends on which multiplications a compiler fuses with the following addition.  On a CPU, Inductor fuses none of them.
Torch's kernel uses vector instructions.  It fuses no multiplications in whole vectors, but some in the remainder of a row.
Therefore, a product is not replaced if its rows do not consist of whole vectors.  Several threads may divide a row between
them.  Torch's own result then depends on the number of threads, and real arithmetic gives the result for a single thread.
On a GPU, both torch's kernel and Inductor's kernel fuse ``ac`` and ``ad`` with the subtraction or addition that follows
(verified by comparing their machine code for an H100, with torch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from .traced import Traced

_aten = torch.ops.aten
# Torch's CPU kernel computes a row in whole vectors if the number of complex numbers in the row is a multiple of _FULL.  This
# holds for vector registers of every width.
_FULL = 8


def in_real_arithmetic(traced: Traced) -> Traced:
    """Return the graph with the complex products of rotary embeddings replaced by real arithmetic."""
    if not traced.fused or not any(map(_is_rotation, traced.graph.graph.nodes)):
        return traced
    graph, copies = Graph(), dict[Node, Node]()
    for node in traced.graph.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in list(graph.nodes):
        if _is_rotation(node):
            _replace(graph, node)
    return replace(traced, graph=GraphModule(traced.graph, graph))


def _is_rotation(node: Node) -> bool:
    """Return whether a node is a complex product that can be replaced by real arithmetic."""
    if node.target is not _aten.mul.Tensor or not all(map(_is_complex, (node, *node.args))):
        return False
    if not node.users or any(user.target is not _aten.view_as_real.default for user in node.users):
        return False
    value, operands = node.meta["val"], [operand.meta["val"] for operand in node.all_input_nodes]
    length = value.shape[-1]
    dense = all(each.stride(-1) in (0, 1) for each in operands)
    filled = value.device.type != "cpu" or (dense and isinstance(length, int) and length % _FULL == 0)
    return filled and all(each.dtype == value.dtype for each in operands) and _rotated(node) is not None


def _is_complex(operand: Any) -> bool:
    """Return whether an operand is a complex tensor that is not a lazy conjugate."""
    value = operand.meta.get("val") if isinstance(operand, Node) else None
    return isinstance(value, FakeTensor) and value.is_complex() and value.dim() > 0 and not value.is_conj()


def _rotated(product: Node) -> Node | None:
    """Return the real tensor that a product rotates.  An operand of the product is a complex view of this tensor.  Return
    None if there is no such tensor, or if it differs in shape or layout from the real view of the result."""
    (result, *_) = (user.meta["val"] for user in product.users)
    for operand in product.all_input_nodes:
        if operand.target is _aten.view_as_complex.default:
            (pairs,) = operand.all_input_nodes
            with result.fake_mode:
                copied = torch.empty_like(pairs.meta["val"])
            # shapes and strides are compared as text, because comparing symbolic sizes would add guards
            if str((copied.shape, copied.stride())) == str((result.shape, result.stride())):
                return pairs
    return None


def _replace(graph: Graph, product: Node) -> None:
    rotated = _rotated(product)
    with graph.inserting_before(product):
        call = _caller(graph, product)
        first, second = (_pairs(call, operand) for operand in product.args)
        a, b = (call(_aten.select.int, first, -1, i) for i in range(2))
        c, d = (call(_aten.select.int, second, -1, i) for i in range(2))
        ac, bd, ad, bc = (call(_aten.mul.Tensor, *each) for each in ((a, c), (b, d), (a, d), (b, c)))
        real, imaginary = call(_aten.sub.Tensor, ac, bd), call(_aten.add.Tensor, ad, bc)
        # Inductor compiles these scatters to one kernel without intermediate memory.  A concatenation would need
        # intermediate memory on a CPU.
        pairs = call(_aten.clone.default, rotated)
        for i, part in enumerate((real, imaginary)):
            pairs = call(_aten.select_scatter.default, pairs, part, -1, i)
    for read in list(product.users):
        read.replace_all_uses_with(pairs)
        graph.erase_node(read)
    operands = product.all_input_nodes
    graph.erase_node(product)
    for operand in operands:
        if operand.target is _aten.view_as_complex.default and not operand.users:
            graph.erase_node(operand)


def _pairs(call: Callable[..., Node], operand: Any) -> Node:
    """Return the real view of a complex tensor.  In it, each complex number is a pair of real numbers."""
    if operand.target is _aten.view_as_complex.default:
        return operand.all_input_nodes[0]  # type: ignore[no-any-return]
    return call(_aten.view_as_real.default, operand)


def _caller(graph: Graph, product: Node) -> Callable[..., Node]:
    """Return a function that adds a call of an op to the graph.  The new node gets the module stack and the stack trace of
    ``product``."""
    mode = product.meta["val"].fake_mode
    place: dict[str, Any] = {
        key: product.meta[key] for key in ("nn_module_stack", "stack_trace") if key in product.meta
    }

    def call(op: Any, *args: Any) -> Node:
        node = graph.call_function(op, args)
        with mode:
            value = op(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
        node.meta.update(place, val=value)
        return node

    return call
