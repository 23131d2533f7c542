"""Count: the cost of a region, FLOPs by torch.utils.flop_counter's formulas, bytes by the graph's metadata.

Bytes are those that cross the device's memory however well Inductor fuses: a region's inputs and outputs, and the
operands and results of each GEMM, convolution and attention inside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from chunkflow_compile.passes.problem import Cost

# Products of an input and a weight that the flop counter does not know, most of them with a quantised weight.
_PRODUCTS = frozenset(
    (
        "aten::_int_mm",
        "aten::_weight_int8pack_mm",
        "aten::_weight_int4pack_mm",
        "aten::_weight_int4pack_mm_for_cpu",
        "bitsandbytes::gemm_4bit",
        "bitsandbytes::gemv_4bit",
        "bitsandbytes::int8_linear_matmul",
        "bitsandbytes::int8_scaled_mm",
        "quanto::qbytes_mm",
        "torchao::int_scaled_matmul",
    )
)


def region_cost(module: GraphModule) -> Cost:
    """The cost of one region; its nodes carry fake tensors in ``meta["val"]``."""
    total, traffic, by_dtype, by_op = 0, 0, Counter[str](), Counter[str]()
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            traffic += _nbytes(node if node.op == "placeholder" else node.args)
        elif (flops := node_flops(node)) > 0:
            total += flops
            traffic += _nbytes(node) + _nbytes(node.args)
            by_dtype[_dtype(node)] += flops
            by_op[_kind(node)] += flops
    return Cost(flops=total, nbytes=traffic, dtype=_most(by_dtype, "float32"), op=_most(by_op, ""))


def node_flops(node: Node) -> int:
    """FLOPs of one node; 0 for ops without a formula."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0
    operands: Any = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = operands
    if node.target is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        # The only attention op without a formula in torch; attention on fake CPU tensors traces to it.
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if node.target._schema.name in _PRODUCTS:  # [..., k] by a weight into [..., n]
        return 2 * int(args[0].numel()) * int(_tensors(node.meta["val"])[0].shape[-1])
    formula = flop_registry.get(node.target.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _most(flops: Mapping[str, int], otherwise: str) -> str:
    return max(sorted(flops), key=flops.__getitem__, default=otherwise)


def _kind(node: Node) -> str:
    name = str(node.target)
    return next(
        (kind for part, kind in (("attention", "attention"), ("conv", "convolution")) if part in name), "matmul"
    )


def _nbytes(value: Any) -> int:
    """Bytes of the tensors of a node, or of all distinct nodes in nested arguments."""
    seen: dict[Node, None] = {}
    map_arg(value, lambda n: seen.setdefault(n))
    tensors = [t for n in seen for t in _tensors(n.meta.get("val"))]
    return sum(t.numel() * t.element_size() for t in tensors)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _dtype(node: Node) -> str:
    return str(_tensors(node.meta["val"])[0].dtype).removeprefix("torch.")
