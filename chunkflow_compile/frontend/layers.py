"""Layers of torch outside the repeated blocks, such as a Linear: they run op by op, and are not compiled.

Compiled alone, such a layer has nothing to fuse, and its compilation takes as long as a block's.  Its forward is torch's
own, so it is traced without Dynamo, once for the sizes and attributes of a call, and its program is planned, proved and run
as any other.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import dynamo_timed
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _get_current_dispatch_mode

from chunkflow_compile.frontend.backend import compile_layer
from chunkflow_compile.frontend.block_kinds import names_read
from chunkflow_compile.runtime.codes import KEPT_SIZES
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves_of
from chunkflow_compile.weights.modules import hook_registry, is_called

# Their forwards compute from their inputs and weights alone, and write nothing.
_KINDS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLAIN = (bool, int, float, str, tuple)
# With more layers than this, a part has enough to fuse to be worth a compilation: embeddings of diffusers have one to seven.
_MOST = 8


def layers_of(part: nn.Module, min_bytes: int, name: str = "") -> dict[str, nn.Module] | None:
    """The layers that have all large weights of a part of a model: name -> layer.

    None if other code reads one of them, or if there are more than :data:`_MOST`.
    """
    found = _layers(part, min_bytes, name)
    return None if found is None or len(found) > _MOST else found


def _layers(part: nn.Module, min_bytes: int, name: str) -> dict[str, nn.Module] | None:
    if not any(leaf.nbytes >= min_bytes for leaf in leaves_of(part)):
        return {}
    if hook_registry(part) is not None or "forward" in part.__dict__ or hasattr(type(part), "chunkflow_aside"):
        return None
    if _is_layer(part):
        return {name: part}
    own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    of_torch = type(part).__module__.startswith("torch.nn.") and not isinstance(part, nn.Sequential)
    if any(t.nbytes >= min_bytes for _, t in own) or (of_torch and is_called(part)):
        return None
    if is_called(part) and {"weight", "bias"} & set(names_read(type(part))):  # perhaps those of a layer
        return None
    found = dict[str, nn.Module]()
    for child, module in part.named_children():
        inside = _layers(module, min_bytes, f"{name}.{child}".lstrip("."))
        if inside is None:
            return None
        found |= inside
    return found


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is one of :data:`_KINDS` with plain weights, or differs in what it does beside forward only."""
    return (
        any(isinstance(module, kind) and type(module).forward is kind.forward for kind in _KINDS)
        and not module._modules
        and not any(True for _ in module.buffers(recurse=False))
        and all(_kind(p) in (nn.Parameter, torch.Tensor) for p in module.parameters(recurse=False))
    )


def _kind(weight: torch.Tensor) -> type[torch.Tensor]:
    return weight.kind if isinstance(weight, HostWeight) else type(weight)


class Replacement:
    """What is called in the place of a module's forward, which is ``eager``."""

    eager: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The eager forward of the copy of the module."""
        return copy.deepcopy(self.eager, memo)


class LayerForward(Replacement):
    """The forward of a layer, as a program on the weights that are in the arena."""

    def __init__(self, layer: nn.Module, options: Mapping[str, Any]) -> None:
        self._layer = weakref.ref(layer)
        self._options = options
        self._runners: dict[Any, Any] = {}

    @property
    def eager(self) -> Any:  # type: ignore[override]
        """The layer's own forward."""
        layer: Any = self._layer()
        return type(layer).forward.__get__(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.eager(*args, **kwargs)
        inputs = [*args, *kwargs.values()]
        if not all(type(x) is torch.Tensor for x in inputs) or _get_current_dispatch_mode() is not None:
            return self.eager(*args, **kwargs)
        layer: Any = self._layer()
        weights = {name: p for name, p in layer._parameters.items() if p is not None}
        if not all(isinstance(p, (nn.Parameter, HostWeight)) for p in weights.values()):
            return self.eager(*args, **kwargs)  # torch.func.functional_call has put other tensors in their place
        key = _key(layer, [*weights.values(), *inputs], kwargs)
        runners = self._runners
        if key not in runners:
            with compile_lock:
                if key not in self._runners:
                    self._compile(layer, weights, inputs, kwargs, key)
                runners = self._runners
        runner = runners[key]
        if runner is None:
            return self.eager(*args, **kwargs)
        (output,) = runner([*weights.values(), *inputs])
        return output

    def _compile(
        self,
        layer: nn.Module,
        weights: Mapping[str, torch.Tensor],
        inputs: Sequence[Any],
        names: Collection[str],
        key: Any,
    ) -> None:
        """Keep a runner for a key; None for a forward that writes, as an Embedding with ``max_norm`` does."""
        with dynamo_timed("chunkflow.layer"):
            graph = _traced(layer, weights, inputs, names)
        runner = None
        if not any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in graph.graph.nodes):
            runner = compile_layer(graph, [*weights.values(), *inputs], layer, self._options)
        kept = {**self._runners, key: runner}  # another thread may be reading it
        self._runners = dict([*kept.items()][-KEPT_SIZES:])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the layer's own forward."""
        return self.eager.__reduce_ex__(protocol)


def _key(layer: nn.Module, tensors: Sequence[torch.Tensor], names: Collection[str]) -> Any:
    """What a trace depends on: the tensors but for their values, the attributes of the layer, and how torch is set."""
    return (
        tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors),
        tuple(names),
        tuple((name, value) for name, value in vars(layer).items() if type(value) in _PLAIN),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(tensors[0].device.type) and torch.get_autocast_dtype(tensors[0].device.type),
    )


def _traced(
    layer: nn.Module, weights: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], names: Collection[str]
) -> GraphModule:
    """One call of a layer as an ATen graph, whose inputs are the weights and then those of the call."""
    mode, device = FakeTensorMode(), next(iter(weights.values())).device

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:  # all on one device: inputs on another are refused later
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    def call(*given: torch.Tensor) -> tuple[torch.Tensor]:
        bare: Any = object.__new__(type(layer))  # without hooks, which are called outside
        bare.__dict__.update(vars(layer))
        bare.__dict__["_parameters"] = {**layer._parameters, **dict(zip(weights, given, strict=False))}
        rest = given[len(weights) :]
        by_position = len(rest) - len(names)
        return (type(layer).forward(bare, *rest[:by_position], **dict(zip(names, rest[by_position:], strict=True))),)

    graph = make_fx(call)(*map(fake, (*weights.values(), *inputs)))
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        node.meta["desc"] = PlainAOTInput(idx=index)
    return graph
