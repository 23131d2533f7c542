"""Keys: digests of the structure of regions.  Regions with equal keys are lowered once."""

from __future__ import annotations

import hashlib
import operator

import torch
from torch.fx import GraphModule, Node

from chunkflow_compile.passes.kernel_calls import is_kernel_call, operands_of, source_key


def structural_key(module: GraphModule, index: int, slicing: object = None) -> str:
    """Return a digest of a region's ops, of their operands and constants, and of the metadata of their results.  The digest
    does not depend on the names of nodes.

    ``index``: index of the region.  If the region contains a nested graph or a call of a user's function, the key includes
    the index, so that no other region has an equal key.  ``slicing``: the slices that the region reads and writes, or None
    if it does not run once per slice.
    """
    number: dict[Node, int] = {}
    lines: list[str] = [] if slicing is None else [repr(slicing)]
    for node in module.graph.nodes:
        number[node] = len(number)
        args = torch.fx.map_arg((node.args, tuple(sorted(operands_of(node).items()))), lambda n: f"%{number[n]}")
        target = "input" if node.op == "placeholder" else str(node.target)
        if node.op in ("get_attr", "call_module", "call_method") or not _is_plain(node):
            target += f" of region {index}"
        if is_kernel_call(node):
            target += f" {source_key(node)}"
        lines.append(f"{node.op} {target} {args!r} {_value_key(node.meta.get('val'))}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _is_plain(node: Node) -> bool:
    return (
        node.op != "call_function"
        or isinstance(node.target, torch._ops.OpOverload)
        or node.target is operator.getitem
        or is_kernel_call(node)
        or getattr(node.target, "__module__", None) in ("_operator", "math")
    )


def _value_key(value: object) -> str:
    if isinstance(value, torch.Tensor):
        bits = f"{'conj' * value.is_conj()}{'neg' * value.is_neg()}"
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.storage_offset()}{value.device}{bits}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_value_key(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_value_key(v)}" for name, v in value.items()) + "}"
    return repr(value)
