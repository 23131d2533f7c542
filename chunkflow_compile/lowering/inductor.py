"""A region through Inductor."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import getitem
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._sympy.symbol import SymT, symbol_is_type

from chunkflow_compile.hardware.caches import remove_torn
from chunkflow_compile.passes.graph.sizes import symbols_of
from chunkflow_compile.passes.packing import UNPACK
from chunkflow_compile.private_torch.inductor import compile_fx, config, cpu_vec_isa, select_decomp_table
from chunkflow_compile.runtime.wrapped_calls import LoweredRegion

# What Inductor asserts in each call of a region: sizes, strides and alignment of its inputs, and of outputs of kernels that
# are not its own.
_ASSERTIONS = ("size_asserts", "alignment_asserts")
# Ops that run as kernels of Inductor's own, or write what it has allocated, although torch marks them by no tag.
_REDUCTIONS = ("aten::mean", "aten::sum")
# Inductor makes an attention of these, which is a kernel of torch.
_OF_ATTENTION = ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_safe_softmax")


def through_inductor(module: GraphModule, inductor: Mapping[str, Any]) -> LoweredRegion:
    """Lower a region.  ``inductor``: the user's configuration.  Must be called inside a tracing context."""
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    options = {**({} if _needs_assertions(module, inductor) else dict.fromkeys(_ASSERTIONS, False)), **inductor}
    # Each region has a context of its own, for what AOTAutograd notes of a graph there.  Weights stay inputs, so Inductor
    # never takes memory of a slot for a buffer of its own.
    mode = TracingContext.get().fake_mode
    with tracing(TracingContext(mode)), _keyed_by_instructions(inputs), _without_floats_of_others(mode, module):
        compiled: Any = compile_fx(copy.deepcopy(module), inputs, config_patches=options)
    return _direct(_boxed(compiled, module), module)


def _needs_assertions(module: GraphModule, inductor: Mapping[str, Any]) -> bool:
    """Whether a call could be given, or make inside, what the region was not compiled for.

    Not its weights, which the plan places; nor inputs of the model, which Dynamo compares in each call; nor outputs of
    other regions, which Inductor lays out as they were traced, unless told not to.  But an op that allocates its own
    outputs may lay them out in another way than its fake ones, and a symbol has another value in each call.
    """
    if not inductor.get("keep_output_stride", config.keep_output_stride):
        return True
    return not all(_allocated_by_inductor(node) for node in module.graph.nodes if node.op != "output")


def _allocated_by_inductor(node: Node) -> bool:
    value, op = node.meta.get("val"), node.target
    if symbols_of(value) or (isinstance(value, torch.Tensor) and value.is_complex()):
        return False
    if node.op == "placeholder" or op is getitem or op is UNPACK:
        return True
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.name in _OF_ATTENTION:
        return False
    view = any(result.alias_info for result in op._schema.returns)
    own = torch.Tag.pointwise in op.tags or op in select_decomp_table() or op._schema.name in _REDUCTIONS
    return view or own


def _boxed(region: Callable[..., Sequence[Any]], module: GraphModule) -> LoweredRegion:
    """A compiled region, called with a list: the function of AOTAutograd inside, which like Inductor's code takes one.

    Only the function around it has the tensors of a module that has its own; that one holds the inputs until it returns.
    """
    inside: Any = region
    while inspect.isfunction(inside) and inside.__code__.co_flags & inspect.CO_VARARGS:
        inside = getattr(inside, "__wrapped__", None)
    if inside is not None and not any(True for _ in chain(module.parameters(), module.buffers())):
        boxed: LoweredRegion = inside
        return boxed

    @functools.wraps(region)
    def call(inputs: list[Any]) -> Sequence[Any]:
        outputs = region(*inputs)
        inputs.clear()
        return outputs

    return call


def _direct(region: LoweredRegion, module: GraphModule) -> LoweredRegion:
    """Inductor's code itself, if all that torch puts around it would only take time in a call, 6 us of it.

    The first call goes through all of that: it compares what custom ops return with their schemas, and completes Inductor's
    cache of autotuning.  So does a call in a profiler, which gets the name of the region there.
    """
    compiled: Any = inspect.unwrap(region)
    strides = getattr(compiled, "output_strides", None)
    # AOTAutograd adds outputs for what it does after the call
    whole = strides is not None and len(strides) == len(module.graph.output_node().args[0])  # type: ignore[arg-type]
    writes = getattr(compiled, "mutated_input_idxs", True)
    if not whole or writes or not getattr(compiled, "_boxed_call", False) or not _needs_no_wrapper(module):
        return region
    profiler, called = torch.autograd.profiler, False

    def call(inputs: list[Any]) -> Sequence[Any]:
        nonlocal called
        if called and not profiler._is_profiler_enabled:
            outputs: Sequence[Any] = compiled.current_callable(inputs)
            return outputs
        outputs = region(inputs)
        called = True
        return outputs

    return call


def _needs_no_wrapper(module: GraphModule) -> bool:
    """Whether AOTAutograd has nothing to do around a region: it takes and returns plain tensors and numbers, returns no
    view of an input, writes nothing, holds no tensors of its own, and leaves torch's modes as they are."""
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    (returned,) = module.graph.output_node().args
    outputs = [node.meta["val"] if isinstance(node, Node) else node for node in returned]  # type: ignore[union-attr]
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    memory = {value.untyped_storage()._cdata for value in tensors}
    plain = all(not isinstance(v, torch.Tensor) or type(v) is FakeTensor for v in (*inputs, *outputs))
    views = any(isinstance(v, torch.Tensor) and v.untyped_storage()._cdata in memory for v in outputs)
    ops = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    return plain and not views and len({*map(id, tensors)}) == len(tensors) and all(map(_only_computes, ops))


def _only_computes(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return node.op == "call_function" and not node.target._schema.is_mutable
    return node.target is getitem or isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


@contextlib.contextmanager
def _without_floats_of_others(mode: FakeTensorMode | None, module: GraphModule) -> Iterator[None]:
    """Hide the symbols of floats that a region does not use from AOTAutograd.

    It has made tensors of the floats in the graph before that was cut.  It looks for them in each region again, and would
    let Dynamo start anew, with the value of this call as a constant, for each that it does not find there.
    """
    hints: dict[Any, Any] = {} if mode is None or mode.shape_env is None else mode.shape_env.backed_var_to_val
    used = symbols_of([node.meta.get("val") for node in module.graph.nodes])
    hidden = {s: v for s, v in hints.items() if symbol_is_type(s, SymT.FLOAT) and s.name not in used}
    for symbol in hidden:
        del hints[symbol]
    try:
        yield
    finally:
        hints.update(hidden)


@contextlib.contextmanager
def _keyed_by_instructions(inputs: Sequence[Any]) -> Iterator[None]:
    """Put the vector instructions into the keys of Inductor's caches, for a region on the CPU.

    They leave them out, and the layout of a kernel's constants depends on them: on a CPU with others, a region from a
    shared cache or a saved file would give wrong numbers.
    """
    if not any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in inputs):
        yield
        return
    _remove_torn()
    settings: Any = torch.compiler.config
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag}{cpu_vec_isa.pick_vec_isa()}"):
        yield


@functools.cache  # once per process
def _remove_torn() -> None:
    """Before Inductor loads a library for each candidate: it drops instructions whose library was written only in part."""
    remove_torn()
