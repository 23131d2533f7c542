"""Listing: prints a graph as text, one op per line, in a syntax that Python's parser accepts."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from chunkflow_compile.passes.kernel_calls import operands_of
from chunkflow_compile.passes.ops import transfer_of, transfer_text

from .slice_graphs import Slice

# The metadata of a call_module node contains the Slicing of the called region under this key.
SLICING = "chunkflow_slicing"


def listing(module: GraphModule) -> str:
    """Return the nodes of a graph as text, one per line.  Unused inputs are left out."""
    nodes = (n for n in module.graph.nodes if n.op != "placeholder" or n.users)
    return "\n".join(node_text(n) for n in nodes) + "\n"


def node_text(node: Node, names: Mapping[Node, str] | None = None) -> str:
    """Return a node as a line: ``name: dtype[shape] = target(operands)``.  ``names``: for some operands, the names to show
    instead of the names of their nodes."""
    renamed = names or {}
    if node.op == "placeholder":
        return f"{node.name}: {_shape(node)}"
    if node.op == "output":
        return f"return {_value_text(node.args[0], renamed)}"
    if (transfer := transfer_of(node)) is not None:
        return transfer_text(transfer)
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    if node.op == "call_module":
        operands = [_value_text(a, renamed) for a in node.args]
        if (slicing := node.meta.get(SLICING)) is None:
            return f"{node.name} = {node.target}({', '.join(operands)})"
        taken = [f"{text}{_slice_text(part)}" for text, part in zip(operands, slicing.inputs, strict=True)]
        written = [(operands[over] if over is not None else "new") + _slice_text(part) for part, over in slicing.writes]
        taken += [f"out=({', '.join(written)},)"] if written else []
        return f"{node.name} = {node.target}[{slicing.repeat}]({', '.join(taken)})"
    named = f"{node.name}: {_shape(node)}" if "val" in node.meta else node.name
    if node.target is operator.getitem:
        return f"{named} = {_value_text(node.args[0], renamed)}[{_value_text(node.args[1], renamed)}]"
    operands = [_value_text(a, renamed) for a in node.args] + [
        f"{k}={_value_text(v, renamed)}" for k, v in operands_of(node).items()
    ]
    return f"{named} = {target_name(node)}({', '.join(operands)})"


def target_name(node: Node) -> str:
    """Return the name of a node's target: ``aten.mm``, ``lowered_3``, ``prefetch``."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(".default").removeprefix("chunkflow.")
    if callable(node.target):
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target)


def _slice_text(part: Slice | None) -> str:
    """Return a slice as the text of an index, such as ``[:, i * 4 : 4 + i * 4]``.  ``i`` is the number of the run in which a
    repeated region uses the slice."""
    if part is None:
        return ""
    ends = (part.offset, part.offset + part.size)
    first, end = (f"{at} + i * {part.size}" if at else f"i * {part.size}" for at in ends)
    return f"[{':, ' * part.dim}{first} : {end}]"


def _shape(node: Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape) or '[()]'}"  # float32[] does not parse


def _value_text(value: object, names: Mapping[Node, str]) -> str:
    if isinstance(value, (list, tuple)):
        body = ", ".join(_value_text(v, names) for v in value)
        return f"[{body}]" if isinstance(value, list) else f"({body}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_value_text(v, names)}" for k, v in value.items()) + "}"
    return names.get(value, value.name) if isinstance(value, Node) else repr(value)
