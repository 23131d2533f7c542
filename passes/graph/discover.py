"""Discover: finds the weights among the inputs of an ATen inference graph, and recognizes its collectives.

Contract
    On entry: an ATen inference graph from AOTAutograd, in which ``meta["desc"]`` of every placeholder identifies its
    input.  The graph is not changed.  Parameters are found by the index of their input, never by the name of a node.
    Raises ChunkflowError for an unknown op in a collective namespace.  Also raises it if a weight may be streamed, but the
    graph takes only a view or a part of this weight as an input.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from chunkflow_compile.passes.cost.kernels import tensor_bytes
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.kernel_calls import is_kernel_call, kernel_name, written_by
from chunkflow_compile.passes.problem import Parameter

from .declared_collectives import Engine, argument, declared
from .symbolic_sizes import concrete
from .traced import Traced

_NO_SIZES: Mapping[str, int] = {}
# The namespaces of the collectives that ChunkFlow schedules.  Both namespaces contain ops with the same names.
_SCHEDULED = ("_c10d_functional", "_c10d_functional_autograd")
# All namespaces of ops that communicate.  An unknown op in one of them raises an error: it must not be treated as compute.
COLLECTIVE_NAMESPACES = (*_SCHEDULED, "c10d_functional", "c10d", "_dtensor", "symm_mem")
# The kind of collective for each op name.
COLLECTIVE_KINDS: Mapping[str, str] = {
    "all_to_all_single": "all-to-all",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "all_gather_into_tensor_coalesced": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
}
# DTensor on CUDA redistributes shards with this op.  The op is synchronous: when it returns, compute can read the result.
_SHARD_DIM_ALLTOALL = "_dtensor::shard_dim_alltoall"
# The ops that complete a collective.  wait_tensors (in torch 2.15, but not in 2.13) waits for all results of a coalesced
# collective.
_WAITS = frozenset(f"{namespace}::{name}" for namespace in _SCHEDULED for name in ("wait_tensor", "wait_tensors"))


@dataclass(frozen=True)
class DiscoveredWeight:
    """A parameter that the graph reads, and its placeholder.  ``keep``: the reason why the parameter must stay on the device,
    or None if it may be streamed."""

    parameter: Parameter
    node: Node
    keep: str | None

    def with_source(self, **changed: Any) -> DiscoveredWeight:
        """Return the same weight with some fields of its source changed."""
        return replace(self, parameter=replace(self.parameter, source=replace(self.parameter.source, **changed)))


@dataclass(frozen=True)
class Discovery:
    """The weights of a graph, in the order of the graph's inputs.  ``weight_views``: for each view of a weight, the
    placeholder of the weight."""

    weights: tuple[DiscoveredWeight, ...]
    weight_views: Mapping[Node, Node]


_WRITTEN = "forward writes it"


def discover(traced: Traced) -> Discovery:
    """Find the weights that a traced graph reads."""
    graph = traced.graph
    by_key = {p.key: p for p in traced.parameters}
    written = mutated_inputs(graph)
    weights: list[DiscoveredWeight] = []
    views: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        if node.op != "placeholder":
            continue
        key = input_key(node.meta.get("desc"))
        parameter = by_key.get(key)
        if parameter is None:
            continue
        if not _is_itself(node.meta["desc"]):
            _refuse_to_lose(parameter, node)
            continue
        readers, chain = _readers(node)
        if not readers:
            continue
        views.update(dict.fromkeys(chain, node))
        keep = parameter.keep or written.get(key) or _keep(parameter, node, readers)
        # pack.py and shard.py decide later whether the weight is compressed or sharded
        raw = DiscoveredWeight(parameter, node, keep).with_source(values=0, ranks=0)
        weights.append(raw)
    return Discovery(tuple(weights), views)


def collective_kind(node: Node) -> str | None:
    """Return the kind of a collective node, or None for other nodes, including completions.

    Raises ChunkflowError for an unknown op in a collective namespace.  If it were treated as compute, Inductor could reorder
    it.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    qualified = node.target._schema.name
    if qualified == _SHARD_DIM_ALLTOALL:
        return "all-to-all"
    if (custom := declared(node.target)) is not None:
        return custom.kind
    namespace, name = qualified.split("::")
    if namespace not in COLLECTIVE_NAMESPACES or qualified in _WAITS:
        return None
    kind = COLLECTIVE_KINDS.get(name) if namespace in _SCHEDULED else None
    if kind is None:
        kinds = ", ".join(sorted(COLLECTIVE_KINDS))
        raise ChunkflowError(
            f"The graph calls the collective {qualified} (node {node.name}), which ChunkFlow does not know; "
            f"it schedules {kinds} of {_SCHEDULED[0]}. Use one of these, or keep this part of the model outside the "
            "compiled graph."
        )
    return kind


def collective_of(completion: Node) -> Node:
    """Return the collective that a completion waits for.  The operand of the completion is the collective itself, or an
    element of the collective's list of results."""
    node = completion.all_input_nodes[0]
    return node if collective_kind(node) is not None else node.all_input_nodes[0]


def awaited(completion: Node) -> tuple[Node, ...]:
    """Return the collectives that a completion waits for.  The tuple is empty if the completion does not read the result of
    a collective."""
    operands = [list_of(operand) or operand for operand in completion.all_input_nodes]
    return tuple(dict.fromkeys(node for node in operands if collective_kind(node) is not None))


def list_of(node: Node) -> Node | None:
    """Return the coalesced collective that has ``node`` as one of its results, or None if there is no such collective.

    Also return None if the collective is synchronous, because compute can then read its results at once.
    """
    if node.target is not operator.getitem:
        return None
    results = node.all_input_nodes[0]
    return results if collective_kind(results) is not None and not completes_itself(results) else None


def completes_itself(node: Node) -> bool:
    """Return whether a collective is synchronous: compute waits for its end at the collective itself, and there is no
    completion."""
    target: Any = node.target
    if declared(target) is not None:
        return True
    return bool(collective_kind(node) is not None and target._schema.name == _SHARD_DIM_ALLTOALL)


def engine_of(node: Node) -> Engine:
    """Return the engine that moves the bytes of a collective node."""
    custom = declared(node.target)
    return "sm" if custom is None else custom.engine


def crossing_bytes(node: Node, ranks: int, sizes: Mapping[str, int] = _NO_SIZES) -> int:
    """Return the bytes that this rank receives in a collective.  ``sizes``: values of the symbols in the graph.

    With P ranks and n input bytes on each rank, a rank receives n (P - 1) / P bytes in an all-to-all or a reduce-scatter,
    n (P - 1) bytes in an all-gather, and 2 n (P - 1) / P bytes in an all-reduce.  Raises ChunkflowError if the sizes of a
    declared collective contradict its kind.
    """
    custom = declared(node.target)
    if custom is not None and custom.nbytes is not None:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda a: concrete(a.meta["val"], sizes))
        return int(custom.nbytes(*args, **kwargs))
    taken = sum(nbytes(a, sizes) for a in node.all_input_nodes if a is not node.kwargs.get("out"))
    kind = collective_kind(node)
    if custom is not None:
        _check_kind(node, custom.kind, taken, nbytes(node, sizes), ranks)
    if kind == "all-gather":
        return taken * (ranks - 1)
    return taken * (ranks - 1) // ranks * (2 if kind == "all-reduce" else 1)


def group_name(node: Node) -> str:
    """Return the name of the process group of a collective node.

    Raises ChunkflowError if the group is an input of the graph, because the size of the group is then unknown at compile
    time.
    """
    custom = declared(node.target)
    if custom is not None and custom.fixed:
        return custom.group
    group = argument(node.target, node.args, node.kwargs, "group_name" if custom is None else custom.group)
    if isinstance(group, Node):
        raise ChunkflowError(
            f"The process group of {node.name} is an input of the graph, so its size is not known at compile time. "
            "Turn torch.compiler.config.compile_on_one_rank off."
        )
    return str(getattr(group, "group_name", group))


def _check_kind(node: Node, kind: str, taken: int, given: int, ranks: int) -> None:
    """Raise ChunkflowError if the sizes of a declared collective contradict its kind.  ``taken``: bytes of the collective's
    operands.  ``given``: bytes of its results."""
    expected = {"all-gather": taken * ranks, "reduce-scatter": taken // ranks}.get(kind, taken)
    if given != expected:
        target: Any = node.target
        raise ChunkflowError(
            f"{target._schema.name} (node {node.name}) is declared as {kind}: on {ranks} ranks it would return {expected} "
            f"bytes for the {taken} that it takes, but it returns {given}. Declare its true kind, or pass bytes= to "
            "register_collective if it takes or returns more than it exchanges."
        )


def group_names(graph: Graph) -> Collection[str]:
    """Return the names of the process groups that the collectives of a graph use, in the order of their first use."""
    return dict.fromkeys(group_name(node) for node in graph.nodes if collective_kind(node) is not None).keys()


def is_wait_tensor(node: Node) -> bool:
    """Return whether a node is a completion: compute waits there for the end of a collective."""
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.name in _WAITS
    )


def completion_of(collective: Node) -> Node | None:
    """Return the completion of a collective.  Return None if another node reads the collective's result, or if the completion
    waits for several collectives."""
    users = [*collective.users]
    found = len(users) == 1 and is_wait_tensor(users[0]) and users[0].all_input_nodes == [collective]
    return users[0] if found else None


def is_view(node: Node) -> bool:
    """Return whether a node is a view of the memory of its operand: a view op, or one of the results of a view op."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and is_view(node.args[0])
    # autograd does not treat _unsafe_view as a view, but its result shares the memory of its operand
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target.is_view or node.target is torch.ops.aten._unsafe_view.default
    )


def nbytes(node: Node, sizes: Mapping[str, int] = _NO_SIZES) -> int:
    """Return the bytes of the tensors that a node returns, according to its metadata.  ``sizes``: values of the symbols
    in the graph."""
    return tensor_bytes(concrete(node.meta["val"], sizes))


def input_key(desc: Any) -> tuple[int, str]:
    """Return the index and the attribute path that identify an input, as in :attr:`Parameter.key`.  ``desc``: description
    of the input from AOTAutograd.  The index is -1 if ``desc`` does not describe exactly one input of the Dynamo graph.
    """
    inside = ""
    while isinstance(desc, SubclassGetAttrAOTInput):
        inside, desc = f".{desc.attr}{inside}", desc.base
    while desc is not None and not isinstance(getattr(desc, "idx", None), int):
        desc = getattr(desc, "base", None)
    return (-1 if desc is None else int(desc.idx)), inside


def _is_itself(desc: Any) -> bool:
    """Return True if a placeholder is an input itself, or a tensor inside an input that is a tensor subclass.  Return False
    if it is a view of an input.  ``desc``: description of the placeholder from AOTAutograd."""
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    return isinstance(desc, PlainAOTInput)


def mutated_inputs(graph: GraphModule) -> dict[tuple[int, str], str]:
    """Return, for each input that forward writes, a clause that names the writer, by the key of the input
    (:func:`input_key`)."""
    (output,) = graph.graph.find_nodes(op="output")
    descs: Any = output.meta.get("desc") or ()
    results: Any = output.args[0]
    changed = ((getattr(desc, "mutated_input", None), result) for desc, result in zip(descs, results, strict=False))
    return {input_key(desc): _writer(result) for desc, result in changed if desc is not None}


def _writer(result: Any) -> str:
    """Return a clause that names the writer of an input.  ``result``: new values that the graph returns for this input, or a
    view of these values."""
    while isinstance(result, Node) and result.all_input_nodes:
        if is_kernel_call(result):
            return f"the kernel {kernel_name(result)} writes it"
        if result.target is not operator.getitem and not is_view(result):
            break
        result = result.all_input_nodes[0]
    return _WRITTEN


def _refuse_to_lose(parameter: Parameter, node: Node) -> None:
    """Raise ChunkflowError if a parameter should be streamed (``keep`` is None), although this is impossible.  The graph
    takes the parameter only as a part of a tensor subclass, or another input shares the parameter's memory."""
    if parameter.keep is None:
        raise ChunkflowError(
            f"The weight {parameter.name} reaches the traced graph as {node.meta['desc']!r}, not as itself, so it "
            "cannot be streamed: a view of it is an input too, or it is a tensor subclass. "
            "Raise min_bytes above its size."
        )


def _readers(placeholder: Node) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Return the nodes that read a placeholder, directly or through views, and the views between the placeholder and these
    nodes."""
    readers: dict[Node, None] = {}
    chain: dict[Node, None] = {}
    todo = [placeholder]
    while todo:
        for user in todo.pop().users:
            if is_view(user):
                if user not in chain:
                    chain[user] = None
                    todo.append(user)
            else:
                readers[user] = None
    return tuple(readers), tuple(chain)


def viewed(node: Node) -> Node:
    """Return the node of which ``node`` is a view, or ``node`` itself if it is not a view."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _keep(parameter: Parameter, placeholder: Node, readers: Sequence[Node]) -> str | None:
    if len(parameter.names) > 1:
        return f"tied: also {', '.join(parameter.names[1:])}"
    for reader in readers:
        if reader.op == "output":
            return "returned by the model"
        if any(viewed(operand) is placeholder for operand in written_by(reader)):
            return f"the kernel {kernel_name(reader)} writes it"
        if collective_kind(reader) is not None or is_wait_tensor(reader):
            return f"sent by the collective {reader.name}"
    return None
