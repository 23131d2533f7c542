"""A region as a TensorRT engine whose weights are inputs, by ``torch_tensorrt.dynamo``.

Experimental: written to the published interface of torch-tensorrt 2.11 to 2.14, and never run.  Its names and arguments are
compared with those releases in the tests.
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

# The whole region, or an error that says why not; engines are kept in memory only, because Inductor's cache has no place
# for them.  By default torch-tensorrt takes every mask of an attention for a causal one, and leaves it out.
SETTINGS = {
    "require_full_compilation": True,
    "min_block_size": 1,
    "truncate_double": True,
    "use_python_runtime": False,
    "attn_bias_is_causal": False,
}


def why_not_tensorrt(device: torch.device | None = None) -> str | None:
    """Why no engine can be built here, None if one can.  ``device``: to run on, None for this machine's GPU."""
    if find_spec("torch_tensorrt") is None:
        return f"torch-tensorrt is not installed: {install_line('tensorrt')}, in the release of your torch"
    import torch  # chunkflow doctor asks, and answers at once

    if (device is not None and device.type != "cuda") or not torch.cuda.is_available():
        return "TensorRT needs a GPU"
    try:
        import_module("torch_tensorrt.dynamo")
    except Exception as error:  # noqa: BLE001  (what a missing library raises depends on the release)
        return f"torch-tensorrt cannot be imported: {first_line(error)}"
    return None


def check_tensorrt(device: torch.device) -> None:
    """Raise ChunkflowError if no engine can be built for a device."""
    if (reason := why_not_tensorrt(device)) is not None:
        raise ChunkflowError(f"lowering='tensorrt' cannot be used on {device}: {reason}. Use lowering='inductor'.")


def through_tensorrt(module: GraphModule) -> LoweredRegion:
    """The region as an engine.  Raises whatever torch-tensorrt raises for an op, type or size that it does not support."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from chunkflow_compile.passes.graph.sizes import symbols_of

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
        raise NotImplementedError("none of its ops is supported")  # the graph as it was, whatever the settings
    return _in_layout(engine, [v.stride() for v in wanted])


def _in_layout(engine: Callable[..., Any], strides: Sequence[tuple[int, ...]]) -> LoweredRegion:
    """An engine's outputs are contiguous; the regions after it were lowered for the strides of the trace."""
    import torch

    def call(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        result = engine(*(value.contiguous() for value in inputs))  # holds them until it returns
        inputs.clear()
        outputs = [result] if isinstance(result, torch.Tensor) else [*result]
        return [o if o.stride() == s else _empty_like(o, s).copy_(o) for o, s in zip(outputs, strides, strict=True)]

    return call


def _empty_like(value: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A new tensor of the same shape with this stride, fake inside a fake mode."""
    import torch

    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
