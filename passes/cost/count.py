"""Count: computes the cost of a region.  FLOPs come from the formulas of torch.utils.flop_counter, including formulas that
users register (``register_flop_formula``).  Bytes come from the metadata of the graph.

The cost of products (GEMMs, convolutions and attention) consists of their FLOPs and the bytes of their operands.  The cost
of all other kernels consists only of the bytes that they move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from chunkflow_compile.passes.kernel_calls import is_kernel_call
from chunkflow_compile.passes.problem import RegionCost

from .kernels import Values, other_kernels, tensor_bytes, tensors
from .op_calls import called, is_opaque, like_attention

# Ops for which the flop counter has no formula, although they multiply an input by a weight (usually a quantised one).
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
# Rows and columns of the output tiles that cuBLAS uses for large GEMMs on Hopper.  For small GEMMs, cuBLAS uses smaller
# tiles.
_TILE = (128, 256)


def region_cost(values: Values, fused: bool = True) -> RegionCost:
    """Return the cost of one region.  ``values``: for each node of the region, its value, as fake tensors with concrete
    sizes.  ``fused``: whether Inductor fuses ops; it never fuses GEMMs, convolutions and attention.
    """
    counts = {n: node_flops(n, values) for n in values if n.op not in ("placeholder", "output")}
    flops = {n: f for n, f in counts.items() if f > 0 or is_opaque(n)}
    by_dtype, by_op = Counter[str](), Counter[str]()
    for node, count in flops.items():
        by_dtype[_dtype(node, values)] += count
        by_op[_kind(node, values)] += count
    others, traffic = other_kernels(values, flops.keys(), fused)
    return RegionCost(
        flops=sum(flops.values()),
        attention=by_op["attention"],
        masked=sum(f for n, f in flops.items() if _masked(n, values)),
        operands=sum(tensor_bytes(values[n]) for product in flops for n in (product, *product.all_input_nodes)),
        traffic=tuple(sorted(traffic.items())),
        kernels=len(flops) + others,
        dtype=_most(+by_dtype, "float32"),
        op=_most(+by_op, ""),
    )


def gemm_tiles(values: Values) -> tuple[tuple[int, int], ...]:
    """Return a pair for each GEMM of a region: the number of its output tiles, and its FLOPs."""
    found = ((node, node_flops(node, values)) for node in values if node.op == "call_function")
    gemms = [(tensors(values[node])[0].shape, flops) for node, flops in found if flops and _is_gemm(node, values)]
    return tuple((-(-shape[-2] // _TILE[0]) * -(-shape[-1] // _TILE[1]) * prod(shape[:-2]), f) for shape, f in gemms)


def attention_tiles(values: Values) -> tuple[tuple[int, int], ...]:
    """Return a pair for each attention op of a region: the number of its query tiles over all samples and heads, and its
    FLOPs."""
    found = ((node, node_flops(node, values)) for node in values if node.op == "call_function")
    ops = [(tensors(values[node])[0].shape, f) for node, f in found if f and _kind(node, values) == "attention"]
    return tuple((-(-shape[-2] // _TILE[0]) * prod(shape[:-2]), f) for shape, f in ops if len(shape) > 2)


def _is_gemm(node: Node, values: Values) -> bool:
    return _kind(node, values) == "matmul" and len(tensors(values[node])) == 1 and tensors(values[node])[0].dim() > 1


def node_flops(node: Node, values: Values) -> int:
    """Return the FLOPs of a node.

    If there is no formula for its op, but its operands look like query, key and value, return the FLOPs of attention on
    these operands.  For an op with nested graphs, return the FLOPs of the nested graph that has the most, because ``cond``
    runs only one of its branches.  For any other op without a formula, return 0.
    """
    call = called(node, values)
    if call is None:
        return 0
    args, kwargs = call.args, call.kwargs
    if (
        call.name.startswith("aten::") and "attention" in call.name and args[1].shape[-2] != args[2].shape[-2]
    ):  # if sizes are estimated, the lengths of key and value can differ, but the formulas require equal lengths
        args = (*args[:2], args[2].new_empty((*args[1].shape[:-1], args[2].shape[-1])), *args[3:])
    if node.target is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        # this is the only attention op for which torch has no formula; attention on fake CPU tensors is traced to it
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if call.name in _PRODUCTS:  # an input [..., k] times a weight [k, n] gives a result [..., n]
        return 2 * int(args[0].numel()) * int(tensors(values[node])[0].shape[-1])
    if (formula := flop_registry.get(call.op)) is not None:
        return int(formula(*args, **kwargs, out_val=values[node]))
    return like_attention(call) or max((_graph_flops(graph) for graph in call.nested), default=0)


def without_formula(nodes: Iterable[Node]) -> dict[str, str]:
    """Find the third-party ops and Triton kernels for which no FLOP formula is declared.  Return a mapping from the name of
    each such op or kernel to a sentence that says how its FLOPs are counted."""
    sentences: dict[str, str] = {}
    for node in nodes:
        values = {n: n.meta.get("val") for n in (node, *node.all_input_nodes)}
        call = called(node, values)
        if call is None or not call.of_others or call.op in flop_registry or call.name in _PRODUCTS:
            continue
        title, op = call.name, f"torch.ops.{call.name.replace('::', '.')}"
        if is_kernel_call(node):
            title, op = f"the kernel {call.name} of Triton", call.name
        taken = "are estimated as those of attention" if like_attention(call) else "count as none, only its bytes"
        sentences[call.name] = (
            f"no FLOP formula is declared for {title}: its FLOPs {taken}. Declare one with "
            f"torch.utils.flop_counter.register_flop_formula({op})."
        )
    return sentences


def _graph_flops(graph: GraphModule) -> int:
    """Return the FLOPs of a nested graph, or 0 if it contains symbolic sizes, whose values are not known."""
    values = {node: node.meta.get("val") for node in graph.graph.nodes}
    sizes = [size for value in values.values() for tensor in tensors(value) for size in tensor.shape]
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return 0
    return sum(node_flops(node, values) for node in values)


def _most(flops: Mapping[str, int], otherwise: str) -> str:
    return max(sorted(flops), key=flops.__getitem__, default=otherwise)


def _kind(node: Node, values: Values) -> str:
    call = called(node, values)
    if call is not None and (any(part in call.name for part in ("attention", "attn")) or like_attention(call)):
        return "attention"
    return "convolution" if "conv" in str(node.target) else "matmul"


def _masked(node: Node, values: Values) -> bool:
    """Return whether a node is attention with a mask.  The argument for the mask has one of two names in torch's ops."""
    if not isinstance(node.target, torch._ops.OpOverload) or _kind(node, values) != "attention":
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return any(given.get(name) is not None for name in ("attn_mask", "attn_bias"))


def _dtype(node: Node, values: Values) -> str:
    typed = tensors(values[node]) or [t for n in node.all_input_nodes for t in tensors(values[n])]
    return str(typed[0].dtype).removeprefix("torch.") if typed else "float32"
