"""Stored: converts a traced graph to a *body*, a mapping of JSON-compatible values, and back.

Contract
    On entry: a Traced without symbolic sizes, or a body.  The graph may contain inputs, small constants, calls of torch ops,
    and elements of the results of these calls.  Anything else raises ValueError: symbols, nested graphs, Triton kernels,
    inputs that the graph writes to, and inputs that are parts of tensor subclasses.
    On exit: a body, or a Traced that is equivalent to the original for all passes.  Stack traces are not stored.  Reading a
    body executes no code from the body: ops are looked up by name among torch's registered ops.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from chunkflow_compile.passes.problem import Parameter, Source

from .traced import Traced

# The maximum number of elements of a constant, such as a mask.  A graph with a larger constant cannot be stored.
_SMALL = 1024
# The types of torch constants that ops take as arguments, by the keys under which constants of these types are stored.
_CONSTANTS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def body_of(traced: Traced) -> dict[str, Any]:
    """Return a body from which :func:`traced_from` makes an equivalent Traced.  Raises ValueError if the Traced cannot be
    stored completely."""
    if traced.sizes or traced.unknown or traced.repeats is not None:
        raise ValueError("The graph has symbols, or is one block of a model.")
    writer = _BodyWriter(traced)
    nodes = [writer.node(node) for node in traced.graph.graph.nodes]
    return {
        "parameters": [asdict(p) for p in traced.parameters],
        "ranks": dict(traced.ranks),
        "large": traced.large,
        "fused": traced.fused,
        "together": traced.together,
        "tensors": [*writer.tensors],
        "nodes": nodes,
    }


def traced_from(body: Mapping[str, Any]) -> Traced:
    """Return the Traced that a body describes.  Raises KeyError, ValueError, TypeError or AttributeError if the body is
    invalid.  If the body describes a tensor that cannot exist, torch raises RuntimeError."""
    reader, graph = _BodyReader(body["tensors"]), Graph()
    for row in body["nodes"]:
        reader.add(graph, row)
    return Traced(
        graph=GraphModule(reader.root, graph),
        parameters=tuple(_parameter(**p) for p in body["parameters"]),
        blocks={block: block for block in reader.blocks},
        ranks=dict(body["ranks"]),
        large=tuple((str(name), int(nbytes)) for name, nbytes in body["large"]),
        fused=body["fused"],
        together=body["together"],
    )


def _parameter(*, names: Sequence[str], source: Mapping[str, Any], **more: Any) -> Parameter:
    return Parameter(names=tuple(names), source=Source(**source), **more)


class _BodyWriter:
    """Converts the nodes of a graph to rows of a body, in program order.  ``tensors``: a number for each distinct description
    of a tensor."""

    def __init__(self, traced: Traced) -> None:
        self.tensors: dict[tuple[Any, ...], int] = {}
        self._blocks = traced.blocks
        self._numbers = {node: number for number, node in enumerate(traced.graph.graph.nodes)}

    def node(self, node: Node) -> list[Any]:
        """Return a node as a row.  The row of a call contains the operation, name, target, arguments, value and block.  The
        block is "" if the node is outside blocks, and None if the module of the node is not known."""
        users = [self._numbers[user] for user in node.users]
        if users != sorted(users):
            raise ValueError(f"The users of {node.name} are not in program order.")
        row: list[Any] = [node.op, node.name]
        if node.op == "placeholder":
            desc = node.meta.get("desc")
            if type(desc) is not PlainAOTInput:
                raise ValueError(f"The input {node.name} is {desc!r}.")
            return [*row, desc.idx, self.value(node.meta["val"])]
        if node.op == "output":
            if any(getattr(desc, "mutated_input", None) is not None for desc in node.meta.get("desc") or ()):
                raise ValueError("An input is written.")
            return [*row, self.value(node.args)]
        if node.op == "get_attr":
            return [*row, node.target, _constant(node), self.value(node.meta["val"])]
        if node.op != "call_function":
            raise ValueError(f"{node.name} is a {node.op}.")
        arguments = self.value(node.args), {name: self.value(value) for name, value in node.kwargs.items()}
        return [*row, _name_of(node), *arguments, self.value(node.meta["val"]), self._block(node)]

    def value(self, value: Any) -> Any:
        """Return an argument or a result as a JSON-compatible value.  A value of a type that JSON lacks becomes an object
        with one key, which names the type."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Node):
            return {"node": self._numbers[value]}
        if isinstance(value, tuple) and type(value) is not torch.Size:
            return {"tuple": [self.value(v) for v in value]}
        if isinstance(value, list):
            return [self.value(v) for v in value]
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if type(value) is FakeTensor:
            return {"tensor": self.tensors.setdefault(_description(value), len(self.tensors))}
        for name, kind in _CONSTANTS.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        raise ValueError(f"{value!r} is a {type(value).__name__}.")

    def _block(self, node: Node) -> str | None:
        stack = node.meta.get("nn_module_stack")
        if not stack:
            return None
        keys = [str(key).split("@")[0] for key in stack]
        return next((self._blocks[key] for key in keys if key in self._blocks), "")


class _BodyReader:
    """Adds the nodes of a body to a graph.  ``root``: module with the constants of the nodes that were already added.
    ``blocks``: names of the blocks of these nodes."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.root = torch.nn.Module()
        self.blocks: dict[str, None] = {}
        self._nodes: list[Node] = []
        with FakeTensorMode():
            self._tensors = [_tensor(*description) for description in tensors]

    def add(self, graph: Graph, row: Sequence[Any]) -> None:
        """Add the node of a row to the graph.  The tensor of a constant is added to ``root``."""
        op, name, *rest = row
        if op == "placeholder":
            node = graph.create_node(op, name, name=name)
            node.meta = {"desc": PlainAOTInput(idx=int(rest[0])), "val": self.value(rest[1])}
        elif op == "get_attr":
            target, (dtype, values), value = rest
            self.root.register_buffer(target, torch.tensor(values, dtype=getattr(torch, dtype)))
            node = graph.create_node(op, target, name=name)
            node.meta = {"val": self.value(value)}
        elif op == "output":
            node = graph.create_node(op, "output", self.value(rest[0]), name=name)
        else:
            target, args, kwargs, value, block = rest
            operands = {key: self.value(v) for key, v in kwargs.items()}
            node = graph.create_node("call_function", _op(target), self.value(args), operands, name=name)
            node.meta = {"val": self.value(value)}
            if block is not None:
                node.meta["nn_module_stack"] = {block: None}
            if block:
                self.blocks[block] = None
        if node.name != name:
            raise ValueError(f"There are two nodes {name}, or torch allows no such name.")
        self._nodes.append(node)

    def value(self, written: Any) -> Any:
        """Return the value that :meth:`_BodyWriter.value` has converted to ``written``."""
        if isinstance(written, list):
            return [self.value(v) for v in written]
        if not isinstance(written, dict):
            return written
        ((kind, text),) = written.items()
        if kind == "node":
            return self._nodes[text]
        if kind == "tuple":
            return tuple(self.value(v) for v in text)
        if kind == "device":
            return torch.device(text)
        if kind == "tensor":
            return self._tensors[text]
        constant = getattr(torch, text)
        if not isinstance(constant, _CONSTANTS[kind]):
            raise ValueError(f"torch.{text} is no {kind}.")
        return constant


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise ValueError("A tensor is not strided, or is the conjugate or the negative of another.")
    if not all(type(size) is int for size in sizes):
        raise ValueError("The size of a tensor is a symbol.")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), dtype, str(tensor.device)


def _tensor(shape: Sequence[int], stride: Sequence[int], offset: int, dtype: str, device: str) -> torch.Tensor:
    """Make a tensor.  It is a fake tensor, because the caller has entered a FakeTensorMode."""
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if not offset:
        return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
    memory = torch.empty(last + 1, dtype=getattr(torch, dtype), device=device)
    return memory.as_strided(shape, stride, offset)


def _constant(node: Node) -> tuple[str, Any]:
    """Return the dtype and the values of a constant of the graph."""
    value = getattr(node.graph.owning_module, str(node.target))
    if type(value) is not torch.Tensor or not 0 < value.numel() <= _SMALL or value.device.type != "cpu":
        raise ValueError(f"{node.name} is a {type(value).__name__}, not a small tensor on the CPU.")
    return str(value.dtype).removeprefix("torch."), value.tolist()


def _name_of(node: Node) -> str:
    target = node.target
    if target is operator.getitem:
        return "getitem"
    if not isinstance(target, torch._ops.OpOverload):
        raise ValueError(f"{node.name} calls {target}, which is no op.")
    return f"{target.namespace}.{target._opname}.{target._overloadname}"


def _op(name: str) -> Any:
    """Return the op for a name from :func:`_name_of`."""
    if name == "getitem":
        return operator.getitem
    namespace, op, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{name} is no op.")
    return found
