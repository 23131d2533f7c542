"""Lowering of a region to a TensorRT engine with ``torch_tensorrt.dynamo``.  Weights are inputs of the engine.

This module is experimental: it is written for the published interface of torch-tensorrt 2.11 to 2.14, but not yet tested on
a GPU.  The tests only check that the functions and arguments that it uses exist in these releases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from chunkflow_compile.hardware.machine import install_line
from chunkflow_compile.passes.errors import ChunkflowError, first_line

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule

    from chunkflow_compile.runtime.wrapped_calls import LoweredRegion

# With these settings, a region is either compiled as a whole, or not at all, and then an error says why.  Engines are kept in
# memory only, because Inductor's cache cannot store them.  By default, torch-tensorrt assumes that every attention mask is
# causal, and drops the mask.
SETTINGS = {
    "require_full_compilation": True,
    "min_block_size": 1,
    "truncate_double": True,
    "use_python_runtime": False,
    "attn_bias_is_causal": False,
}


def why_not_tensorrt(device: torch.device | None = None) -> str | None:
    """Return the reason why no TensorRT engine can be built on this machine, or None if engines can be built.  ``device``:
    the device on which the engine is to run; None means the GPU of this machine."""
    if find_spec("torch_tensorrt") is None:
        return f"torch-tensorrt is not installed: {install_line('tensorrt')}, in the release of your torch"
    import torch  # imported here, because chunkflow doctor calls this function and must be fast

    if (device is not None and device.type != "cuda") or not torch.cuda.is_available():
        return "TensorRT needs a GPU"
    try:
        import_module("torch_tensorrt.dynamo")
    except Exception as error:  # noqa: BLE001  (what a missing library raises depends on the release)
        return f"torch-tensorrt cannot be imported: {first_line(error)}"
    return None


def check_tensorrt(device: torch.device) -> None:
    """Raise ChunkflowError if no TensorRT engine can be built for a device."""
    if (reason := why_not_tensorrt(device)) is not None:
        raise ChunkflowError(f"lowering='tensorrt' cannot be used on {device}: {reason}. Use lowering='inductor'.")


def through_tensorrt(module: GraphModule) -> LoweredRegion:
    """Lower a region to a TensorRT engine.  For ops, dtypes or sizes that torch-tensorrt does not support, raises any error
    that torch-tensorrt raises."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from chunkflow_compile.passes.graph.symbolic_sizes import symbols_of

    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    (outputs,) = module.graph.output_node().args
    wanted = [n.meta["val"] for n in outputs]  # type: ignore[union-attr]
    if any(not isinstance(v, torch.Tensor) or symbols_of(v) for v in (*inputs, *wanted)):
        raise NotImplementedError("sizes that are open; give dynamic=False")
    interface: Any = import_module("torch_tensorrt")
    with FakeTensorMode():
        exported = torch.export.export(module, tuple(_empty_like(v, v.stride()) for v in inputs))
    engine = interface.dynamo.compile(
        exported,
        arg_inputs=[interface.Input(shape=tuple(v.shape), dtype=v.dtype) for v in inputs],
        device=inputs[0].device,
        **SETTINGS,
    )
    if not any(type(m).__module__.startswith("torch_tensorrt") for m in engine.modules()):
        # torch-tensorrt returned the graph unchanged, despite the settings
        raise NotImplementedError("none of its ops is supported")
    return _with_strides(engine, [v.stride() for v in wanted])


def _with_strides(engine: Callable[..., Any], strides: Sequence[tuple[int, ...]]) -> LoweredRegion:
    """Wrap an engine such that its outputs have the given ``strides``.  The outputs of an engine are contiguous, but the
    regions that read them were lowered for the strides of the trace.
    """
    import torch

    def call(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        result = engine(*(value.contiguous() for value in inputs))  # the engine keeps the inputs alive until it returns
        inputs.clear()
        outputs = [result] if isinstance(result, torch.Tensor) else [*result]
        return [o if o.stride() == s else _empty_like(o, s).copy_(o) for o, s in zip(outputs, strides, strict=True)]

    return call


def _empty_like(value: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a new tensor with the shape, dtype and device of ``value`` and the given strides.  Inside a FakeTensorMode,
    this is a fake tensor."""
    import torch

    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
