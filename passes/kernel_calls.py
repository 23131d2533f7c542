"""Calls of the user's Triton kernels: which kernel a node calls, with which constants, and which operands it writes.

torch traces a call of a user's kernel as a higher-order op without a schema.  The op's arguments identify the kernel and its
constants by indices into a table of this process.  The indices depend on the order of tracing, so they are meaningless in
another process.
"""

from __future__ import annotations

from typing import Any

from torch._higher_order_ops.triton_kernel_wrap import (
    get_mutated_tensors,
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch.fx import Node
from torch.fx.node import map_arg

_NUMBERS = ("kernel_idx", "constant_args_idx")


def is_kernel_call(node: Node) -> bool:
    """Return whether a node calls a user's kernel."""
    return node.op == "call_function" and node.target in (
        triton_kernel_wrapper_functional,
        triton_kernel_wrapper_mutation,
    )


def returns_copies(node: Node) -> bool:
    """Return whether a node calls a user's kernel on copies of the operands that the kernel writes, and returns these copies
    as a dict."""
    return node.op == "call_function" and node.target is triton_kernel_wrapper_functional


def kernel_of(node: Node) -> Any:
    """Return the kernel that a node calls, without its autotuning wrappers."""
    kernel: Any = kernel_side_table.get_kernel(int(node.kwargs["kernel_idx"]))  # type: ignore[arg-type]
    while not hasattr(kernel, "src") and hasattr(kernel, "fn"):  # Autotuner, Heuristics
        kernel = kernel.fn
    return kernel


def kernel_name(node: Node) -> str:
    """Return the name of the kernel that a node calls."""
    kernel = kernel_of(node)
    return str(getattr(kernel, "__name__", kernel))


def operands_of(node: Node) -> dict[str, Any]:
    """Return the keyword arguments of a node.  For a kernel call, replace the indices by the kernel's name and its
    constants."""
    if not is_kernel_call(node):
        return dict(node.kwargs)
    constants = kernel_side_table.get_constant_args(int(node.kwargs["constant_args_idx"]))  # type: ignore[arg-type]
    rest = {name: value for name, value in node.kwargs.items() if name not in _NUMBERS}
    return {"kernel": kernel_name(node), "constants": dict(sorted(constants.items())), **rest}


def source_key(node: Node) -> str:
    """Return a key that is equal for two calls only if their kernels have the same source, call the same functions and
    have the same autotuning configurations.

    Triton's own digest of a kernel covers the functions and the constants that its source names.
    """
    kernel, tunings = kernel_of(node), list[str]()
    outer: Any = kernel_side_table.get_kernel(int(node.kwargs["kernel_idx"]))  # type: ignore[arg-type]
    while outer is not kernel:
        tunings += [type(outer).__name__, *map(str, getattr(outer, "configs", None) or ())]
        outer = outer.fn
    return f"{getattr(kernel, 'cache_key', kernel.src)} {tunings}"


def written_by(node: Node) -> list[Node]:
    """Return the operands that a kernel call writes in place, or all tensor operands if Triton cannot determine which of them
    the kernel writes.  Return an empty list if the node is not a kernel call."""
    if not is_kernel_call(node) or returns_copies(node):
        return []
    written: list[Node] = []
    operands: Any = node.kwargs["kwargs"]
    numbers: Any = [node.kwargs[name] for name in _NUMBERS]
    values = map_arg(operands, lambda n: n.meta["val"])
    names = get_mutated_tensors(numbers[0], numbers[1], values, node.kwargs["tma_descriptor_metadata"])  # type: ignore[arg-type]
    map_arg([operands[name] for name in names], written.append)
    return written
