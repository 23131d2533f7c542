"""Count: the cost of a region, FLOPs by torch.utils.flop_counter's formulas, bytes by the graph's metadata.

Products, which are GEMMs, convolutions and attention, take FLOPs and read and write operands.  What runs beside them moves
bytes, in kernels of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from chunkflow_compile.passes.problem import RegionCost

from .kernels import Values, other_kernels, tensor_bytes, tensors

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


def region_cost(values: Values, fused: bool = True) -> RegionCost:
    """The cost of one region.  ``values``: of each of its nodes, tensors without data, of sizes that are known.

    ``fused``: whether Inductor fuses what lies between products.
    """
    flops = {n: f for n in values if n.op not in ("placeholder", "output") and (f := node_flops(n, values)) > 0}
    by_dtype, by_op = Counter[str](), Counter[str]()
    for node, count in flops.items():
        by_dtype[_dtype(values[node])] += count
        by_op[_kind(node)] += count
    others = other_kernels(values, flops.keys(), fused)
    return RegionCost(
        flops=sum(flops.values()),
        attention=by_op["attention"],
        masked=sum(f for n, f in flops.items() if _masked(n)),
        operands=sum(tensor_bytes(values[n]) + _read(n, values) for n in flops),
        traffic=tuple(sorted(others.traffic.items())),
        kernels=len(flops) + others.count,
        dtype=_most(by_dtype, "float32"),
        op=_most(by_op, ""),
    )


def node_flops(node: Node, values: Values) -> int:
    """FLOPs of one node; 0 for ops without a formula."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0
    operands: Any = map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = operands
    if _kind(node) == "attention" and args[1].shape[-2] != args[2].shape[-2]:  # only where sizes are estimated
        args = (*args[:2], args[2].new_empty((*args[1].shape[:-1], args[2].shape[-1])), *args[3:])
    if node.target is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        # The only attention op without a formula in torch; attention on fake CPU tensors traces to it.
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if node.target._schema.name in _PRODUCTS:  # [..., k] by a weight into [..., n]
        return 2 * int(args[0].numel()) * int(tensors(values[node])[0].shape[-1])
    formula = flop_registry.get(node.target.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=values[node]))


def _most(flops: Mapping[str, int], otherwise: str) -> str:
    return max(sorted(flops), key=flops.__getitem__, default=otherwise)


def _kind(node: Node) -> str:
    name = str(node.target)
    return next(
        (kind for part, kind in (("attention", "attention"), ("conv", "convolution")) if part in name), "matmul"
    )


def _masked(node: Node) -> bool:
    """Whether a node is attention that reads a mask; ops of torch name it in two ways."""
    if _kind(node) != "attention" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return any(given.get(name) is not None for name in ("attn_mask", "attn_bias"))


def _read(node: Node, values: Values) -> int:
    """Bytes of the tensors that a node reads."""
    return sum(tensor_bytes(values[n]) for n in node.all_input_nodes)


def _dtype(value: Any) -> str:
    return str(tensors(value)[0].dtype).removeprefix("torch.")
