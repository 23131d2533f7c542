"""Trace a model or a Dynamo graph into an ATen inference graph, and describe the graph's parameters and process groups."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import group_names
from chunkflow_compile.passes.graph.symbolic_sizes import bounds, estimated, hints
from chunkflow_compile.passes.graph.traced import Repeats, Traced
from chunkflow_compile.passes.names import DEFAULT_MIN_BYTES
from chunkflow_compile.passes.problem import HOST, Parameter
from chunkflow_compile.placed.index import ModelIndex
from chunkflow_compile.placed.offload import large_weights
from chunkflow_compile.placed.streamable import why_not
from chunkflow_compile.private_torch import core, dynamo
from chunkflow_compile.private_torch.dynamo import source_name
from chunkflow_compile.units import size
from chunkflow_compile.weights.groups import ranks_of, ranks_together
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves, with_leaves
from chunkflow_compile.weights.weight_memory import Form

# The reason given for a parameter that stays on the device because no module was found that contains it.
NO_MODULE = "no module holds it"
_NO_LIMIT = 1 << 30
# Dynamo's name for the source of an argument of forward: L['timestep'] or L['kwargs']['timestep'].
_OF_CALL = re.compile(r"^L(?:\['kwargs'\])?\['(\w+)'\]$")
# ATen's ops for Tensor.to and Tensor.cuda.
_DEVICE_MOVES = (torch.ops.aten._to_copy.default,)


def trace(model: nn.Module, inputs: Mapping[str, Any], min_bytes: int = DEFAULT_MIN_BYTES) -> Traced:
    """Trace one call of ``model`` into an ATen graph, without running any op.

    The parameters and the inputs may be fake tensors, because no values are read.  The model must trace into one graph.
    ``min_bytes``: the size in bytes below which parameters are not streamed.
    """
    index, traced = ModelIndex.of(model), list[Traced]()

    def backend(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
        inline_regions(graph)
        parameters = describe_parameters(example_inputs, index, min_bytes)

        def compiler(aten: GraphModule, _: Sequence[Any]) -> Any:
            traced.append(describe_graph(aten, parameters, index.blocks))
            return _stop

        return lower_to_aten(graph, example_inputs, compiler)[0]

    # Raise Dynamo's limits, because Dynamo counts each trace as one more compilation of the model's code.
    limits = dynamo.config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT)
    with torch.no_grad(), limits:
        try:
            torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(**inputs)
        except _TracedError:
            large = large_weights([model], index, min_bytes)
            return replace(traced[-1], large=tuple((index.names[id(w)][0], w.nbytes) for w in large))
    raise AssertionError("a traced graph is never run")


def inline_regions(graph: GraphModule) -> None:
    """Inline, in place, the calls of regions that users have marked with ``torch.compiler.nested_compile_region``.

    The call of a marked region is a single op in the graph.  If this op stayed in the graph, the planner would not know the
    FLOPs, collectives and memory of the ops inside the marked region.  Inlining takes no extra compilation time, because
    ChunkFlow cuts the inlined graph into regions again, and lowers regions with the same structure only once.
    """
    while calls := graph.graph.find_nodes(op="call_function", target=invoke_subgraph):
        for call in calls:
            _inline(graph, call)
        graph.delete_all_unused_submodules()
        graph.recompile()


def _inline(graph: GraphModule, call: Node) -> None:
    """Replace one call of a marked region by the ops of this region.  The arguments of the call are (region, name,
    *operands)."""
    place: Any
    operands: Any
    place, _, *operands = call.args
    region: Any = graph.get_submodule(place.target)
    copies: dict[Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
    with graph.graph.inserting_before(call):
        for node in region.graph.find_nodes(op="get_attr"):
            name = f"{place.target}_{node.target}"
            setattr(graph, name, getattr(region, node.target))
            copies[node] = graph.graph.get_attr(name)
        returned: Any = graph.graph.graph_copy(region.graph, copies)
    for node, copied in copies.items():
        # The metadata of a node in the region names the modules in which the region was called first.  The copy of the node
        # must name the modules of this call.
        if node.op.startswith("call_") and "nn_module_stack" in call.meta:
            copied.meta["nn_module_stack"] = call.meta["nn_module_stack"]
    for item in [*call.users]:
        item.replace_all_uses_with(returned[item.args[1]])
        graph.graph.erase_node(item)
    graph.graph.erase_node(call)
    if not place.users:
        graph.graph.erase_node(place)


def lower_to_aten(
    graph: GraphModule, example_inputs: Sequence[Any], compiler: Callable[[GraphModule, Sequence[Any]], Any]
) -> tuple[Callable[..., Any], Any]:
    """Lower a Dynamo graph to an ATen inference graph, and pass the ATen graph to ``compiler``.

    Returns a pair: the function that Dynamo should call, and the callable that ``compiler`` has returned.  The function calls
    the callable.
    """
    cached = torch._functorch.config.enable_autograd_cache
    autocast = core.autocasts()  # if True, calls need AOTAutograd's wrapper: it turns autocast off while the graph runs
    on_device, compiled, direct = as_on_device(example_inputs), list[Any](), False

    def uncached(aten: GraphModule, inputs: Sequence[Any]) -> Any:
        # AOTAutograd's cache is off for the whole graph (see below), but its regions are compiled with the user's setting
        with torch._functorch.config.patch(enable_autograd_cache=cached):
            compiled.append(compiler(aten, inputs))
        return compiled[-1]

    def inference(aten: GraphModule, inputs: Sequence[Any]) -> Any:
        nonlocal direct
        uncached(aten, inputs)
        direct = not autocast and _needs_no_wrapper(graph, on_device, inputs)
        return compiled[-1]

    # Turn AOTAutograd's cache off: for a graph in its cache, AOTAutograd would not call ``compiler``.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        # AOTAutograd calls fw_compiler if the model's forward enables gradients
        compilers: dict[str, Any] = {"fw_compiler": uncached, "inference_compiler": inference}
        wrapped = aot_module_simplified(graph, on_device, **compilers)
    boxed = compiled[-1]
    return (lambda *inputs: boxed([*inputs])) if direct else wrapped, boxed


def _needs_no_wrapper(graph: GraphModule, given: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether a graph runs correctly without AOTAutograd's wrapper, which costs 50 us per call.

    The ATen graph needs no wrapper if it has the same inputs and outputs as the Dynamo graph, writes no input, returns no
    view of an input, does not change the grad mode, and has no output with symbolic sizes.  (If an output has symbolic sizes,
    the wrapper marks them as dynamic for the graph that reads this output.)
    ``given``: the inputs of the Dynamo graph, as returned by :func:`as_on_device`.  ``inputs``: the inputs of the ATen
    graph.
    """
    about: Any = torch._guards.TracingContext.get().fw_metadata
    returned = [node.meta.get("example_value") for node in graph.graph.output_node().all_input_nodes]
    plain = not any(map(is_traceable_wrapper_subclass, [*given, *returned]))
    changed = about.mutated_inp_runtime_indices or about.num_outputs_aliased or about.num_intermediate_bases
    marked = about.dynamic_outputs or about.grad_enabled_mutation is not None
    return plain and len(given) == len(inputs) and not changed and not marked


def as_on_device(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs of a Dynamo graph, with each offloaded weight replaced by a fake tensor on the device.

    In the traced graph, each weight is then an ordinary input.  When a program calls the compiled graph, it passes the device
    memory that currently contains the weight as this input.
    """
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode

    def fake(weight: torch.Tensor) -> torch.Tensor:
        with mode or contextlib.nullcontext():
            return torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)

    return [with_leaves(v, fake) if any(isinstance(t, HostWeight) for _, t in leaves(v)) else v for v in inputs]


def describe_graph(
    graph: GraphModule,
    parameters: Sequence[Parameter],
    blocks: Mapping[str, str],
    fused: bool = True,
    repeats: Repeats | None = None,
) -> Traced:
    """Return the ATen graph together with data that planning needs and that the graph does not contain, such as the number of
    ranks.

    The process groups that the graph's collectives use must still exist.
    ``fused``, ``repeats``: see :class:`Traced`.
    """
    ranks = {name: len(ranks_of(name)) for name in sorted(group_names(graph.graph))}
    unknown = bounds(graph)
    sizes = estimated(hints(graph), unknown)
    return Traced(
        graph=graph,
        parameters=tuple(parameters),
        blocks=blocks,
        ranks=ranks,
        sizes=sizes,
        unknown=unknown,
        fused=fused,
        repeats=repeats,
        together=ranks_together(),
    )


def describe_parameters(inputs: Sequence[Any], model: ModelIndex, min_bytes: int) -> list[Parameter]:
    """Return descriptions of the parameters among the inputs of a Dynamo graph.

    ``min_bytes``: the size in bytes below which parameters stay on the device.
    """
    parameters = [_parameter_at(*key, p, model, min_bytes) for key, p in weights_among(inputs, model).items()]
    uses = Counter(p.name for p in parameters)
    return [
        p if uses[p.name] == 1 else replace(p, names=(f"{p.name}@{p.index}", *p.names[1:]))  # two models use this name
        for p in parameters
    ]


def slow_inputs(graph: GraphModule, hoist: bool | str | Collection[str]) -> frozenset[int] | None:
    """Return the positions of the graph inputs whose names are in ``hoist``, or None if ``hoist`` is a bool or "auto".

    Raises ChunkflowError if a name is not the name of an input.
    """
    if isinstance(hoist, bool | str):
        return None
    found: dict[str, int] = {}
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        source = getattr(node, "_dynamo_source", None)
        if source is not None and (inside := _OF_CALL.search(source_name(source))) is not None:
            found[inside[1]] = index
    if missing := [name for name in hoist if name not in found]:
        raise ChunkflowError(
            f"hoist={tuple(hoist)!r}: this graph has no input {missing[0]!r}; its inputs are {', '.join(found)}. Leave hoist "
            "out for the models that have none."
        )
    return frozenset(found[name] for name in hoist)


def weights_among(inputs: Sequence[Any], model: ModelIndex) -> dict[tuple[int, str], torch.Tensor]:
    """Return the weights among the inputs of a Dynamo graph.

    Each key is a pair: the position of an input, and the path to the weight inside this input.  The path is empty unless the
    input is a tensor subclass.
    """
    return {
        (position, inside): leaf
        for position, value in enumerate(inputs)
        for inside, leaf in leaves(value)
        if isinstance(value, (nn.Parameter, HostWeight)) or id(leaf) in model.names
    }


def _parameter_at(index: int, inside: str, parameter: torch.Tensor, model: ModelIndex, min_bytes: int) -> Parameter:
    buffer = buffer_of(parameter)
    names = buffer.names if buffer is not None else model.names.get(id(parameter), (f"input_{index}{inside}",))
    nbytes = parameter.numel() * parameter.element_size()
    keep = why_not(parameter, model, inside)
    if keep is None and buffer is None:
        if id(parameter) not in model.names:
            keep = NO_MODULE
        elif nbytes < min_bytes and id(parameter) not in model.filled:
            keep = f"small: {size(nbytes)}"
    source = HOST if buffer is None else buffer.source
    compressible = buffer is None or buffer.form is not Form.RAW
    return Parameter(index=index, inside=inside, names=names, keep=keep, source=source, compressible=compressible)


class _TracedError(Exception):
    """Raised to end a call once its graph has been captured."""


def _stop(*_: Any) -> Any:
    raise _TracedError


def move_tables(graph: GraphModule, device: torch.device) -> tuple[int, ...]:
    """Find the inputs that a graph only moves to ``device``.  Change the graph so that it expects these inputs on ``device``,
    and return their positions.

    The caller must move these inputs to ``device`` before it calls the graph.
    For example, Qwen-Image keeps its rotary tables on the CPU and moves them to the GPU in every forward.  Such a copy from
    pageable memory would synchronize host and GPU in every step.  Therefore ``HostConstants`` in ``runtime/graph.py`` moves
    the tables only once.
    """
    moved = []
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if not isinstance(value, FakeTensor) or not value.dim() or value.device == device:
            continue
        if node.users and all(u.target in _DEVICE_MOVES and u.kwargs.get("device") == device for u in node.users):
            with value.fake_mode:
                node.meta["val"] = value.to(device)
            moved.append(position)
    return tuple(moved)
