"""Checks that run before a Dynamo graph is compiled.

A Dynamo graph covers a whole model, or the part of a model between two graph breaks.  Dynamo calls the backend once for each
graph.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from chunkflow_compile.frontend.module_search import held_by
from chunkflow_compile.lowering.lower import Lowering
from chunkflow_compile.passes.cost.count import without_formula
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import collective_kind
from chunkflow_compile.passes.graph.symbolic_sizes import symbols_of
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.placed.index import ModelIndex, filled_by
from chunkflow_compile.placed.offload import why_nothing_streams
from chunkflow_compile.private_torch.dynamo import InstructionTranslator, callback_handler, config, source_name
from chunkflow_compile.private_torch.inductor import compile_fx
from chunkflow_compile.units import size
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves, leaves_of
from chunkflow_compile.weights.modules import hooks_of

_log = logging.getLogger(__name__)

# The errors that eval() may raise for Dynamo's name of an input.  This name is a Python expression, and it may call functions
# that exist only in Dynamo's guards.
_NO_VALUE = (AttributeError, LookupError, NameError, SyntaxError, TypeError)
# The names of diffusers' hooks that compare activations in order to decide whether blocks run.
_DECIDES_BY_VALUES = {"fbc_leader_block_hook"}


def lower_without_weights(
    graph: GraphModule, inputs: Sequence[Any], lowering: Lowering, inductor: Mapping[str, Any]
) -> Any:
    """Lower a Dynamo graph that reads no weight.  The graph is not rewritten, because there is nothing to stream."""
    if lowering == "eager":
        return graph.forward
    return compile_fx(graph, list(inputs), config_patches=dict(inductor))


def weights_and_modules(graph: GraphModule, inputs: Sequence[Any], min_bytes: int) -> tuple[list[Any], list[nn.Module]]:
    """Return the weights among the inputs of a Dynamo graph, and the modules from which Dynamo read inputs.

    The weights are the parameters.  If the graph has no parameters, the weights are all buffers of the returned modules that
    have at least ``min_bytes`` bytes.
    """
    modules = _read_from(graph)
    weights = [v for v in inputs if isinstance(v, (nn.Parameter, HostWeight))]
    if weights or not modules:
        return weights, modules
    held = held_by(modules)
    buffers = {id(t): t for v in inputs for _, t in leaves(v) if id(t) in held and t.nbytes >= min_bytes}
    if any(buffers.keys() <= held_by([module]) for module in modules):
        return [*buffers.values()], modules
    nbytes = _large_bytes(buffers.values(), min_bytes)
    warn_once(
        f"{size(nbytes)} of buffers stay on the device and are not streamed, because they belong to several models: call "
        "chunkflow_compile.offload on each of them before the first call."
    )
    return [], modules


def _read_from(graph: GraphModule) -> list[nn.Module]:
    """Return the modules from which Dynamo read the inputs of a graph, directly or through submodules."""
    try:
        frame = InstructionTranslator.current_tx()
        scope: dict[str, Any] = {"L": frame.f_locals, "G": frame.f_globals}
    except AttributeError:  # Dynamo is not compiling in this thread
        return []
    values: dict[str, Any] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        source = getattr(getattr(node, "_dynamo_source", None), "base", None)
        while source is not None:
            name = source_name(source)
            if name not in values:
                try:
                    values[name] = eval(name, scope)  # Dynamo's guards evaluate this expression, too
                except _NO_VALUE:
                    values[name] = None
            source = getattr(source, "base", None)
    return [v for v in values.values() if issubclass(type(v), nn.Module)]


def warn_if_no_module_holds(weights: Iterable[torch.Tensor], min_bytes: int) -> None:
    """Warn that ``weights`` stay on the device because no module was found that contains them.

    There is no warning if all these weights are smaller than ``min_bytes`` bytes.
    """
    if nbytes := _large_bytes(weights, min_bytes):
        hidden = "gc.freeze() has hidden it, or there is none"
        warn_once(
            f"{size(nbytes)} of parameters stay on the device and are not streamed, because no module was found that holds "
            f"them: {hidden if gc.get_freeze_count() else 'they are attributes of none'}. Call "
            "chunkflow_compile.offload(model) before the first call; put parameters that are in no module into one, such as "
            "torch.nn.ParameterList, and offload that."
        )


def warn_if_nothing_streams(index: ModelIndex, made: Sequence[Program]) -> None:
    """Warn if no weight of a module streams, and if the module may be a block of a larger model that the search for modules
    has not found.  If so, the block was planned without the rest of the model.

    ``made``: the programs that were compiled for the module.
    """
    nbytes = sum(w.nbytes for program in made for w in program.problem.weights if w.name in program.offloaded)
    if index.maybe_block and nbytes and not any(program.plan.streamed for program in made):
        warn_once(
            f"The plan streams none of the {size(nbytes)} of {type(index.root).__name__}. If it is a part of a model: "
            "gc.freeze() has hidden the others, so it was planned by itself. Call chunkflow_compile.offload(model) before "
            "the first call."
        )


def warn_of_small_weights(model: nn.Module, min_bytes: int | None = None) -> None:
    """Warn, once per process and class, if all weights of a model are too small to be streamed.

    ``min_bytes``: the size in bytes below which weights are not streamed; by default the value of the model's placement.
    """
    if reason := why_nothing_streams(model, min_bytes):
        warn_once(f"{type(model).__name__}: {reason}")


def _large_bytes(weights: Iterable[torch.Tensor], min_bytes: int) -> int:
    return sum(w.nbytes for w in {id(w): w for w in weights}.values() if w.nbytes >= min_bytes)


@functools.cache  # all blocks in a process together cause only one warning
def warn_once(said: str) -> None:
    """Log a warning, unless this process has already logged the same warning."""
    _log.warning("%s", said)


def guard_hooks() -> None:
    """Make the running compilation add guards on the hooks of modules.

    By default, Dynamo omits these guards for speed.  Without these guards, a block with hooks could run code that was
    compiled for a block without hooks.
    """
    if not config.skip_nnmodule_hook_guards:  # the guards are already on, for example since an earlier call
        return
    guarded = contextlib.ExitStack()
    guarded.enter_context(config.patch(skip_nnmodule_hook_guards=False))

    def ends(_: object) -> None:
        guarded.close()
        # assign a new list: Dynamo is iterating over the old list, and each callback must be called
        callback_handler.end_callbacks = [c for c in callback_handler.end_callbacks if c != ends]

    callback_handler.register_end_callback(ends)


def note_graph_break(graph: GraphModule) -> None:
    """If ``graph`` ends at a graph break, log the break and explain how it slows the model down."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        where = "".join(f" at {f.filename}:{f.lineno}" for f in reason.user_stack[-1:])
        _log.warning(
            "graph break%s: %s. The model runs in parts; until their order has repeated, each part fetches its weights when "
            "it starts. Compile with fullgraph=True to see the cause.",
            where,
            reason.reason.splitlines()[0],
        )


def note_estimates(traced: Traced, note: Callable[[str], object]) -> None:
    """Report the tensor sizes in a graph that depend on data, and the values that the plan assumes for these sizes.

    ``note``: a function that takes the text of the report.
    """
    if guesses := ", ".join(f"{name} for {traced.sizes[name]}" for name in traced.unknown):
        note(f"sizes that depend on data: the plan takes {guesses}, so its FLOPs, bytes and times are estimates")


def note_ops_of_others(traced: Traced, note: Callable[[str], object]) -> None:
    """Report the ops of a graph that have no FLOP formula, and log a warning about each op once per process.

    ``note``: a function that takes the text of the report.
    """
    computing = [n for n in traced.graph.graph.nodes if collective_kind(n) is None]
    for name, sentence in without_formula(computing).items():
        if "::" in name:
            sentence += " If ranks exchange data in it, declare that too, with chunkflow_compile.register_collective."
        note(sentence)
        warn_once(sentence)


def is_part(weights: Iterable[torch.Tensor], root: nn.Module | None, min_bytes: int) -> bool:
    """Whether a Dynamo graph covers only a part of a model, so that a call of the model runs other graphs, too.

    A graph counts as a part if ``weights``, the weights that it reads, have at most half of the bytes of the model's large
    weights.  Even a graph of a whole model can leave some of these bytes unread, because a model may contain weights that its
    forward never uses.
    """
    if root is None:
        return False
    mine, all_of_them = (
        sum(t.nbytes for t in {id(t): t for t in tensors}.values() if t.nbytes >= min_bytes)
        for tensors in (weights, leaves_of(root))
    )
    return 2 * mine <= all_of_them


def bytes_outside(root: nn.Module | None, read: Iterable[torch.Tensor], min_bytes: int, part: bool) -> int:
    """Return the total bytes of the weights on the device that belong to a model, but that a Dynamo graph does not read.

    ``read``: the weights that the graph reads.  ``part``: whether the graph covers only a part of the model.  If so, large
    weights are not counted, because they will move to host memory when the other parts are compiled.
    """
    if root is None:
        return 0
    inputs, filled = {id(t) for t in read}, filled_by(root)
    outside = {
        id(t): t.nbytes
        for t in leaves_of(root)
        if id(t) not in inputs
        and not isinstance(t, HostWeight)
        and not (part and (t.nbytes >= min_bytes or id(t) in filled))
    }
    return sum(outside.values())


def refuse_decisions_of_a_rank(root: nn.Module, graph: GraphModule) -> None:
    """Raise ChunkflowError if ranks exchange activations in blocks that a step cache may skip on one rank only.

    A cache that compares activations may decide differently on each rank, because each rank has different activations.  So
    one rank could skip an exchange while another rank waits for it.
    """
    names = {name for m in root.modules() for name in hooks_of(m)}
    if _DECIDES_BY_VALUES & names and any(_is_exchange(node) for node in graph.graph.nodes):
        raise ChunkflowError(
            "FirstBlockCache compares activations, of which each rank has its own part, so the ranks may decide otherwise "
            "and one would wait for the other without end. Use a cache that decides by the step, such as "
            "PyramidAttentionBroadcastConfig or TaylorSeerCacheConfig, or call disable_cache()."
        )


def _is_exchange(node: Node) -> bool:
    """Whether a node of a Dynamo graph is a collective, and more than one rank runs."""
    return "_c10d_functional" in str(node.target) and dist.is_initialized() and dist.get_world_size() > 1


def refuse_gradient_buckets(graph: GraphModule) -> None:
    """Raise ChunkflowError if torch has split the model's graph into the gradient buckets of DistributedDataParallel.

    If torch has split a graph in this way, it passes weights without values to the backend, and expects that each compiled
    part returns its outputs in another type than usual.
    """
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is not None and reason.reason.startswith("DDPOptimizer"):
        raise ChunkflowError(
            "This model is wrapped in DistributedDataParallel, and torch splits its graph into buckets of gradients, which "
            "inference has not: compile the module inside, torch.compile(model.module), and call that, or set "
            "torch._dynamo.config.optimize_ddp = False."
        )


def refuse_attributes(graph: GraphModule, min_bytes: int) -> None:
    """Raise ChunkflowError if large weights are attributes of a Dynamo graph instead of inputs."""
    if nbytes := _large_bytes(graph.parameters(), min_bytes):
        raise ChunkflowError(
            f"{size(nbytes)} of parameters are attributes of the graph that the backend gets, so they cannot be streamed: "
            "compile the model itself with torch.compile, and set what you have changed in torch._dynamo.config back to its "
            "default."
        )


def refuse_gradients(inputs: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs):
        raise ChunkflowError(
            "ChunkFlow runs inference only, and gradients are enabled: call the model under torch.no_grad() or "
            "torch.inference_mode()."
        )


def fix_sizes(inputs: Sequence[Any], weights: Iterable[torch.Tensor]) -> None:
    """Specialize the symbolic sizes of weights, and of inputs with a symbolic size that is not itself an input of the graph.

    A call of int() on a symbolic size specializes it: Dynamo then uses the current value, and adds a guard on this value.
    """
    symbols = {name for value in inputs if isinstance(value, torch.SymInt) for name in symbols_of(value)}
    fixed = {id(weight) for weight in weights}
    for value in inputs:
        if isinstance(value, torch.Tensor) and (id(value) in fixed or not symbols_of(value) <= symbols):
            for size in (*value.shape, *value.stride()):
                int(size)


def with_fixed_batch(graph: GraphModule, inputs: Sequence[Any], slow: Collection[int] | None) -> list[Any]:
    """Specialize the sizes of the slow inputs of a Dynamo graph, because rows of hoisted products have a fixed size.  Return
    all inputs of the graph; in their shapes, the specialized sizes are numbers instead of symbols.

    If the graph is called with another batch size, torch recompiles it.  The image size stays symbolic.
    ``slow``: the positions of the slow inputs that the user has named, or None.  If it is None, all inputs with one value per
    sample (such as the timestep) or one vector per sample (such as the timestep embedding that blocks receive) count as slow.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    fakes = [node.meta.get("example_value") for node in nodes]
    batches = {str(fake.shape[0]) for fake in fakes if isinstance(fake, torch.Tensor) and fake.dim() > 2}
    for index, fake in enumerate(fakes):
        if not isinstance(fake, torch.Tensor):
            continue
        values = fake.is_floating_point() and fake.dim() == 1
        vectors = fake.is_floating_point() and fake.dim() == 2 and str(fake.shape[0]) in batches
        if (values or vectors) if slow is None else index in slow:
            for size in fake.shape[:1] if vectors and slow is None else fake.shape:
                int(size)  # Dynamo adds a guard on this size
    fixed = [*inputs]
    for index, (node, fake) in enumerate(zip(nodes, fakes, strict=True)):
        if isinstance(fake, torch.SymInt):
            if isinstance(_number(fake), int):
                node.replace_all_uses_with(_number(fake))
        elif type(fake) is FakeTensor and any(isinstance(s, torch.SymInt) for s in fake.shape):
            sizes, strides = map(_number, fake.shape), map(_number, fake.stride())
            with fake.fake_mode:
                fixed[index] = torch.empty_strided([*sizes], [*strides], dtype=fake.dtype, device=fake.device)
    return fixed


def _number(size: Any) -> Any:
    """Return the value of a symbolic size if it can have only one value; otherwise return the size unchanged."""
    return int(size) if isinstance(size, torch.SymInt) and not symbols_of(size) else size


def device_of(
    parameters: Mapping[tuple[int, str], torch.Tensor], inputs: Sequence[Any], graph: GraphModule
) -> torch.device:
    """Return the device of the weights.

    Raises ChunkflowError if the weights are on several devices, or if an input is on another device.  But an input may be on
    another device if ``forward`` only moves it to the device of the weights.  An example is a table that is not a buffer.
    """
    devices = {p.device for p in parameters.values()}
    if len(devices) > 1:
        raise ChunkflowError(f"The weights are on {', '.join(sorted(map(str, devices)))}: move them to one device.")
    device = devices.pop()
    for position, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor) or not value.dim() or value.device == device:
            continue
        users = graph.graph.find_nodes(op="placeholder")[position].users
        if not all(u.op == "call_method" and u.target in ("to", "cuda") for u in users):
            raise ChunkflowError(
                f"The weights are on {device}, but input {position} is on {value.device}: move the input to {device}, "
                "or place the model for the input's device with chunkflow_compile.offload(model, device)."
            )
    return device
