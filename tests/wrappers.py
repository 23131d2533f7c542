"""Wrappers: the code that Inductor generates around the kernels of a region, run on tensors without data.

It allocates, reuses and frees what the compiled region would, so the storages that are alive while it runs are those of a
call on a device.  No kernel is compiled, and no kernel runs.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from chunkflow_compile.passes.graph.regions import Cut

_SETTINGS = {"fx_graph_cache": False, "size_asserts": False, "alignment_asserts": False, "cpp_wrapper": False}
Call = Callable[[list[Any]], Any]


class _Generated(Exception):
    """Ends a compilation as soon as its wrapper is there."""


class _NoKernels:
    """In place of AsyncCompile and of extern_kernels: kernels do nothing, and those that allocate their result do so."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if "out" in kwargs:
                return None
            if name != "convolution":
                return lambda *operands, **more: None
            given = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
            return torch.ops.aten.convolution(*args[:2], kwargs.get("bias"), *(kwargs[n] for n in given))

        return call

    def wait(self, scope: object) -> None:
        """Kernels are there already."""


def wrapper_of(module: GraphModule) -> Call:
    """The wrapper of a region: takes a list of tensors on the meta device, which it empties."""
    code: list[str] = []

    def keep(self: GraphLowering, generated: Any) -> None:
        code.append(generated.value)
        raise _Generated

    inputs = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    fake = next((v.fake_mode for v in inputs if hasattr(v, "fake_mode")), None)
    patched = mock.patch.object(GraphLowering, "_compile_to_module_lines", keep)
    with patched, config.patch(_SETTINGS), tracing(TracingContext(fake)):
        try:
            compile_fx(copy.deepcopy(module), inputs)
        except Exception:  # torch wraps _Generated in its own
            if not code:
                raise
    wrapper = ModuleType("wrapper")
    with mock.patch("torch._inductor.async_compile.AsyncCompile", _NoKernels):
        exec(compile(code[-1].partition("if __name__")[0], "<wrapper>", "exec"), wrapper.__dict__)
    wrapper.__dict__.update(
        empty_strided_cpu=lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device="meta"),
        reinterpret_tensor=torch.as_strided,
        extern_kernels=_NoKernels(),
    )
    return wrapper.call


class _Alive(TorchDispatchMode):
    """Counts the bytes of the storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.counted: dict[int, int] = {}

    def forget(self, tensor: torch.Tensor) -> None:
        """Count its storage as nothing from now on."""
        key = tensor.untyped_storage()._cdata
        self.now -= self.counted[key]
        self.counted[key] = 0

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self.counted:
            self.counted[key] = storage.nbytes()
            self.now += self.counted[key]
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self.counted.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_on_meta, (args, kwargs or {}))
        outputs = func(*args, **kwargs)
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        return outputs


def peaks_of(cut: Cut, wrappers: dict[str, Call]) -> list[int]:
    """The most bytes alive while each region runs, without weights.  ``wrappers``: by key, to which this adds."""
    values = cut.storages.values
    weights = {w.node for w in cut.discovery.weights}
    last = {n: i for i, item in enumerate(cut.sequence) for n in _read(item)}
    kept = {n for n in values if n.op in ("placeholder", "get_attr")} | {
        *cut.source.graph.output_node().all_input_nodes
    }
    for region in cut.regions:
        if region.info.key not in wrappers:
            wrappers[region.info.key] = wrapper_of(region.module)
    alive, held, peaks = _Alive(), dict[Node, Any](), list[int]()
    with alive:
        for node in values:
            if node.op in ("placeholder", "get_attr") and isinstance(values[node], torch.Tensor):
                held[node] = _without_data(values[node])
                if node in weights or not node.users or node.op == "get_attr":
                    alive.forget(held[node])
        for i, item in enumerate(cut.sequence):
            assert not isinstance(item, Node), "no collectives here"
            arguments = [held[n] for n in item.inputs]
            alive.most = alive.now
            for node in {n for n in item.inputs if last[n] == i and n not in kept}:
                del held[node]
            held.update(zip(item.outputs, wrappers[item.info.key](arguments), strict=True))
            peaks.append(alive.most)
            for node in [n for n in item.outputs if n not in last and n not in kept]:
                del held[node]
    return peaks


def _read(item: Any) -> tuple[Node, ...]:
    return tuple(item.all_input_nodes) if isinstance(item, Node) else item.inputs


def _on_meta(value: Any) -> Any:
    """Constants, and the device of an op that takes one, as the other operands."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return _without_data(value)
    return torch.device("meta") if isinstance(value, torch.device) else value


def _without_data(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
