"""Lowering of a region with Inductor."""

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
from chunkflow_compile.passes.graph.symbolic_sizes import symbols_of
from chunkflow_compile.passes.packing import UNPACK
from chunkflow_compile.private_torch.inductor import compile_fx, config, cpu_vec_isa, select_decomp_table
from chunkflow_compile.runtime.wrapped_calls import LoweredRegion

# Options for the assertions that Inductor's code makes in each call of a region.  These assertions check the sizes, strides
# and alignment of the inputs, and of the outputs of kernels that Inductor did not generate.
_ASSERTIONS = ("size_asserts", "alignment_asserts")
# The names of reductions.  Like pointwise ops, reductions write to outputs that Inductor has allocated, but torch has no tag
# for reductions.
_REDUCTIONS = ("aten::mean", "aten::sum")
# Ops that Inductor may replace by torch's attention kernel, which allocates its own outputs.
_FUSED_INTO_ATTENTION = ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_safe_softmax")


def through_inductor(module: GraphModule, inductor: Mapping[str, Any]) -> LoweredRegion:
    """Lower a region with Inductor.  ``inductor``: the user's Inductor configuration.  This function must be called inside a
    TracingContext."""
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    options = {**({} if _needs_assertions(module, inductor) else dict.fromkeys(_ASSERTIONS, False)), **inductor}
    # Each region gets its own tracing context, in which AOTAutograd records metadata of the graph.  Weights remain inputs,
    # so Inductor never reuses the memory of a weight for one of its buffers.
    mode = TracingContext.get().fake_mode
    with tracing(TracingContext(mode)), _vector_isa_in_cache_keys(inputs), _unused_floats_hidden(mode, module):
        compiled: Any = compile_fx(copy.deepcopy(module), inputs, config_patches=options)
    return _without_wrappers(_boxed(compiled, module), module)


def _needs_assertions(module: GraphModule, inductor: Mapping[str, Any]) -> bool:
    """Return whether a call might receive or create tensors with other sizes or strides than the region was compiled for.

    The inputs of a region need no check: the plan fixes the layout of the weights, Dynamo's guards check the inputs of the
    model, and Inductor gives the outputs of other regions the strides of the trace, unless its configuration turns this off.
    Assertions are needed in two cases: an op allocates its own outputs, whose layout may differ from the trace, or a size is
    symbolic and may have another value in each call.
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
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.name in _FUSED_INTO_ATTENTION:
        return False
    view = any(result.alias_info for result in op._schema.returns)
    own = torch.Tag.pointwise in op.tags or op in select_decomp_table() or op._schema.name in _REDUCTIONS
    return view or own


def _boxed(region: Callable[..., Sequence[Any]], module: GraphModule) -> LoweredRegion:
    """Return a compiled region as a function that takes its inputs in a list.

    The inner function that AOTAutograd wraps already takes a list.  The inner function is used unless the module has its own
    parameters or buffers, which only the outer function passes on.  The disadvantage of the outer function is that it keeps
    the inputs alive until it returns.
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


def _without_wrappers(region: LoweredRegion, module: GraphModule) -> LoweredRegion:
    """Return Inductor's code without the wrappers of torch if these wrappers have no effect.  The wrappers take 6 us per
    call.

    The first call still runs all wrappers, because they compare the results of custom ops with the schemas of these ops, and
    complete Inductor's autotuning cache.  Under a profiler, all calls run the wrappers, because the wrappers record the name
    of the region.
    """
    compiled: Any = inspect.unwrap(region)
    strides = getattr(compiled, "output_strides", None)
    # if AOTAutograd has work to do after the call, it adds outputs
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
    """Return whether AOTAutograd has nothing to do before and after a call of a region.

    This is the case if the region takes and returns only ordinary tensors and numbers, returns no view of an input, writes
    to no input, has no parameters or buffers, and does not change global modes of torch such as autograd.
    """
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
def _unused_floats_hidden(mode: FakeTensorMode | None, module: GraphModule) -> Iterator[None]:
    """A context that hides from AOTAutograd the symbols of those float inputs that a region does not use.

    AOTAutograd already turned the float inputs of the model into tensors before the graph was cut into regions.  When it
    later compiles a region, it looks for the symbols of all these inputs in the region.  If AOTAutograd does not find the
    symbol of a float in the region, it makes Dynamo trace the model again, with this float as a constant.
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
def _vector_isa_in_cache_keys(inputs: Sequence[Any]) -> Iterator[None]:
    """For a region on the CPU, add the vector instruction set to the keys of Inductor's caches.

    By default, Inductor's cache keys do not contain the instruction set, although the layout of a kernel's constants depends
    on it.  Code that was cached on one CPU would therefore compute wrong results on a CPU with another instruction set.
    """
    if not any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in inputs):
        yield
        return
    _remove_torn()
    settings: Any = torch.compiler.config
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag}{cpu_vec_isa.pick_vec_isa()}"):
        yield


@functools.cache  # so that it runs once per process
def _remove_torn() -> None:
    """Remove truncated libraries from Inductor's cache.  To find out which instruction sets work, Inductor loads one library
    per instruction set.  Inductor rejects an instruction set if its library is truncated."""
    remove_torn()
